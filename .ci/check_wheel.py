"""`python .ci/check_wheel.py WHEEL`: both packages, the compiled module and nothing else are in it."""

import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(wheel: str) -> int:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if re.match(r"fastppo-[^/]+\.dist-info/", name)}
    compiled = {name for name in names if re.fullmatch(r"fastppo/_C\.[\w.-]+\.so", name)}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("fastppo", "trainers")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    problems = [f"is missing: {name}" for name in sorted(sources - names)]
    problems += [f"should not be there: {name}" for name in sorted(names - sources - metadata - compiled)]
    if len(compiled) != 1:
        problems.append(f"expected one compiled module, got {sorted(compiled)}")
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        problems.append("is missing: LICENSE")
    for problem in problems:
        print(f"{wheel}: {problem}")
    print(f"{len(names)} files, {Path(wheel).stat().st_size:,} bytes")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
