"""The project's front matter says what is true: commands, code, links, versions, tables."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastppo
from fastppo.backends import KERNELS
from trainers.config import PPOTrainerConfig, walk

ROOT = Path(__file__).parents[1]
SKIPPED = {"build", "dist", "results", "venv", "__pycache__"}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def files() -> Iterator[Path]:
    """The project's own files, without what building and running leave beside them."""
    for folder, folders, names in os.walk(ROOT):
        kept = (f for f in folders if f not in SKIPPED and not f.endswith(".egg-info"))
        folders[:] = [f for f in kept if f[0] != "." or f in (".ci", ".github")]
        yield from (Path(folder) / name for name in names if not name.endswith((".so", ".pyc")) and name != ".git")


def readable() -> Iterator[tuple[str, str]]:
    """Names and contents of the text files."""
    for path in files():
        content = path.read_bytes()
        if b"\0" not in content:  # a picture
            yield path.relative_to(ROOT).as_posix(), content.decode()


def blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", text("README.md"), re.MULTILINE | re.DOTALL)
    return [block for its, block in every if its == language]


def table(name: str, *header: str) -> list[list[str]]:
    """The cells of the table of a page that has this header, row by row."""
    lines = text(name).splitlines()
    start = lines.index("| " + " | ".join(header) + " |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows and all(len(row) == len(header) for row in rows)
    return rows


def test_the_two_commands_are_those_that_ci_runs():
    assert blocks("")[0].splitlines() == [
        'pip install -e ".[trainer]" && python -m trainers.ppo',
        'pip install -e ".[test]" && pytest',
    ]
    ci = [line.strip() for line in text(".ci/run").splitlines()]
    assert 'pip install -e ".[test]" -c .ci/constraints.txt' in ci
    options = 'PYTEST_ADDOPTS="-n 2 --dist loadfile --no-loadscope-reorder --junitxml=$work/junit.xml"'
    assert f"PYTHONPATH=$work/peers {options} pytest" in ci


def pins(content: str) -> set[tuple[str, str]]:
    return {(name.lower(), version) for name, version in re.findall(r"([A-Za-z][\w-]*)==([\w.]+)", content)}


def test_tools_have_one_version_everywhere():
    extra = re.search(r"^dev = \[(.*?)\]", text("pyproject.toml"), re.MULTILINE | re.DOTALL)
    tools = pins(extra[1])
    names = {"ruff", "mypy", "clang-format", "pre-commit", "pre-commit-hooks", "build", "auditwheel"}
    assert {name for name, _ in tools} == names
    hooks = pins(text(".pre-commit-config.yaml"))
    assert {name for name, _ in hooks} == {"ruff", "clang-format", "pre-commit-hooks"}
    assert hooks <= tools
    flows = set().union(*(pins(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()))
    assert {name for name, _ in flows - tools} == {"cibuildwheel"}
    assert not {name for name, _ in tools} & {name for name, _ in pins(text(".ci/constraints.txt"))}


def test_both_forms_of_the_readme_give_the_same_loss_and_gradient():
    yours, ours = blocks("python")[:2]
    assert yours.startswith("# your PyTorch") and ours.startswith("# with fastppo")
    batch, steps, vocab = 3, 7, 11
    mask = torch.rand(batch, steps) < 0.7
    assert not mask.all() and mask.any(1).all()
    shared = {
        "targets": torch.randint(vocab, (batch, steps)),
        "rewards": torch.randn(batch, steps),
        "values": torch.randn(batch, steps),
        "mask": mask,
        "temperature": 0.8,
        "gamma": 0.9,
        "lam": 0.7,
    }
    start = torch.randn(batch, steps, vocab)
    old = torch.log_softmax(start / 0.8 + 0.5 * torch.randn_like(start), -1)
    shared["old_logprobs"] = old.gather(-1, shared["targets"].unsqueeze(-1)).squeeze(-1)
    results = []
    for code in (yours, ours):
        scope = {"torch": torch, "fastppo": fastppo, "logits": start.clone().requires_grad_(), **shared}
        exec(code, scope)
        scope["loss"].backward()
        results.append((scope["loss"].item(), scope["logits"].grad, scope["advantages"]))
    (loss, grad, advantages), (our_loss, our_grad, our_advantages) = results
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(our_advantages, advantages, rtol=1e-6, atol=1e-6)
    assert torch.allclose(our_grad, grad, rtol=1e-5, atol=1e-7)
    assert grad.abs().max() > 1e-3


def test_the_readmes_linear_ops_give_the_loss_of_whole_logits():
    code = blocks("python")[2]
    assert "linear_logprob" in code and "linear_ppo_loss" in code
    head = torch.nn.Linear(6, 11, bias=False)
    hidden, mask = torch.randn(3, 7, 6, requires_grad=True), torch.rand(3, 7) < 0.7
    given = {"targets": torch.randint(11, (3, 7)), "old_logprobs": torch.randn(3, 7) - 2}
    given |= {"advantages": torch.randn(3, 7), "mask": mask}
    given |= {"temperature": 0.8}
    scope = {"fastppo": fastppo, "hidden": hidden, "lm_head": head, **given}
    exec(code, scope)
    loss = blocks("python")[1].partition("loss, metrics")  # of the form before, without its advantages
    whole = {"fastppo": fastppo, "logits": head(hidden), **given}
    exec("logprobs, entropy = fastppo.logprob(logits, targets, temperature=temperature)\n" + "".join(loss[1:]), whole)
    expected = whole["loss"]
    torch.testing.assert_close(scope["logprobs"][mask], whole["logprobs"][mask].detach())
    torch.testing.assert_close(scope["loss"], expected)
    for got, right in zip(
        torch.autograd.grad(scope["loss"], (hidden, head.weight)),
        torch.autograd.grad(expected, (hidden, head.weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


def test_the_reference_of_the_ops_is_their_docstrings():
    made = subprocess.run([sys.executable, ".ci/ops_page.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout == text("docs/ops.md"), "python .ci/ops_page.py > docs/ops.md"


def test_the_readme_trains_on_a_model_and_reward_of_ones_own(tmp_path, monkeypatch):
    code = blocks("python")[3]
    assert code.count('"/models/mine"') == 1 and code.count('"ppo.max_num_steps": 50') == 1
    code = code.replace('"/models/mine"', '"tiny-llama"').replace('"ppo.max_num_steps": 50', '"ppo.max_num_steps": 1')
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(code, scope)
    assert scope["trainer"].progress.step == 1
    (run,) = (tmp_path / "results").iterdir()
    cells = [cell for cell, _ in table("README.md", "file", "holds")]
    assert {path.name for path in run.iterdir()} == set(re.findall(r"`([\w.]+)", " ".join(cells)))


def test_pages_name_settings_that_exist():
    keys = {key for key, _, _ in walk(PPOTrainerConfig())}
    given = set(re.findall(r"(?<![\w.])((?:\w+\.)+\w+)=", text("README.md")))
    assert "policy.model_name" in given and given <= keys
    for number, _, cell, _, _ in table("docs/features.md", "#", "feature", "key", "not yet", "tests"):
        for key in re.findall(r"`(.+?)`", cell):
            assert key in keys, f"{number}: {key}"


def test_the_table_of_backends_is_what_ops_take():
    words = {"C++": "cpu", "CUDA C++": "cuda", "Triton": "triton", "torch": "torch"}
    rows = table("README.md", "op", "on a CPU", "on a CUDA device", "dtypes", "sharded vocabulary")
    functions = {name for name in fastppo.__all__ if name.islower() and callable(getattr(fastppo, name))}
    assert {row[0].strip("`") for row in rows} == functions - {"summarize"}
    for op, cpu, cuda, *_ in rows:
        name = op.strip("`")
        kernels = KERNELS.get("logprob" if name in ("linear_loss", "linear_ppo_loss") else name, {})
        for device, cell in (("cpu", cpu), ("cuda", cuda)):
            taken = kernels.get(device, ("torch",))
            parts = [re.sub(r"^torch products, (.*) rows$", r"\1", part) for part in cell.split(", else ")]
            named = [words[part] for part in parts]
            # Triton's kernels take tensors on a CPU only in its interpreter.
            assert named == [kernel for kernel in taken if device != "cpu" or kernel != "triton"], op


def test_features_name_tests_that_exist():
    for number, _, _, _, proof in table("docs/features.md", "#", "feature", "key", "not yet", "tests"):
        named = re.findall(r"\[(test_\w+\.py)\]\(\.\./tests/\1\): ((?:`\w+`(?:, )?)+)", proof)
        assert named, number
        for file, tests in named:
            source = text(f"tests/{file}")
            for name in re.findall(r"`(\w+)`", tests):
                assert re.search(rf"def {name}\(", source), f"{number}: {file} has no {name}"


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"https?://|#", target):
            assert (ROOT / page).parent.joinpath(target.partition("#")[0]).exists(), f"{page}: {target}"


def test_every_page_of_docs_is_linked_from_another():
    for page in PAGES[3:]:
        others = "".join(text(other) for other in PAGES if other != page)
        assert re.search(rf"\]\((?:[^)\s]*/)?{re.escape(Path(page).name)}[)#]", others), page


def test_pages_of_proofs_name_tests_that_exist():
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for page in (*(ROOT / "docs" / "kernels").glob("*.md"), ROOT / "docs" / "megatron.md"):
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in sources, f"{page.name}: {name}"


def test_no_file_knows_one_machine_or_package_index():
    machine = re.compile(r"(?<![\w.~-])/(?:work|root|home|opt|mnt|Users)/\w")
    index = re.compile(
        r"pypi\.org|pythonhosted|(?:--|PIP_)(?:extra[-_])?index[-_]url|--find-links|download\.pytorch", re.I
    )
    found = [
        f"{name}: {match[0]}"
        for name, content in readable()
        for pattern in (machine, index)
        for match in pattern.finditer(content)
        if name != "tests/test_project.py"
    ]
    assert found == []


def test_text_files_end_with_one_newline_and_lines_without_spaces():
    for name, content in readable():
        if name.startswith("benchmarks/baselines/"):  # pytest-benchmark writes them
            continue
        assert content == "" or (content.endswith("\n") and not content.endswith("\n\n")), name
        assert not re.search(r"[ \t]$", content, re.MULTILINE), name


SKIPS = """
import pytest

def test_with(): pytest.skip("no such device")
@pytest.mark.skipif(True, reason="needs two")
def test_if(): pass
def test_without(): pytest.skip()
@pytest.mark.skip
def test_bare(): pass
@pytest.mark.xfail
def test_xfail(): assert False
def test_passes(): pass
"""


def run_skips(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_skips.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    junit = folder / "junit.xml"
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", str(folder)]
    subprocess.run(pytest_, cwd=folder, capture_output=True, timeout=60)
    check = [sys.executable, str(ROOT / ".ci" / "check_skips.py"), str(junit)]
    return subprocess.run(check, capture_output=True, text=True, timeout=60)


def test_ci_refuses_a_skip_without_a_reason(tmp_path):
    done = run_skips(tmp_path, SKIPS)
    assert done.returncode == 1
    silent = re.findall(r"skipped test_skips\.(\w+): NO REASON", done.stdout)
    assert sorted(silent) == ["test_bare", "test_without", "test_xfail"]
    assert "test_with: no such device" in done.stdout and "test_if: needs two" in done.stdout


def test_ci_accepts_skips_with_reasons_and_sees_whole_modules(tmp_path):
    done = run_skips(tmp_path, "import pytest\npytest.skip('not here', allow_module_level=True)\n")
    assert done.returncode == 0 and "test_skips: not here" in done.stdout, done.stdout
    done = run_skips(tmp_path, "import pytest\npytest.skip(allow_module_level=True)\n")
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize(("broken", "tools"), [("none", ["memcheck", "racecheck"]), ("memcheck", ["memcheck"])])
def test_sanitize_runs_both_tools_and_fails_with_either(broken, tools, tmp_path):
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(f'#!/bin/sh\necho "ran $* $PYTORCH_NO_CUDA_MEMORY_CACHING"\n[ "$2" != {broken} ]\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [str(ROOT / ".ci" / "sanitize"), "tests/test_gae.py"]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60)
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert [line.split()[2] for line in ran] == tools and (done.returncode == 0) == (broken == "none")
    for line in ran:
        assert "--error-exitcode 1" in line and line.endswith("-m sanitize tests/test_gae.py 1")


def test_the_licence_is_apache_2():
    licence = text("LICENSE")
    assert licence.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "The fastppo authors" in licence and len(licence.splitlines()) == 202
    assert 'license = "Apache-2.0"' in text("pyproject.toml")
