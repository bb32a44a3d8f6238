"""`python benchmarks/run_isas.py [--save[=FOLDER]] [pytest arguments]`: the suite once for each instruction set of this
machine.

Compares with the baseline of each where there is one, and fails on a regression of 5 %; `--save` writes the baselines,
to another folder where it names one. The instruction set is read once per process, hence a process for each.
"""

import os
import subprocess
import sys
from pathlib import Path

import machine

HERE = Path(__file__).parent
BASELINES = HERE / "baselines"
KNOWN = ("baseline", "avx2", "avx512")


def main(arguments: list[str]) -> int:
    save = [x for x in arguments if x.partition("=")[0] == "--save"]
    arguments = [x for x in arguments if x not in save]
    folder = Path(save[-1].partition("=")[2] or BASELINES) if save else BASELINES
    worst = 0
    for isa in reversed(KNOWN[: KNOWN.index(machine.isa()) + 1]):
        baseline = folder.absolute() / f"{machine.machine_name(isa_name=isa)}.json"
        if save:
            folder.mkdir(parents=True, exist_ok=True)
            options = [f"--benchmark-json={baseline}"]
        elif baseline.exists():
            options = [f"--benchmark-compare={baseline}", "--benchmark-compare-fail=median:5%"]
        else:
            options = []
        command = [sys.executable, "-m", "pytest", str(HERE), *options, *arguments]
        done = subprocess.run(command, cwd=HERE.parent, env=os.environ | {"FASTPPO_CPU_ISA": isa})
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
