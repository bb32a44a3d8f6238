"""The compiled module, what happens without it, and the report that says so."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastppo
from fastppo import _build, env
from fastppo.backends import KERNELS, resolve

CPU = torch.device("cpu")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=dict(os.environ)
    )


# Makes `import NAME` fail in the process that runs it, as if it were not there.
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_the_compiled_module_is_loaded() -> None:
    module, reason = _build.load()
    assert module is not None, reason
    assert reason == ""


def test_the_compiled_module_was_built_from_this_tree() -> None:
    tree = _build.csrc_hash()
    if tree is None:
        pytest.skip("csrc/ is not beside the installed package: nothing to compare with")
    module, _ = _build.load()
    assert module is not None
    assert module.csrc_hash == tree, "csrc/ has changed since the module was built: pip install --no-deps -e ."


def test_the_compiled_module_needs_no_torch() -> None:
    """Which is why one built module serves every version of it; `-m slow` runs the ops under the oldest."""
    module, _ = _build.load()
    assert module is not None
    code = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_C", {module.__file__!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
loaded = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(module.cpu_isa(), "torch" in sys.modules, "libtorch" in loaded or "libc10" in loaded)"""
    done = run_python(code)
    assert done.stdout.split() == [module.cpu_isa(), "False", "False"], done.stderr


def test_the_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("a")
    source = tmp_path / "csrc" / "a.cpp"
    seen = set()
    for name, text in (("a.cpp", "1"), ("a.cpp", "2"), ("b.cpp", "2")):
        source.unlink(missing_ok=True)
        source = tmp_path / "csrc" / name
        source.write_text(text)
        seen.add(_build.csrc_hash(tmp_path))
    (tmp_path / "CMakeLists.txt").write_text("b")
    seen.add(_build.csrc_hash(tmp_path))
    assert len(seen) == 4


def test_version_is_the_distributions() -> None:
    assert importlib.metadata.version("fastppo") == fastppo.__version__


def test_every_public_name_is_there() -> None:
    for name in fastppo.__all__:
        assert getattr(fastppo, name) is not None
    assert set(fastppo.__all__) >= {"logprob", "gae", "ppo_loss", "value_loss", "kl_divergence", "whiten", "rloo"}


def test_without_the_compiled_module_import_warns_once_and_ops_still_work() -> None:
    done = run_python(
        "HIDDEN = {'fastppo._C'}" + HIDE + "import warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import fastppo, fastppo.env, torch\n"
        "    x = torch.ones(3)\n"
        "    print(fastppo.gae(x, x, gamma=1.0, lam=1.0).returns.tolist())\n"
        "    try: fastppo.gae(x, x, gamma=1.0, lam=1.0, backend='cpu')\n"
        "    except RuntimeError as error: print('forced:', error)\n"
        "    report = fastppo.env.report()\n"
        "for w in seen: print('warning:', w.category.__name__, w.message)\n"
        "print(report)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "[3.0, 2.0, 1.0]" in done.stdout
    warned = [line for line in done.stdout.splitlines() if line.startswith("warning:") and "fastppo" in line]
    assert len(warned) == 1 and "RuntimeWarning" in warned[0] and "pip install" in warned[0]
    assert re.search(r"forced: .*fastppo._C does not load.*available: 'torch'", done.stdout)
    assert "fastppo._C: not loaded: No module named 'fastppo._C'" in done.stdout
    assert re.search(r"gae on cpu: torch \(cpu: the compiled module fastppo._C does not load", done.stdout)


def test_a_checkout_that_hides_an_installed_package_says_so(tmp_path: Path) -> None:
    """`pip install .`, and then Python is started in the checkout."""
    installed = tmp_path / "site" / "fastppo"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (installed / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    done = run_python(
        "HIDDEN = {'fastppo._C'}" + HIDE + f"sys.path.append({str(installed.parent)!r})\n"
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import fastppo\n"
        "for w in seen: print(w.category.__name__, w.message)\n"
    )
    assert done.stdout.count("RuntimeWarning fastppo is imported from") == 1, done.stderr
    assert f"which has them, in {installed.parent}; ops fall back" in done.stdout and "pip install -e ." in done.stdout


def test_without_the_distribution_import_does_not_warn() -> None:
    """A checkout on the path is a choice, not a broken install."""
    done = run_python(
        "HIDDEN = {'fastppo._C'}" + HIDE + "import importlib.metadata as metadata\n"
        "real = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'fastppo': raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.distribution = distribution\n"
        "import warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.filterwarnings('error', message='fastppo')\n"
        "    import fastppo\n"
        "print('quiet')\n"
    )
    assert done.stdout == "quiet\n", done.stderr


def test_import_needs_neither_triton_nor_a_gpu_and_starts_nothing() -> None:
    done = run_python(
        "HIDDEN = {'triton'}" + HIDE + "import threading, fastppo, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'transformers' not in sys.modules\n"
        "print(len(fastppo.__all__))\n"
    )
    assert done.stdout.strip() == str(len(fastppo.__all__)), done.stderr


def test_env_report() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastppo.env"], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.startswith("Copy-paste the following when reporting an issue:")
    module, _ = _build.load()
    assert module is not None
    for fact in (
        f"fastppo: {fastppo.__version__}",
        f"torch: {torch.__version__}",
        f"csrc hash: {module.csrc_hash[:12]}",
        f"CPU kernels: {module.cpu_isa()}",
        "gae on cpu: cpu (",
        "logprob on cpu: ",
    ):
        assert fact in done.stdout
    assert "STALE" not in done.stdout


def test_env_says_that_a_build_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "csrc_hash", lambda: "0" * 64)
    assert "STALE: the tree has 000000000000" in env.report()


def test_auto_never_needs_more_than_op_device_and_dtype() -> None:
    assert resolve("gae", "auto", CPU, torch.float32)[0] == "cpu"
    assert resolve("gae", "auto", CPU, torch.bfloat16)[0] == "cpu"
    assert resolve("gae", "torch", CPU, torch.float32) == ("torch", "asked for")
    assert resolve("gae", "cpu", CPU, torch.float32) == ("cpu", "asked for")
    assert resolve("gae", "auto", torch.device("meta"), torch.float32) == ("torch", "gae has no kernel for meta")


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_float64_is_the_references(op: str, backend: str) -> None:
    assert resolve(op, backend, CPU, torch.float64)[0] == "torch"


def test_why_a_faster_kernel_does_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(op: str, kernel: str, device_type: str, index: int | None) -> str:
        return "CUDA driver version is insufficient" if kernel == "cuda" else ""

    monkeypatch.setattr("fastppo.backends._problem", problem)
    backend, why = resolve("linear_logprob", "auto", torch.device("cuda", 0), torch.bfloat16)
    assert backend == "triton"
    assert why == "the first of its kernels on cuda that runs; cuda: CUDA driver version is insufficient"


def test_what_cannot_be_resolved() -> None:
    with pytest.raises(ValueError, match="op must be one of .*, got 'gea'"):
        resolve("gea", "auto", CPU, torch.float32)
    with pytest.raises(ValueError, match="backend must be one of 'auto', .*, got 'Torch'"):
        resolve("gae", "Torch", CPU, torch.float32)
    with pytest.raises(RuntimeError, match="cannot run gae on cpu: gae has no such kernel for cpu tensors"):
        resolve("gae", "cuda", CPU, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_the_module_says_why_cuda_cannot_run() -> None:
    module, _ = _build.load()
    assert module is not None
    assert module.cuda_problem(0) != ""
    backend, why = resolve("gae", "auto", torch.device("cuda", 0), torch.float32)
    assert backend == "torch" and why.startswith(f"cuda: {module.cuda_problem(0)}; triton: ")
