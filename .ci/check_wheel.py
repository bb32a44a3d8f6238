"""`python .ci/check_wheel.py WHEEL`: both packages, the compiled module and nothing else are in it; it is small, needs
torch and numpy alone, and has the version of the package."""

import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 6_000_000  # bytes; more than half of it would be CUDA kernels


def main(wheel: str) -> int:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
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
    problems += about(archive.read(next(name for name in metadata if name.endswith("/METADATA"))).decode())
    size = Path(wheel).stat().st_size
    if size > LIMIT:
        problems.append(f"expected at most {LIMIT:,} bytes, got {size:,}")
    for problem in problems:
        print(f"{wheel}: {problem}")
    print(f"{len(names)} files, {size:,} bytes")
    return 1 if problems else 0


def about(metadata: str) -> list[str]:
    problems, fields = [], Parser().parsestr(metadata)
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "fastppo" / "__init__.py").read_text(), re.MULTILINE)[1]
    if fields["Version"] != version:
        problems.append(f"version must be {version}, got {fields['Version']}")
    needed = [need for need in fields.get_all("Requires-Dist", []) if "extra ==" not in need]
    if sorted(re.match(r"[\w-]+", need)[0] for need in needed) != ["numpy", "torch"]:
        problems.append(f"must need torch and numpy alone, got {needed}")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
