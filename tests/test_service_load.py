"""Many clients at once: runs/critic_load.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "runs" / "critic_load.py"


@pytest.mark.parametrize(
    "clients, seconds",
    [(8, 3), pytest.param(64, 60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_every_client_is_answered(clients, seconds):
    command = [sys.executable, str(SCRIPT), f"--clients={clients}", f"--seconds={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["clients"] == clients and found["errors"] == 0
    assert found["requests"] > 5 * clients and found["idlest_client"] >= 2  # none is left waiting for the others
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
