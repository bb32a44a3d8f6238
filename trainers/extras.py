"""Packages that only the trainers need, imported where they are used, with an error that says how to get them."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def require(module: str, *, extra: str = "trainer") -> ModuleType:
    """The imported module, or an ImportError that names the extra it comes with."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name != module.partition(".")[0]:
            raise  # the package is there; something that it needs is not
        raise missing(error.name, extra) from error


def require_installed(module: str, *, extra: str) -> None:
    """The same error for a module that is not there, without the seconds that importing it may take."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # the package that it is a part of
        found = None
    if found is None:
        raise missing(module, extra)


def missing(module: str, extra: str) -> ImportError:
    return ImportError(f'{module} is not installed: pip install "fastppo[{extra}]"', name=module)
