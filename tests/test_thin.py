"""The trainers stay small enough to read beside the paper."""

import ast
from pathlib import Path

import pytest

from trainers.config import PPOTrainerConfig, walk

TRAINERS = Path(__file__).parents[1] / "trainers"
FILES = sorted(TRAINERS.rglob("*.py"))


def fit() -> ast.FunctionDef:
    tree = ast.parse((TRAINERS / "ppo.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PPOTrainer")
    return next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "fit")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TRAINERS)))
def test_length(path):
    limit = 300 if path == TRAINERS / "ppo.py" else 400
    assert len(path.read_text().splitlines()) <= limit


def test_fit_is_the_algorithm():
    loop = fit()
    assert loop.end_lineno - loop.lineno + 1 <= 80


def test_fit_reads_no_option():
    """Every option lives in the part it concerns; the loop knows its bounds and the seed."""
    options = {key.rsplit(".", 1)[-1] for key, _, _ in walk(PPOTrainerConfig())}
    read = {node.attr for node in ast.walk(fit()) if isinstance(node, ast.Attribute)}
    assert "ppo_epochs" in read
    assert read & options <= {"ppo_epochs", "max_num_steps", "seed"}
