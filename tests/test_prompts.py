"""Prompts: reading, tokenising, and a loader that goes on where it stopped."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from trainers.config import DataConfig, EnvConfig
from trainers.environments import Prompt, make_environment
from trainers.environments.function import FunctionEnvironment
from trainers.prompts import PromptLoader, TokenizedPrompt, load_prompts, tokenize_prompts

NO_PROMPTS = FunctionEnvironment(len)
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = ["<s>", "</s>", "[user]", "[system]", "[assistant]", "a", "b", "c"]  # position = id


def make_tokenizer(*, adds_bos: bool = False, bos: bool = True, template: str | None = None):
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>"} if bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", **special)
    tokenizer.chat_template = template
    return tokenizer


# --- load_prompts ------------------------------------------------------------------------------------------------


def write(tmp_path, content: str | bytes) -> DataConfig:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return DataConfig(prompts=str(path))


def test_jsonl_with_metadata(tmp_path):
    data = write(
        tmp_path, '{"prompt": "one\u2028line", "answer": 4}\n\n{"level": [1], "prompt": ""}\r\n{"prompt": "x"}'
    )
    assert load_prompts(data, NO_PROMPTS) == [
        Prompt("one\u2028line", {"answer": 4}),
        Prompt("", {"level": [1]}),
        Prompt("x"),
    ]
    data = write(tmp_path, '\ufeff{"question": "q", "prompt": "p"}\n')
    data.prompt_key = "question"
    assert load_prompts(data, NO_PROMPTS) == [Prompt("q", {"prompt": "p"})]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        (b'{"prompt": "x"', r'jsonl:2: expected a JSON object, got .\{"prompt": "x".: Expecting'),
        (b'["x"]', "jsonl:2: expected a JSON object, got list"),
        (b'{"promt": "x"}', r"jsonl:2: no key 'prompt' \(data.prompt_key\); did you mean promt\?; keys: \['promt'\]"),
        (b'{"prompt": 3}', "jsonl:2: 'prompt' must be a text or a list of messages, got int"),
        (b'{"prompt": "\xff"}', "jsonl:2: expected a JSON object.*utf-8"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, second_line, message):
    data = write(tmp_path, b'{"prompt": "fine"}\n' + second_line + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(data, NO_PROMPTS)
    assert str(error.value).startswith(data.prompts)


def test_no_prompts(tmp_path):
    with pytest.raises(ValueError, match="has no prompts"):
        load_prompts(write(tmp_path, "\n \n"), NO_PROMPTS)
    with pytest.raises(ValueError, match="no prompts of its own: set data.prompts to a JSONL file"):
        load_prompts(DataConfig(), NO_PROMPTS)
    with pytest.raises(FileNotFoundError, match="data.prompts='missing.jsonl': there is no such file"):
        load_prompts(DataConfig(prompts="missing.jsonl"), NO_PROMPTS)


def test_environments_own_prompts(tmp_path):
    copy = make_environment(EnvConfig(name="copy", size=3))
    assert load_prompts(DataConfig(), copy) == copy.prompts()
    with pytest.raises(ValueError, match="can only score its own prompts"):
        load_prompts(write(tmp_path, '{"prompt": "x"}'), copy)


# --- tokenize_prompts --------------------------------------------------------------------------------------------


def ids_of(prompts, tokenizer, **settings):
    return [prompt.ids for prompt in tokenize_prompts(prompts, tokenizer, DataConfig(**settings))]


def test_plain_texts_and_given_ids():
    prompts = [Prompt("a b"), Prompt("ignored", ids=(0, 0, 7)), Prompt("c")]
    tokenized = tokenize_prompts(prompts, make_tokenizer(), DataConfig())
    assert [(p.index, p.ids, p.prompt, p.truncated) for p in tokenized] == [
        (0, (5, 6), prompts[0], False),
        (1, (0, 0, 7), prompts[1], False),
        (2, (7,), prompts[2], False),
    ]


def test_bos_is_never_doubled():
    assert ids_of([Prompt("a"), Prompt("<s> a")], make_tokenizer(adds_bos=True)) == [(0, 5), (0, 5)]
    chat = make_tokenizer(adds_bos=True, template="<s> " + TEMPLATE)
    assert ids_of([Prompt("a")], chat, chat_template=True) == [(0, 2, 5, 4)]


def test_chat_template():
    chat = make_tokenizer(template=TEMPLATE)
    assert ids_of([Prompt("a b")], chat, chat_template=True) == [(2, 5, 6, 4)]
    assert ids_of([Prompt("a")], chat, chat_template=True, system_prompt="b") == [(3, 6, 2, 5, 4)]
    assert ids_of([Prompt("a")], chat) == [(5,)]


def test_empty_prompt():
    assert ids_of([Prompt("")], make_tokenizer()) == [(0,)]
    assert ids_of([Prompt("x", ids=())], make_tokenizer()) == [(0,)]
    with pytest.raises(ValueError, match="prompt 1 has no tokens, and the tokenizer has no beginning-of-sequence"):
        ids_of([Prompt("a"), Prompt("")], make_tokenizer(bos=False))


def test_overlong_prompts(caplog):
    prompts = [Prompt("a"), Prompt("a b c"), Prompt("b c"), Prompt("<s> a a b c")]
    tokenizer = make_tokenizer()
    dropped = tokenize_prompts(prompts, tokenizer, DataConfig(max_prompt_length=2, overlong_prompts="drop"))
    assert [(p.index, p.ids) for p in dropped] == [(0, (5,)), (2, (6, 7))]
    assert "max_prompt_length=2: dropped 2 of 4 prompts, the first is prompt 1 with 3 tokens" in caplog.text

    cut = tokenize_prompts(prompts, tokenizer, DataConfig(max_prompt_length=2, overlong_prompts="truncate"))
    assert [(p.ids, p.truncated) for p in cut] == [((5,), False), ((6, 7), True), ((6, 7), False), ((0, 7), True)]
    assert "max_prompt_length=2: truncated 2 of 4 prompts" in caplog.text
    assert ids_of(prompts[3:], tokenizer, max_prompt_length=1, overlong_prompts="truncate") == [(7,)]

    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, more than data.max_prompt_length=2"):
        ids_of(prompts, tokenizer, max_prompt_length=2, overlong_prompts="error")
    with pytest.raises(ValueError, match="dropped 2 of 2 prompts, .*: none is left"):
        ids_of([prompts[1], prompts[3]], tokenizer, max_prompt_length=2)


def test_limit_is_inclusive_and_silent(caplog):
    assert ids_of([Prompt("a b c")], make_tokenizer(), max_prompt_length=3) == [(5, 6, 7)]
    assert caplog.text == ""


@pytest.mark.parametrize("bad", [8, -1])
def test_id_outside_the_vocabulary(bad):
    with pytest.raises(ValueError, match=f"prompt 1: token id {bad} is outside the vocabulary of 8"):
        ids_of([Prompt("a"), Prompt("", ids=(5, bad))], make_tokenizer())


def test_vocabulary_of_the_model():
    prompts = [Prompt("a"), Prompt("a c")]
    with pytest.raises(ValueError, match="prompt 1: token id 7 is outside the vocabulary of 7"):
        tokenize_prompts(prompts, make_tokenizer(), DataConfig(), vocab_size=7)
    prompts = [Prompt("", ids=(9,))]  # an embedding may have more rows than the tokenizer has words
    assert tokenize_prompts(prompts, make_tokenizer(), DataConfig(), vocab_size=10)[0].ids == (9,)


@pytest.mark.parametrize(
    ("settings", "template", "message"),
    [
        ({"system_prompt": "b"}, TEMPLATE, "data.system_prompt needs data.chat_template=true"),
        ({"chat_template": True}, None, "the model's tokenizer has no chat template"),
        ({"chat_template": True, "overlong_prompts": "truncate"}, TEMPLATE, "would cut the chat template's own tokens"),
        ({"max_prompt_length": 0}, None, "data.max_prompt_length must be at least 1, got 0"),
        ({"overlong_prompts": "cut"}, None, "data.overlong_prompts must be error, drop or truncate, got 'cut'"),
        ({"chat_template": True}, "{{ raise_exception('no!') }}", "prompt 0: the chat template refused it: no!"),
    ],
)
def test_settings_that_do_not_fit(settings, template, message):
    with pytest.raises(ValueError, match=message):
        ids_of([Prompt("a")], make_tokenizer(template=template), **settings)


def test_chat_template_cannot_wrap_ids():
    with pytest.raises(ValueError, match="prompt 0 is given as ids, to which data.chat_template cannot be applied"):
        ids_of([Prompt("a", ids=(5,))], make_tokenizer(template=TEMPLATE), chat_template=True)


def test_default_environments_tokenise(tmp_path):
    from transformers import AutoTokenizer

    from trainers.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-llama", cache_dir=tmp_path))
    copy = make_environment(EnvConfig(name="copy", size=20))
    tokenized = tokenize_prompts(load_prompts(DataConfig(), copy), tokenizer, DataConfig())
    assert [p.ids for p in tokenized] == [p.ids for p in copy.prompts()]
    assert [tuple(tokenizer(p.prompt.text)["input_ids"]) for p in tokenized] == [p.ids for p in tokenized]


# --- PromptLoader ------------------------------------------------------------------------------------------------


def prompts_of(n: int) -> list[TokenizedPrompt]:
    return [TokenizedPrompt(10 + i, Prompt(str(i)), (i,)) for i in range(n)]


def draw(loader: PromptLoader, n: int) -> list[list[int]]:
    return [[prompt.index for prompt in loader.next_batch()] for _ in range(n)]


def test_epochs_in_order_and_counts():
    loader = PromptLoader(prompts_of(6), 2, seed=0, shuffle=False)
    assert loader.batches_per_epoch == 3
    assert draw(loader, 2) == [[10, 11], [12, 13]]
    assert (loader.epoch, loader.index, loader.consumed) == (0, 4, 4)
    assert draw(loader, 1) == [[14, 15]]
    assert (loader.epoch, loader.index, loader.consumed) == (1, 0, 6)
    assert draw(loader, 1) == [[10, 11]]


def test_partial_batch_is_left_out(caplog):
    loader = PromptLoader(prompts_of(5), 2, seed=0, shuffle=False)
    assert loader.batches_per_epoch == 2
    assert draw(loader, 3) == [[10, 11], [12, 13], [10, 11]]
    assert (loader.epoch, loader.consumed) == (1, 6)
    assert "the last 1 of 5 prompts are never used" in caplog.text


def test_shuffle_is_fixed_by_seed_and_epoch():
    one, two, other = (PromptLoader(prompts_of(8), 8, seed=seed) for seed in (3, 3, 4))
    orders = [batch for (batch,) in (draw(one, 1), draw(one, 1), draw(one, 1))]
    assert draw(two, 3) == orders
    assert all(sorted(order) == list(range(10, 18)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert draw(other, 1) != orders[:1]
    # the order belongs to every checkpoint ever written: it may not change with a version
    assert orders[0] == [17, 13, 10, 12, 15, 11, 14, 16]


def test_partial_batches_leave_out_other_prompts_each_epoch():
    loader = PromptLoader(prompts_of(7), 3, seed=0)
    counts = Counter(index for batch in draw(loader, 2 * 50) for index in batch)
    assert sorted(counts) == list(range(10, 17))
    assert sum(counts.values()) == loader.consumed == 300


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), batch=st.integers(1, 4), before=st.integers(0, 12), shuffle=st.booleans())
def test_resume_anywhere(n, batch, before, shuffle):
    if n < batch:
        n = batch
    loader = PromptLoader(prompts_of(n), batch, seed=5, shuffle=shuffle)
    draw(loader, before)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = PromptLoader(prompts_of(n), batch, seed=5, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert draw(resumed, 8) == draw(loader, 8)
    assert resumed.state_dict() == loader.state_dict()
    assert loader.consumed == (before + 8) * batch
    assert loader.epoch == (before + 8) // (n // batch)


def test_resume_exactly_at_the_end_of_an_epoch():
    loader = PromptLoader(prompts_of(6), 3, seed=1)
    draw(loader, 2)
    state = loader.state_dict()
    assert (state["epoch"], state["index"], state["consumed"]) == (1, 0, 6)
    expected = draw(loader, 4)
    resumed = PromptLoader(prompts_of(6), 3, seed=1)
    resumed.load_state_dict(state)
    assert draw(resumed, 4) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed was 1 when saved and is 2 now"),
        ({"shuffle": False}, "shuffle was True when saved and is False now"),
        ({"num_prompts_per_step": 2}, "num_prompts_per_step was 3 when saved and is 2 now"),
        ({"prompts": prompts_of(7)}, "num_prompts was 6 when saved and is 7 now"),
        ({"prompts": prompts_of(6)[::-1]}, "prompts_sha256 was '[0-9a-f]{64}' when saved"),
    ],
)
def test_resume_with_something_else(change, message):
    arguments = {"prompts": prompts_of(6), "num_prompts_per_step": 3, "seed": 1, "shuffle": True}
    state = PromptLoader(**arguments).state_dict()
    with pytest.raises(ValueError, match=f"cannot resume the prompts: {message}"):
        PromptLoader(**{**arguments, **change}).load_state_dict(state)


def test_too_few_prompts():
    with pytest.raises(ValueError, match="num_prompts_per_step=4, but there are only 3 prompts: more .*=3 and"):
        PromptLoader(prompts_of(3), 4, seed=0)
    with pytest.raises(ValueError, match="num_prompts_per_step must be at least 1, got 0"):
        PromptLoader(prompts_of(3), 0, seed=0)
