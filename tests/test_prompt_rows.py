"""Prompts from Parquet files and Hugging Face datasets, and prompts that are chats."""

import datetime
import json
from dataclasses import asdict
from decimal import Decimal

import pytest
import torch

from tests.test_prompts import NO_PROMPTS, TEMPLATE, make_tokenizer
from trainers.arithmetic import ConfigError, check
from trainers.config import DataConfig
from trainers.dry_run import dry_run
from trainers.engines import Completion
from trainers.environments import Prompt, Sample
from trainers.prompts import load_prompts, tokenize_prompts
from trainers.rewards import dump
from trainers.rollout import pack
from trainers.settings import load_config

parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `data`")
datasets = pytest.importorskip("datasets", reason="needs the extra `data`")
import pyarrow  # noqa: E402

ROWS = [
    {"prompt": "one", "answer": 4, "day": datetime.date(2024, 2, 29), "cost": Decimal("1.50"), "raw": b"\xff",
     "tags": ["a"]},
    {"prompt": "", "answer": None, "day": None, "cost": Decimal("2.00"), "raw": b"", "tags": []},
]  # fmt: skip
EXPECTED = [
    Prompt("one", {"answer": 4, "day": "2024-02-29", "cost": "1.50", "raw": "\\xff", "tags": ["a"]}),
    Prompt("", {"answer": None, "day": None, "cost": "2.00", "raw": "", "tags": []}),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def load(source, **settings):
    return load_prompts(DataConfig(prompts=str(source), **settings), NO_PROMPTS)


def written(tmp_path, rows):
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet(tmp_path):
    path = written(tmp_path, ROWS)
    assert load(path) == EXPECTED
    assert [p.text for p in load(written(tmp_path, [{"q": str(i)} for i in range(2500)]), prompt_key="q")] == [
        str(i) for i in range(2500)
    ]


def test_a_saved_dataset_and_a_split_of_several(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    assert load(tmp_path / "one") == EXPECTED
    data.select([1, 0]).save_to_disk(tmp_path / "picked")  # rows behind an index
    assert load(tmp_path / "picked") == EXPECTED[::-1]
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert load(tmp_path / "two") == EXPECTED
    assert load(tmp_path / "two" / "test") == EXPECTED[1:]
    datasets.DatasetDict(test=data.select([1])).save_to_disk(tmp_path / "only")
    assert load(tmp_path / "only") == EXPECTED[1:]
    datasets.DatasetDict(a=data, b=data).save_to_disk(tmp_path / "ab")
    with pytest.raises(ValueError, match=f"no split 'train' among a, b: name one, as in {tmp_path / 'ab' / 'a'}"):
        load(tmp_path / "ab")


def test_a_dataset_by_name(tmp_path, monkeypatch):
    """The hub is not asked: a folder with data files is a dataset's name too."""
    folder = tmp_path / "made"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[1:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: [{split: train, path: train.parquet}, "
        "{split: test, path: test.parquet}]\n"
        "- config_name: odd\n  data_files: [{split: train, path: test.parquet}]\n---\n"
    )
    assert load(f"hf:{folder}") == EXPECTED
    assert load(f"hf:{folder}:test") == EXPECTED[1:]
    assert load(f"hf:{folder}:odd:train") == EXPECTED[1:]
    with pytest.raises(ValueError, match=r"data.prompts='hf:.*:dev' cannot be read: ValueError: Unknown split"):
        load(f"hf:{folder}:dev")


def test_values_are_stored_not_decoded(tmp_path):
    """A picture would need a package to decode it, which no text prompt waits for."""
    picture = {"bytes": b"no picture", "path": None}
    data = datasets.Dataset.from_list([{"prompt": "x", "image": picture}], features=datasets.Features(
        prompt=datasets.Value("string"), image=datasets.Image()))  # fmt: skip
    data.save_to_disk(tmp_path / "d")
    assert load(tmp_path / "d") == [Prompt("x", {"image": {"bytes": "no picture", "path": None}})]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}], "p.parquet: row 1: 'prompt' must be a text .*, got NoneType"),
        ([{"prompt": 3}], "p.parquet: row 0: 'prompt' must be a text or a list of messages, got int"),
        ([{"promt": "a"}], r"row 0: no key 'prompt' \(data.prompt_key\); did you mean promt\?; keys: \['promt'\]"),
        ([], "has no prompts"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_the_row(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, rows))


def test_what_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"data.prompts='.*bad.parquet' cannot be read as Parquet: "):
        load(tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="data.prompts='hf:no/such' cannot be read: "):
        load("hf:no/such")
    with pytest.raises(FileNotFoundError, match="the folder holds no dataset of datasets.save_to_disk"):
        load(tmp_path)

    def import_module(wanted):
        raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted.partition(".")[0])

    monkeypatch.setattr("trainers.extras.import_module", import_module)
    with pytest.raises(ImportError, match=r'datasets is not installed: pip install "fastppo\[data\]"'):
        load("hf:no/such")
    with pytest.raises(ImportError, match=r'pyarrow is not installed: pip install "fastppo\[data\]"'):
        load(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("hf:", "expected hf:<name>, hf:<name>:<split> or hf:<name>:<config>:<split>"),
        ("hf:a::b", "expected hf:<name>"),
        ("hf:a:b:c:d", "expected hf:<name>"),
        ("tests", "the folder holds no dataset of datasets.save_to_disk"),
        ("no.parquet", "there is no such file"),
    ],
)
def test_the_settings_are_checked_without_reading(source, problem, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    with pytest.raises(ConfigError) as error:
        check(load_config(None, [f"data.prompts={source}"]))
    assert str(error.value).startswith(f"data.prompts={source}: {problem}")


def test_a_dry_run_downloads_no_dataset():
    plan = dry_run(load_config(None, ["data.prompts=hf:some/dataset:train", "policy.model_name=tiny-llama"]))
    assert "prompts   hf:some/dataset:train, which only a run reads" in plan


def test_metadata_can_be_saved_and_dumped(tmp_path):
    """A checkpoint is read with weights_only=True; metadata given to `train` may hold anything, and is dumped too."""
    (prompt,) = load(written(tmp_path, ROWS[:1]))
    torch.save(asdict(prompt), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["metadata"] == EXPECTED[0].metadata
    batch = pack([[5]], [Completion([8], [-1.0], "stop", 0)])
    batch.samples = [Sample(Prompt("x", {"day": datetime.date(2024, 2, 29)}), (5,), (8,), "x", "stop")]
    dump(batch.samples, tmp_path / "failed.jsonl")
    assert json.loads((tmp_path / "failed.jsonl").read_text())["prompt"]["metadata"] == {"day": "2024-02-29"}


# --- chats -------------------------------------------------------------------------------------------------------


def turns(*contents, roles=("user", "assistant", "user")):
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def ids_of(prompts, template=TEMPLATE, **settings):
    settings = {"chat_template": True} | settings
    return [p.ids for p in tokenize_prompts(prompts, make_tokenizer(template=template), DataConfig(**settings))]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "dataset"])
def test_chats_are_rendered_by_the_template(tmp_path, form):
    """Ids: [user] 2, [system] 3, [assistant] 4, a b c 5 6 7."""
    chats = [turns("a b"), turns("a", "b", "c"), turns("c", "a", roles=("system", "user"))]
    chats[1][1]["name"] = None  # a column that other rows use
    rows = [{"messages": chat, "level": i} for i, chat in enumerate(chats)]
    path = tmp_path / f"p.{form}"
    if form == "parquet":
        written(tmp_path, rows)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    prompts = load(path, prompt_key="messages", chat_template=True)
    assert ids_of(prompts) == [(2, 5, 6, 4), (2, 5, 4, 6, 2, 7, 4), (3, 7, 2, 5, 4)]
    assert ids_of(prompts[:2], system_prompt="c") == [(3, 7, 2, 5, 6, 4), (3, 7, 2, 5, 4, 6, 2, 7, 4)]
    assert [prompt.metadata for prompt in prompts] == [{"level": i} for i in range(3)]
    assert [prompt.text for prompt in prompts] == ["a b", "user: a\nassistant: b\nuser: c", "system: c\nuser: a"]
    assert prompts[1].messages[1] == {"role": "assistant", "content": "b"}


def test_earlier_turns_of_the_assistant_are_never_trained():
    (ids,) = ids_of([Prompt("", messages=tuple(turns("a", "b", "c")))])
    batch = pack([ids], [Completion([6, 1], [-1.0] * 2, "stop", 0)])
    assert ids.count(6) == 1 and batch.tokens.tolist() == [*ids, 6, 1]
    assert batch.mask.tolist() == [False] * len(ids) + [True, True]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "'prompt' has no messages"),
        (["hello"], "message 0 must be {role: text, content: text}, got 'hello'"),
        ([{"role": "user"}], "message 0 must be {role: text, content: text}, got {'role': 'user'}"),
        ([*turns("a", "b")], "the last message is the assistant's"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "message 0 must be {role: text, content: text}",
        ),
    ],
)
def test_chats_that_are_none(tmp_path, prompt, message):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": prompt}) + "\n")
    with pytest.raises(ValueError) as error:
        load(tmp_path / "p.jsonl")
    assert str(error.value).startswith(f"{tmp_path / 'p.jsonl'}:2: 'prompt'") and message in str(error.value)


def test_chats_need_the_template_and_one_system_turn():
    chat = Prompt("", messages=tuple(turns("c", "a", roles=("system", "user"))))
    with pytest.raises(ValueError, match="prompt 0 is a list of chat messages, which needs data.chat_template=true"):
        ids_of([chat], chat_template=False)
    with pytest.raises(ValueError, match="prompt 1 has a system turn of its own, beside that of data.system_prompt"):
        ids_of([Prompt("a"), chat], system_prompt="b")
