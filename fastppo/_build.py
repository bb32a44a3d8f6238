"""The compiled module `fastppo._C`: loads it, or keeps the reason why not, and hashes the sources it is built from.

CMake runs this file as a script to write that hash into the module, so it imports nothing but the standard library.
"""

import hashlib
import importlib
import importlib.metadata
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def load() -> tuple[ModuleType | None, str]:
    """The compiled module and "", or None and the reason."""
    try:
        return importlib.import_module("fastppo._C"), ""
    except ImportError as error:
        return None, str(error)


def module() -> ModuleType:
    """The compiled module, where a backend that needs it was chosen."""
    loaded, reason = load()
    assert loaded is not None, reason
    return loaded


def warn_if_missing() -> None:
    """Warn where the distribution is installed without its compiled module: all would be slow and nobody would know."""
    loaded, reason = load()
    if loaded is not None:
        return
    if hidden := hidden_module():
        warnings.warn(
            f"fastppo is imported from {Path(__file__).parent.parent}, which has no compiled kernels, and hides the "
            f"installed one, which has them, in {hidden.parent.parent}; ops fall back to PyTorch and are slow. Start "
            "Python in another folder, or make this checkout the installed one with `pip install -e .`.",
            RuntimeWarning,
            stacklevel=3,
        )
    elif is_installed():
        warnings.warn(
            f"fastppo is installed without its compiled kernels ({reason}); ops fall back to PyTorch and are slow. "
            "Install it with `pip install --force-reinstall --no-deps fastppo`, or from a checkout with "
            "`pip install -e .`; `python -m fastppo.env` says what is there.",
            RuntimeWarning,
            stacklevel=3,
        )


def hidden_module() -> Path | None:
    """The compiled module of another fastppo further back on sys.path, behind the folder that Python was started in.
    An editable install has its module there, and no package of its own."""
    here = Path(__file__).resolve().parent
    folders = (Path(entry or ".").resolve() / "fastppo" for entry in sys.path)
    others = (folder for folder in folders if folder != here and (folder / "__init__.py").is_file())
    return next((found for folder in others for found in folder.glob("_C.*.so")), None)


def is_installed() -> bool:
    """Whether pip knows a distribution named fastppo, as opposed to a checkout on the path."""
    try:
        importlib.metadata.distribution("fastppo")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def source_root() -> Path | None:
    """The checkout that holds this file and csrc/; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "csrc").is_dir() and (root / "CMakeLists.txt").is_file() else None


def csrc_hash(root: Path | None = None) -> str | None:
    """SHA-256 over the names and contents of csrc/ and CMakeLists.txt under `root`; None where there are no sources.

    A module built from this tree carries the same in `_C.csrc_hash`.
    """
    root = source_root() if root is None else root
    if root is None:
        return None
    paths = [root / "CMakeLists.txt", *(path for path in (root / "csrc").rglob("*") if path.is_file())]
    total = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


if __name__ == "__main__":
    tree, header = Path(sys.argv[1]), Path(sys.argv[2])
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(f'#define FASTPPO_CSRC_HASH "{csrc_hash(tree)}"\n')
