"""What a setting may hold, and the words for it: types as YAML has them, values as the command line has them."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, field
from types import NoneType
from typing import Any, get_args, get_origin

EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list[int]: "a list of integers, such as [1, 2]",
    list[float]: "a list of numbers, such as [0.9, 0.95]",
    list[str]: 'a list of texts, such as ["a", "b"]',
    dict[str, float]: "a mapping to numbers, such as {name: 0.5}",
    dict[str, Any]: "a mapping, such as {name: 1}",
}


def opt(
    default: Any, help: str, *, choices: tuple[str, ...] | None = None, free: bool = False, secret: bool = False
) -> Any:
    """A setting: its default, its meaning, its allowed words, whether a resumed run may change it (`free`), and whether
    it is never written down (`secret`)."""
    metadata = {"help": help, "choices": choices, "free": free, "secret": secret}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def block(cls: type) -> Any:
    return field(default_factory=cls)


def base_type(field: Field) -> tuple[Any, bool]:
    """(type without None, whether None is allowed)"""
    types = get_args(field.type) if NoneType in get_args(field.type) else (field.type,)
    return next(t for t in types if t is not NoneType), NoneType in types


def fits(value: Any, field: Field) -> bool:
    """Whether the value has the field's type as it stands: 2 is not true, 3.0 is not an integer, 5 is not a text."""
    base, optional = base_type(field)
    return optional if value is None else has_type(value, base)


def has_type(value: Any, base: Any) -> bool:
    if base is Any:
        return True
    if get_origin(base) is list:
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return listed and all(has_type(item, get_args(base)[0]) for item in value)
    if get_origin(base) is dict:
        item = get_args(base)[1]
        return isinstance(value, Mapping) and all(isinstance(k, str) and has_type(v, item) for k, v in value.items())
    if isinstance(value, bool):
        return base is bool
    return isinstance(value, int | float if base is float else base)


def expected(field: Field) -> str:
    base, optional = base_type(field)
    choices = field.metadata["choices"]
    return (one_of(choices) if choices else EXPECTED[base]) + (" or null" if optional else "")


def named(value: Any) -> str:
    """A value together with its kind: 3 and "3" look alike otherwise."""
    if isinstance(value, str):
        return f'the text "{value}"'
    return f"the number {value}" if has_type(value, float) else shown(value)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def one_of(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
