"""What stands between a change and a release: the checks of a wheel, of a tag, and of the workflows that call them."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import fastppo

ROOT = Path(__file__).parents[1]
INFO = f"fastppo-{fastppo.__version__}.dist-info"
METADATA = f"""\
Metadata-Version: 2.4
Name: fastppo
Version: {fastppo.__version__}
Requires-Dist: torch>=2.6
Requires-Dist: numpy
Requires-Dist: pytest; extra == "test"
"""


def run(script: str, argument: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / ".ci" / script), argument]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def contents() -> dict[str, str]:
    sources = [path for package in ("fastppo", "trainers") for path in (ROOT / package).rglob("*") if path.is_file()]
    kept = [path for path in sources if "__pycache__" not in path.parts and path.suffix != ".so"]
    files = {path.relative_to(ROOT).as_posix(): "" for path in kept}
    compiled = {"fastppo/_C.cpython-311-x86_64-linux-gnu.so": ""}
    return files | compiled | {f"{INFO}/METADATA": METADATA, f"{INFO}/licenses/LICENSE": ""}


def wheel(folder: Path, change: Callable[[dict[str, str]], object]) -> str:
    files = contents()
    change(files)
    path = folder / f"fastppo-{fastppo.__version__}-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return str(path)


def test_a_wheel_as_it_should_be_passes(tmp_path):
    done = run("check_wheel.py", wheel(tmp_path, lambda files: None))
    assert done.returncode == 0 and done.stdout.endswith(" bytes\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: files.update({"tests/test_gae.py": ""}), "should not be there: tests/test_gae.py"),
        (lambda files: files.update({"fastppo/x.pyc": ""}), "should not be there: fastppo/x.pyc"),
        (lambda files: files.pop("fastppo/py.typed"), "is missing: fastppo/py.typed"),
        (lambda files: files.pop(f"{INFO}/licenses/LICENSE"), "is missing: LICENSE"),
        (lambda files: files.pop("fastppo/_C.cpython-311-x86_64-linux-gnu.so"), "expected one compiled module"),
        (
            lambda files: files.update({f"{INFO}/METADATA": METADATA + "Requires-Dist: scipy\n"}),
            "torch and numpy alone",
        ),
        (lambda files: files.update({f"{INFO}/METADATA": METADATA.replace("n: 0", "n: 9")}), "version must be"),
        (lambda files: files.update({"fastppo/py.typed": "x" * 6_000_001}), "expected at most 6,000,000 bytes"),
    ],
)
def test_a_wheel_that_is_not_is_refused(change, problem, tmp_path):
    done = run("check_wheel.py", wheel(tmp_path, change))
    assert done.returncode == 1 and problem in done.stdout, done.stdout + done.stderr


@pytest.fixture
def release(tmp_path) -> Callable[[str], Path]:
    def make(heading: str) -> Path:
        (tmp_path / ".ci").mkdir()
        (tmp_path / "fastppo").mkdir()
        (tmp_path / "fastppo" / "__init__.py").write_text('__version__ = "1.2.3"\n')
        script = (ROOT / ".ci" / "release_notes.py").read_text()
        (tmp_path / ".ci" / "release_notes.py").write_text(script)
        notes = f"# Changelog\n\n## {heading}\n\n- Faster.\n\n## [1.2.2] - 2026-01-01\n\n- Slower.\n"
        (tmp_path / "CHANGELOG.md").write_text(notes)
        return tmp_path

    return make


def test_a_releases_notes_are_its_part_of_the_changelog(release):
    done = run("release_notes.py", "v1.2.3", release("[1.2.3] - 2026-02-03"))
    assert (done.returncode, done.stdout) == (0, "- Faster.\n"), done.stderr


@pytest.mark.parametrize(
    ("heading", "tag", "problem"),
    [
        ("[1.2.3] - 2026-02-03", "v1.2.4", "the tag must be v1.2.3, the version in fastppo/__init__.py, got v1.2.4"),
        ("[1.2.3] - unreleased", "v1.2.3", "- YYYY-MM-DD, got - unreleased"),
        ("[1.2.4] - 2026-02-03", "v1.2.3", "got no such section"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(heading, tag, problem, release):
    done = run("release_notes.py", tag, release(heading))
    assert done.returncode == 1 and problem in done.stderr and done.stdout == ""


def workflows() -> dict[str, dict]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_workflows_call_what_is_there():
    """actionlint checks their form."""
    found = workflows()
    assert found.keys() == {"ci", "wheels", "release"}
    steps = [step for flow in found.values() for job in flow["jobs"].values() for step in job.get("steps", [])]
    called = {name for step in steps for name in re.findall(r"\.ci/[\w.]+", step.get("run", ""))}
    assert called == {".ci/run", ".ci/check_wheel.py", ".ci/test_wheel", ".ci/release_notes.py"}
    assert all((ROOT / name).is_file() for name in called)


def test_what_builds_a_wheel_starts_their_workflow():
    """`on` is true to YAML 1.1."""
    watched = workflows()["wheels"][True]["pull_request"]["paths"]
    project = (ROOT / "pyproject.toml").read_text()
    before = re.findall(r"\.ci/[\w.]+", project[project.index("[tool.cibuildwheel]") :])
    assert before == [".ci/cuda_toolkit"]
    steps = workflows()["wheels"]["jobs"]["wheel"]["steps"]
    before += re.findall(r"\.ci/[\w.]+", " ".join(step.get("run", "") for step in steps))
    assert len(before) == 4
    for name in (*before, "csrc/gae/gae_cpu.cpp", "CMakeLists.txt", "fastppo/_build.py", "pyproject.toml"):
        assert any(fnmatch(name, pattern) for pattern in watched), name


def test_wheels_are_built_and_tested_for_every_python_and_both_ends_of_torch():
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    job = workflows()["wheels"]["jobs"]["wheel"]
    rows = job["strategy"]["matrix"]["include"]
    assert [row["python"] for row in rows] == pythons and all(
        row["tag"] == f"cp{row['python'].replace('.', '')}" for row in rows
    )
    commands = " ".join(step.get("run", "") for step in job["steps"])
    oldest = re.search(r'"torch>=([\d.]+)"', project)[1]
    assert f"dist/*.whl {oldest}.0" in commands and "dist/*.whl newest" in commands


def test_issues_are_asked_for_what_env_prints():
    fields = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())["body"]
    (asked,) = [field for field in fields if "python -m fastppo.env" in field["attributes"]["label"]]
    assert asked["validations"] == {"required": True}
