"""The command line: `python -m trainers.ppo [config=FILE] [key=value ...] [--help] [--dry-run] ...`.

Neither torch nor transformers is imported here, so that `--help` and a mistake answer at once.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trainers.arithmetic import ConfigError, check
from trainers.config import PPOTrainerConfig, ReinforceTrainerConfig
from trainers.config_help import help_text, markdown
from trainers.config_service import ServeConfig
from trainers.config_types import one_of
from trainers.settings import Known, compare_for_resume, config_yaml, known_keys, load_config, recipes, save_config
from trainers.suggestions import suggest

__all__ = [
    "Arguments",
    "ConfigError",
    "answer",
    "compare_for_resume",
    "config_yaml",
    "load_config",
    "parse",
    "save_config",
]

FLAGS = ("--help", "-h", "--print-config", "--dry-run", "--doctor")


@dataclass(frozen=True)
class Arguments:
    config: Any  # an instance of the config class, checked
    plan: Any  # what check() gave: a BatchPlan of a trainer
    print_config: bool
    dry_run: bool
    doctor: bool = False


def parse(
    argv: Sequence[str],
    config_class: type = PPOTrainerConfig,
    *,
    prog: str,
    description: str,
    check: Callable[[Any], Any] = check,
    load: Callable[..., Any] = load_config,
) -> Arguments:
    """The command line as checked settings.

    Exits with code 0 after --help, and with code 2 and a message on stderr for anything that cannot be used.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(config_class(), prog=prog, description=description, recipes=recipes(config_class)))
        raise SystemExit(0)
    with exit_on_error(prog):
        source, overrides = split_arguments(argv, known_keys(config_class))
        config = load(source, overrides, config_class)
        return Arguments(config, check(config), "--print-config" in argv, "--dry-run" in argv, "--doctor" in argv)


def answer(arguments: Arguments, *, prog: str) -> bool:
    """Print what --print-config or --dry-run ask for; True if one was given, so that nothing is to be trained."""
    if arguments.print_config:
        print(config_yaml(arguments.config), end="")
    if arguments.dry_run:
        with exit_on_error(prog):
            from trainers.dry_run import dry_run

            words = dry_run(arguments.config)
            if os.environ.get("RANK", "0") == "0":
                print(words)
    return arguments.print_config or arguments.dry_run


@contextmanager
def exit_on_error(prog: str) -> Iterator[None]:
    """A setting that cannot be used, or a package that is not there, is a short message and exit code 2."""
    try:
        yield
    except (ConfigError, ImportError) as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank finds the same mistake
            print(f"{prog}: error: " + "\n  ".join(str(error).splitlines()), file=sys.stderr)
        raise SystemExit(2) from None


def split_arguments(argv: Sequence[str], known: Known) -> tuple[str | None, list[str]]:
    """(value of config=, key=value texts); ConfigError for anything else, with the way to write it."""
    texts = [text for text in argv if text not in FLAGS]
    for text, following in zip(texts, [*texts, ""][1:], strict=True):
        if text.startswith("-"):
            raise ConfigError(dashed(text, following, known))
        if "=" not in text:
            raise ConfigError(bare(text, known))
    sources = [text.partition("=")[2] for text in texts if text.startswith("config=")]
    if len(sources) > 1:
        raise ConfigError(f"config= is given {len(sources)} times: {', '.join(sources)}")
    if sources == [""]:
        raise ConfigError(f"config= has no value: write config=FILE.yaml or a recipe ({one_of(recipes())})")
    return (sources[0] if sources else None), [text for text in texts if not text.startswith("config=")]


def dashed(text: str, following: str, known: Known) -> str:
    name, _, value = text.lstrip("-").partition("=")
    if flags := get_close_matches(text, FLAGS, 1, 0.8):
        return f"{text}: did you mean {flags[0]}?"
    if not value and following and "=" not in following and not following.startswith("--"):
        value = following
    key = name.replace("-", "_")
    near = [key] if key in known or key == "config" else suggest(key, known)
    ways = one_of([f"{key}={value or 'VALUE'}" for key in near or ["key"]])
    return f"{text}: settings are written key=value, without dashes: {ways}"


def bare(text: str, known: Known) -> str:
    if text in recipes() or text.endswith((".yaml", ".yml")):
        return f"{text}: expected key=value; write config={text}"
    near = [text] if text in known else suggest(text, known)
    return f"{text}: expected key=value" + (f", such as {near[0]}=VALUE" if near else "; --help lists every key")


def main(argv: Sequence[str]) -> None:
    if list(argv) != ["--markdown"]:
        raise SystemExit("usage: python -m trainers.cli --markdown > docs/config.md")
    print(markdown(PPOTrainerConfig(), ReinforceTrainerConfig(), ServeConfig()), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
