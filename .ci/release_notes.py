"""`python .ci/release_notes.py vX.Y.Z`: the changelog's notes of this release; fails where tag, package and changelog
do not agree."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(tag: str) -> int:
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "fastppo" / "__init__.py").read_text(), re.MULTILINE)[1]
    if tag != f"v{version}":
        print(f"the tag must be v{version}, the version in fastppo/__init__.py, got {tag}", file=sys.stderr)
        return 1
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## \[{re.escape(version)}\] - ([^\n]+)\n(.*?)(?=^## |\Z)", changes, re.MULTILINE | re.DOTALL
    )
    if section is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        found = "no such section" if section is None else f"- {section[1]}"
        print(f"CHANGELOG.md must have ## [{version}] - YYYY-MM-DD, got {found}", file=sys.stderr)
        return 1
    print(section[2].strip())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
