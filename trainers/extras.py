"""Packages that only the trainers need, imported where they are used, with an error that says how to get them."""

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str = "trainer") -> ModuleType:
    """The imported module, or an ImportError that names the extra it comes with."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name != module.partition(".")[0]:
            raise  # the package is there; something that it needs is not
        raise ImportError(f'{error.name} is not installed: pip install "fastppo[{extra}]"', name=error.name) from error
