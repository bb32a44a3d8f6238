"""The kernels on every instruction set that this machine has: the tests of their numbers, each in a process that is
forced to it. An instruction set is chosen once per process."""

import os
import subprocess
import sys

import pytest

from fastppo import _C

FILES = ["test_gae.py", "test_logprob.py", "test_logprob_grid.py", "test_loss_grid.py"]
ORDER = ("baseline", "avx2", "avx512")
# What does not depend on it, or is done in processes of its own.
ELSEWHERE = "not compile and not opcheck and not errors and not instruction and not ranks"
LOWER = ORDER[: ORDER.index(_C.cpu_isa())]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("isa", LOWER)
def test_numbers(isa):
    script = f"""
import sys, pytest, fastppo._C
assert fastppo._C.cpu_isa() == {isa!r}, fastppo._C.cpu_isa()

class OfTheModule:
    def pytest_collection_modifyitems(self, items):  # PyTorch's own operations are the same under each
        items[:] = [x for x in items if not (hasattr(x, "callspec") and x.callspec.params.get("backend") == "torch")]

sys.exit(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "-k", {ELSEWHERE!r}, *{FILES!r}], [OfTheModule()]))
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=os.path.dirname(__file__),
        env=os.environ | {"FASTPPO_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_an_unknown_name_is_an_error():
    script = "import torch, fastppo; fastppo.logprob(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))"
    env = os.environ | {"FASTPPO_CPU_ISA": "avx-2"}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "ValueError: FASTPPO_CPU_ISA must be one of baseline, avx2, avx512" in result.stderr
    assert "got 'avx-2'" in result.stderr
