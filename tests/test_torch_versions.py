"""One built module, two versions of torch: csrc sees no header of it. The ops' tests run on the module that is
installed here, under the oldest torch that pyproject.toml allows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastppo
from fastppo import _build

ROOT = Path(__file__).parents[1]
OLDEST = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
FILES = ("gae", "advantages", "logprob", "logprob_grid", "ppo_loss", "value_loss", "loss_grid", "linear_logprob")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason=f"torch {OLDEST} has no build for this Python")
def test_the_same_module_under_the_oldest_torch(tmp_path):
    """Downloads torch with the CUDA libraries it insists on, 3 GB, and takes three minutes. Without the tests of
    torch.compile, whose limits in an old torch say nothing of the module."""
    assert not torch.__version__.startswith(OLDEST)
    module, reason = _build.load()
    assert module is not None, reason
    shutil.copytree(Path(fastppo.__file__).parent, tmp_path / "fastppo", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(module.__file__, tmp_path / "fastppo")

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    needs = (f"torch=={OLDEST}.*", "numpy", "pytest", "pytest-timeout", "hypothesis")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-cache-dir", *needs], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": str(tmp_path)}

    def run(*command: str) -> str:
        done = subprocess.run([python, *command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        return done.stdout

    versions = run("-c", "import torch, fastppo._C as c; print(torch.__version__, c.__file__, c.csrc_hash)").split()
    assert versions[0].startswith(OLDEST) and Path(versions[1]).parent == tmp_path / "fastppo"
    assert versions[2] == module.csrc_hash
    tests = [f"tests/test_{name}.py" for name in FILES]
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile and not graph", *tests)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 1000
    shutil.rmtree(tmp_path / "venv")  # pytest would keep its 5 GB
