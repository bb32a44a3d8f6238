"""Settings from dicts, YAML files and `key=value` texts into the dataclasses of trainers/config.py, and back to YAML.

OmegaConf reads the YAML and does interpolation (`lr: ${policy.optimizer.lr}`); this file finds the words for what is
wrong. Types are taken strictly: the text that OmegaConf would make of the number 1e3 is "1000.0".
"""

import copy
import difflib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, is_dataclass
from pathlib import Path
from typing import Any, get_origin

from trainers.config import PPOTrainerConfig, ReinforceTrainerConfig, walk
from trainers.config_checks import ConfigError, wrong_choices
from trainers.config_types import base_type, expected, fits, has_type, named, one_of
from trainers.extras import require
from trainers.suggestions import suggest

RECIPES = Path(__file__).parent / "configs"
Known = Mapping[str, Field]  # every dotted key of the tree and its field


def load_config(source: Any = None, overrides: Sequence[str] = (), config_class: type = PPOTrainerConfig) -> Any:
    """The defaults, changed by `source`, changed by `overrides` in order.

    Args:
        source: a dict (nested, or with dotted keys), a recipe's name, the path of a YAML file, a config object or None.
        overrides: texts of the form `key=value`; the value is YAML.
        config_class: the tree's dataclass.

    Returns:
        A new instance of `config_class`, its blocks real dataclasses.

    Raises:
        ConfigError: an unknown key, a wrong type, a word that is not among the choices, or a file that cannot be read.
    """
    omegaconf = require("omegaconf")
    tree = copy.deepcopy(defaults(config_class))
    known = known_keys(config_class)
    for key, value in read_source(source, known):
        assign(tree, key, value, known, where=f"{source}: " if isinstance(source, str | Path) else "")
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: expected key=value")
        field = field_of(key, known)
        if field is None:
            raise unknown_key(key, known)
        assign(tree, key, parse_value(key, value, field, known), known)
    try:
        config = omegaconf.OmegaConf.to_object(tree)
    except omegaconf.errors.OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    if problems := list(wrong_choices(config)):
        raise ConfigError("\n".join(problems))
    return config


@functools.cache
def defaults(config_class: type) -> Any:
    """OmegaConf's tree of the defaults, to be copied: that takes a sixth of the time of making one."""
    return require("omegaconf").OmegaConf.structured(config_class)


def config_yaml(config: Any) -> str:
    """Every setting as YAML that gives `config` when it is loaded, but for secrets, which are left at null."""
    tree: dict[str, Any] = {}
    for key, field, value in walk(config):
        *blocks, name = key.split(".")
        node = tree
        for part in blocks:
            node = node.setdefault(part, {})
        node[name] = None if field.metadata["secret"] else literal(value)
    omegaconf = require("omegaconf")
    return str(omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.create(tree)))


def save_config(config: Any, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(config_yaml(config), encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def compare_for_resume(old: Any, new: Any) -> list[str]:
    """The keys that differ and that a resumed run may not change."""
    before = {key: value for key, _, value in walk(old)}
    return [key for key, field, value in walk(new) if not field.metadata["free"] and value != before[key]]


def recipes(config_class: type = PPOTrainerConfig) -> list[str]:
    """Names of the recipes of an algorithm: of PPO those that do not say another's name first."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    return [name for name in names if name.startswith("reinforce_") == (config_class is ReinforceTrainerConfig)]


def known_keys(config_class: type) -> Known:
    return {key: field for key, field, _ in walk(config_class())}


def block_names(known: Known) -> list[str]:
    parents = (key.split(".")[:depth] for key in known for depth in range(1, key.count(".") + 1))
    return list(dict.fromkeys(".".join(parts) for parts in parents))


def field_of(key: str, known: Known) -> Field | None:
    """The field that `key` sets: its own, or that of the open mapping it lies in, as env.params.min_terms does."""
    if key in known:
        return known[key]
    return next((f for k, f in known.items() if get_origin(f.type) is dict and key.startswith(k + ".")), None)


def unknown_key(key: str, known: Known, value: Any = None, where: str = "") -> ConfigError:
    if key in block_names(known):
        first = next(k for k in known if k.startswith(key + "."))
        return ConfigError(f"{where}{key} is a block of settings: set them one by one, as in {first}=VALUE")
    if key.partition(".")[0] in ("value", "value_loss_fn") and "value.mode" not in known:
        return ConfigError(
            f"{where}there is no setting {key}: this trainer has no critic, python -m trainers.ppo has one"
        )
    near = suggest(key, block_names(known) if isinstance(value, Mapping) else known)
    hint = f"; did you mean {one_of(near)}?" if near else "; --help lists every key"
    return ConfigError(f"{where}there is no setting {key}{hint}")


def read_source(source: Any, known: Known) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting in `source`, in order."""
    if source is None:
        return
    if is_dataclass(source) and not isinstance(source, type):
        yield from ((key, literal(value)) for key, _, value in walk(source))
    elif isinstance(source, Mapping):
        yield from flatten(source, known)
    elif isinstance(source, str | Path):
        yield from flatten(read_yaml(source), known, where=f"{source}: ")
    else:
        raise ConfigError(f"config: expected a dict, a recipe's name, a YAML file or None, got {type(source).__name__}")


def flatten(tree: Mapping[Any, Any], known: Known, *, where: str = "", prefix: str = "") -> Iterator[tuple[str, Any]]:
    blocks = block_names(known)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in blocks and isinstance(value, Mapping):
            yield from flatten(value, known, where=where, prefix=key + ".")
        elif field_of(key, known) is not None:
            yield key, value
        else:
            raise unknown_key(key, known, value, where)


def read_yaml(source: str | Path) -> Mapping[Any, Any]:
    path = Path(source).expanduser()
    if path.suffix not in (".yaml", ".yml") and os.sep not in str(source):
        path = RECIPES / f"{source}.yaml"
        if not path.is_file():
            near = difflib.get_close_matches(str(source), recipes(), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"config={source}: expected a YAML file or a recipe ({one_of(recipes())}){hint}")
    omegaconf, yaml = require("omegaconf"), require("yaml")
    try:
        tree = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, yaml.YAMLError) as error:  # OmegaConf's own errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"config={source}: cannot be read as YAML: {reason}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"config={source}: expected a mapping of settings, got a {type(tree).__name__}")
    return tree


def parse_value(key: str, text: str, field: Field, known: Known) -> Any:
    """What stands behind `key=`: YAML, except that a text is taken as it is (or without the quotes around it)."""
    base, optional = base_type(field)
    is_text = base is str and key in known
    if not text:
        null = [f"{key}=null for none"] if optional else []
        empty = [f"{key}='\"\"' for an empty text"] if is_text else []
        raise ConfigError(f"{key}= has no value: write {one_of([f'{key}=VALUE', *null, *empty])}")
    if is_text and not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""):
        return None if text == "null" else text
    omegaconf, yaml = require("omegaconf"), require("yaml")
    try:
        read = omegaconf.OmegaConf.from_dotlist([f"value={text}"])
        value = omegaconf.OmegaConf.to_container(read, resolve=False)["value"]
    except (ValueError, yaml.YAMLError):
        if is_text:
            return text
        raise ConfigError(f"{key}={text} cannot be read: expected {expected(field)}") from None
    if isinstance(value, dict) and (tight := [k for k, v in value.items() if v is None and ":" in str(k)]):
        raise ConfigError(f"{key}={text}: YAML wants a space after the colon of {tight[0]}")
    return value


def assign(tree: Any, key: str, value: Any, known: Known, *, where: str = "") -> None:
    omegaconf = require("omegaconf")
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    field = field_of(key, known)
    assert field is not None
    if base_type(field)[0] == list[float] and has_type(value, float):
        value = [value]
    interpolated = isinstance(value, str) and "${" in value
    inside_mapping = key not in known
    if not (interpolated or inside_mapping or fits(value, field)):
        raise ConfigError(f"{where}{key}: expected {expected(field)}, got {named(value)}")
    try:
        omegaconf.OmegaConf.update(tree, key, value, merge=False)
    except omegaconf.errors.OmegaConfBaseException as error:  # an object that YAML has no word for, inside a mapping
        raise ConfigError(f"{where}{key}: {str(error).splitlines()[0]}") from None


def literal(value: Any) -> Any:
    """The value such that OmegaConf reads the same: "${" in a text is not an interpolation."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [literal(item) for item in value]
    return value
