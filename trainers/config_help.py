"""The settings in words, made from the dataclasses: `--help` for the terminal and docs/config.md for the browser."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from trainers.config import walk
from trainers.config_types import shown

USAGE = """\
usage: {prog} [config=FILE.yaml or recipe] [key=value ...] [--help] [--print-config] [--dry-run] [--doctor]

{description}

  config=FILE    start from a YAML file or a recipe: {recipes}
  key=value      change one setting; the value is YAML: 0.1, true, null, [0.9, 0.99], "{{name: 1}}"
  --print-config print the settings as YAML, which config= takes, and stop
  --dry-run      check the settings, print the plan of the run and the model's size, and stop
  --doctor       make one step, look for what commonly goes wrong in it, say so in words, and stop: 0 if all is well
"""

SERVICE_USAGE = """\
usage: {prog} [config=FILE.yaml or recipe] [key=value ...] [--help] [--print-config] [--dry-run]

{description}

  config=FILE    start from a YAML file, the server's own or the training run's, or a recipe: {recipes}
  key=value      change one setting; the value is YAML: 0.1, true, null, [0.9, 0.99], "{{name: 1}}"
  --print-config print the settings as YAML, which config= takes, and stop
  --dry-run      check the settings, say what they serve, and stop; no model is looked at
"""

MARKDOWN = """\
# Settings

Made by `python -m trainers.cli --markdown` from `trainers/config.py`; `--help` of a trainer prints the same.
These are the settings of `python -m trainers.ppo`; the end says what is different in `python -m trainers.reinforce`.
A setting is changed with `key=value` on the command line or in the YAML file given as `config=FILE.yaml`.
**Free** settings may change when a run is resumed; with any other changed, resuming is refused.
"""


def blocks(config: Any, prefix: str = "") -> Iterator[tuple[str, str, list[tuple[str, Any, Any]]]]:
    """(name, docstring, [(key, field, default)]) of every block that has settings of its own, outer blocks first."""
    own = [(f"{prefix}{f.name}", f, getattr(config, f.name)) for f in fields(config)]
    leaves = [(key, f, value) for key, f, value in own if not is_dataclass(value)]
    if leaves:
        doc = type(config).__doc__ or ""
        generated = doc.startswith(f"{type(config).__name__}(")  # what @dataclass puts where none is written
        yield prefix.rstrip("."), "" if generated else " ".join(doc.split()), leaves
    for key, _, value in own:
        if is_dataclass(value):
            yield from blocks(value, key + ".")


def meaning(field: Any) -> str:
    choices = field.metadata["choices"]
    return field.metadata["help"] + (f" [{' | '.join(choices)}]" if choices else "")


def help_text(config: Any, *, prog: str, description: str, recipes: Sequence[str], width: int | None = None) -> str:
    """Every key with its default and its meaning, block by block, wrapped to `width` (default: the terminal's)."""
    width = max(40, min(width or shutil.get_terminal_size((100, 24)).columns, 160))
    usage = USAGE if hasattr(type(config), "algorithm") else SERVICE_USAGE
    parts = [usage.format(prog=prog, description=fold(description, width), recipes=", ".join(recipes))]
    column = min(48, width // 2)
    for name, doc, leaves in blocks(config):
        lines = [fold(": ".join(part for part in (name, doc) if part), width)]
        for key, field, default in leaves:
            left = f"  {key}={shown(default)}"
            right = textwrap.wrap(meaning(field), width - column) or [""]
            if len(left) >= column:
                lines.append(left)
            else:
                lines.append(left.ljust(column) + right.pop(0))
            lines += [" " * column + line for line in right]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def fold(text: str, width: int) -> str:
    """Wrapped paragraph by paragraph; indented ones (commands, tables) stay as they are."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(p if "\n " in p or p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)


def markdown(config: Any, other: Any, service: Any) -> str:
    """docs/config.md: every setting of `config`, and how the trees `other` and `service` differ from it."""
    parts = [MARKDOWN]
    for name, doc, leaves in blocks(config):
        parts.append("\n".join([f"## {name}", "", *([doc, ""] if doc else []), *table(leaves)]) + "\n")
    return "\n".join([*parts, differences(config, other), of_service(config, service)])


def table(leaves: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    yield from ("| key | default | meaning | choices | free |", "|---|---|---|---|---|")
    for key, field, default in leaves:
        choices = ", ".join(f"`{choice}`" for choice in field.metadata["choices"] or ())
        free = "yes" if field.metadata["free"] else ""
        text = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{key}` | `{shown(default)}` | {text} | {choices} | {free} |"


def of_service(config: Any, service: Any) -> str:
    """The section of docs/config.md about what a server has beside a trainer's blocks."""
    trainers = {key for key, _, _ in walk(config)}
    own = [leaf for leaf in walk(service) if leaf[0] not in trainers]
    shared = {key.partition(".")[0] for key, _, _ in walk(service)} & {key.partition(".")[0] for key in trainers}
    return "\n".join(
        [
            f"## python -m trainers.{service.name}",
            "",
            " ".join((type(service).__doc__ or "").split()),
            f"The blocks {', '.join(f'`{b}`' for b in sorted(shared))} are those above; these settings are its own:",
            "",
            *table(own),
            "",
        ]
    )


def differences(config: Any, other: Any) -> str:
    """The keys that `other` does not have, and the defaults that it has otherwise, as a section of docs/config.md."""
    mine = {key.replace(f"{config.name}.", f"{other.name}.", 1): value for key, _, value in walk(config)}
    theirs = {key: value for key, _, value in walk(other)}
    gone = sorted({key.partition(".")[0] for key in mine} - {key.partition(".")[0] for key in theirs})
    rows = [f"| `{key}` | `{shown(value)}` |" for key, value in theirs.items() if key not in mine or value != mine[key]]
    return "\n".join(
        [
            f"## python -m trainers.{other.name}",
            "",
            f"Every `{config.name}.X` above is `{other.name}.X` there. The blocks "
            f"{' and '.join(f'`{b}`' for b in gone)} do not exist, and these defaults are others:",
            "",
            "| key | default |",
            "|---|---|",
            *rows,
            "",
        ]
    )
