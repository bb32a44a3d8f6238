"""`python .ci/check_skips.py JUNIT.xml`: list the tests that were skipped; fail if one of them does not say why."""

import ast
import re
import sys
from xml.etree import ElementTree

# What pytest writes where nobody gave a reason.
NO_REASON = re.compile(r"(Skipped|unconditional skip|expected failure)?\s*")


def main(path: str) -> int:
    silent = 0
    for case in ElementTree.parse(path).iter("testcase"):
        for skipped in case.iter("skipped"):
            reason = skipped.get("message", "")
            if reason == "collection skipped":  # of a whole module; the text is a tuple of path, line and reason
                reason = ast.literal_eval(skipped.text or "('', 0, '')")[2]
            reason = reason.removeprefix("Skipped: ")
            missing = NO_REASON.fullmatch(reason) is not None
            silent += missing
            name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
            print(f"skipped {name}: {'NO REASON' if missing else reason}")
    if silent:
        print(f"{silent} skipped without a reason: write one, pytest.skip(reason) or skipif(..., reason=...)")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
