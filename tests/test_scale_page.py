"""docs/scale.md shows what its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from trainers.dry_run import dry_run
from trainers.settings import load_config

PAGE = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
SHOWN = re.findall(r"```\n(python -m trainers\.ppo --dry-run .*?)```\n+```\n(.*?)```\n", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[re.search("gpus=[0-9]+", shown)[0] for shown, _ in SHOWN])
def test_commands_print_what_the_page_shows(command, output):
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:4] == ["python", "-m", "trainers.ppo", "--dry-run"]
    printed = dry_run(load_config(None, words[4:]))
    assert printed == output.rstrip("\n")
    assert "fits in 72" in printed  # a page of layouts that can be


def test_the_page_has_the_three_sizes():
    assert [shown.split()[4] for shown, _ in SHOWN] == ["cluster.gpus=8", "cluster.gpus=64", "cluster.gpus=1024"]
