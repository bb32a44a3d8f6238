"""docs/integrate.md and docs/troubleshooting.md: code, commands and messages are those of the sources."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import fastppo

ROOT = Path(__file__).parents[1]
INTEGRATE = (ROOT / "docs" / "integrate.md").read_text(encoding="utf-8")
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SHARED = "peak.py"  # what examples share
EXAMPLES = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py") if path.name != SHARED}


def blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", INTEGRATE, re.MULTILINE | re.DOTALL)
    return [block for its, block in every if its == language]


def dedented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_the_page_has_every_example_and_its_code():
    assert set(re.findall(r"\]\(\.\./examples/(\w+\.py)\)", INTEGRATE)) == EXAMPLES.keys()
    sources = dedented("\n".join(EXAMPLES.values()))
    trl, cartpole, *others = blocks("python")
    assert "fastppo.integrations.trl.apply()" in trl and "fastppo.gae(" in cartpole and len(others) == 3
    for code in others:
        for part in re.split(r"\n\s*\n", dedented(code)):
            assert part in sources, part


def test_the_commands_of_the_page_are_those_of_the_examples():
    commands = [line.strip() for block in blocks("") for line in block.replace("\\\n", "").splitlines()]
    named = [re.search(r"examples[/.](\w+)", command) for command in commands]
    for command, match in zip(commands, named, strict=True):
        if match is None:
            continue
        source = EXAMPLES[f"{match[1]}.py"]
        for option in re.findall(r"(?<= )--([a-z][\w-]*)(?![\w.-])", command):
            field = rf"^    {option.replace('-', '_')}: \w+ = "  # of the dataclass whose fields are options
            known = f'add_argument("--{option}"' in source or re.search(field, source, re.MULTILINE)
            assert option == "nproc-per-node" or known, (option, command)
    assert sum(match is not None for match in named) >= 11
    for version in ("verl==0.9.1", "openrlhf==0.11.2", "7ea279a"):
        assert version in " ".join(commands) and version in (ROOT / "tests" / "test_other_trainers.py").read_text()


def test_a_script_runs_the_commands_of_the_page():
    ran = " ".join((ROOT / "runs" / "examples.sh").read_text().replace("\\\n", " ").split())
    shown = [line for block in blocks("") for line in block.replace("\\\n", " ").splitlines()]
    shown = [" ".join(line.split()).replace("--seed 0", "--seed $seed") for line in shown]
    own = [line for line in shown if re.search(r"(trl_trainers|cartpole_ppo|megatron_logprob|ten_lines)", line)]
    assert len(own) == 11
    for command in own:
        assert command in ran, command


def test_what_trls_example_printed_has_the_sizes_that_it_has():
    printed = [ast.literal_eval(found) for found in re.findall(r"^(?:grpo|rloo) (\{.*?\})", INTEGRATE, re.MULTILINE)]
    fields = re.findall(r"^    (\w+): \w+ = ", EXAMPLES["trl_trainers.py"], re.MULTILINE)
    assert printed and all(list(sizes) == fields for sizes in printed)


def test_versions_on_the_page_are_those_that_are_tested():
    pinned = (ROOT / ".ci" / "constraints.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    for name, page in (
        ("gymnasium", "gymnasium"),
        ("transformers", "transformers"),
        ("trl", "TRL"),
        ("megatron-core", "megatron-core"),
    ):
        version = re.search(rf"{name}==([\d.]+)", pinned)[1]
        assert re.search(rf"^\| \[.*\| (?:{page} )?{re.escape(version)} \|", INTEGRATE, re.MULTILINE | re.IGNORECASE), (
            name
        )


def test_the_loop_of_ones_own_runs():
    steps, envs = 5, 3
    given = {name: torch.randn(steps, envs) for name in ("rewards", "values", "bootstrap_values", "old_logprobs")}
    given |= {name: torch.rand(steps, envs) < 0.3 for name in ("terminated", "truncated")}
    given |= {"logits": torch.randn(steps, envs, 2, requires_grad=True), "actions": torch.randint(2, (steps, envs))}
    scope = {"fastppo": fastppo, "new_values": torch.randn(steps, envs, requires_grad=True), **given}
    exec(blocks("python")[1], scope)
    grads = torch.autograd.grad(scope["loss"], (given["logits"], scope["new_values"]))
    assert all(grad.abs().max() > 0 for grad in grads)


def test_the_line_for_trl_runs(capsys):
    pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0, for Python 3.11 or newer")
    import fastppo.integrations.trl

    try:
        exec(blocks("python")[0], {})
    finally:
        fastppo.integrations.trl.undo()
    assert capsys.readouterr().out == blocks("text")[0]


def text_of(node: ast.expr) -> str:
    """A string of the source; … where something is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else "…"


@cache
def sources() -> list[ast.AST]:
    files = (path for package in ("fastppo", "trainers") for path in sorted((ROOT / package).rglob("*.py")))
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def plain(text: str) -> str:
    return re.sub(r"…+", "…", re.sub(r"\s+", " ", text.replace("`", "")))


def quoted() -> list[str]:
    """The messages of the page, first cells of its tables."""
    rows = re.findall(r"^\| `(.+?)` \| .+ \| .+ \|$", TROUBLE, re.MULTILINE)
    assert len(rows) > 70
    return [plain(row) for row in rows]


def says(text: str, message: str) -> bool:
    """Whether the parts of a message between its … come in a text, one after the other."""
    at = 0
    for part in message.split("…"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_every_message_is_one_of_the_sources():
    strings = (node for node in sources() if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp))
    texts = {plain(text_of(node)) for node in strings}
    for message in quoted():
        assert any(len(part.strip(" :.,;()=")) > 3 for part in message.split("…")), f"{message}: nothing of it is fixed"
        assert any(says(text, message) for text in texts), message


# What has no other sign of its cause than its message; a ValueError or ConfigError names its own cure.
EXPLAINED = {"TrainingError", "RewardError", "LateRewardError", "RankLost", "ServerError", "ModelFetchError"}
LIKE_ANOTHER = {"…: pip brought …, expected … …"}


def test_every_error_of_a_run_has_a_row():
    """Of those whose words stand where they are raised."""
    messages = quoted()
    calls = (node.exc for node in sources() if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call))
    raised = [plain(text_of(call.args[0])) for call in calls if getattr(call.func, "id", "") in EXPLAINED]
    assert len(raised) > 30
    told = {text for text in raised if any(says(text, message) for message in messages)}
    assert set(raised) - told - LIKE_ANOTHER <= {"", "…"}
