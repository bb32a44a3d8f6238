"""The trainers stay small enough to read beside the paper."""

import ast
from pathlib import Path

import pytest

from trainers.config import PPOTrainerConfig, ReinforceTrainerConfig, walk

TRAINERS = Path(__file__).parents[1] / "trainers"
FILES = sorted(TRAINERS.rglob("*.py"))


ALGORITHMS = {"ppo": PPOTrainerConfig, "reinforce": ReinforceTrainerConfig}


def fit(algorithm: str) -> ast.FunctionDef:
    tree = ast.parse((TRAINERS / f"{algorithm}.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    return next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "fit")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TRAINERS)))
def test_length(path):
    limit = 300 if path.stem in ALGORITHMS else 400
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fit_is_the_algorithm(algorithm):
    loop = fit(algorithm)
    assert loop.end_lineno - loop.lineno + 1 <= 80


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fit_reads_no_option(algorithm):
    """Every option lives in the part it concerns; the loop knows its bounds and the seed."""
    options = {key.rsplit(".", 1)[-1] for key, _, _ in walk(ALGORITHMS[algorithm]())}
    read = {node.attr for node in ast.walk(fit(algorithm)) if isinstance(node, ast.Attribute)}
    assert "ppo_epochs" in read
    assert read & options <= {"ppo_epochs", "max_num_steps", "seed"}
