"""docs/migrate*.md: every row says where the setting went, and every key it names exists (or, if not yet, does not)."""

import inspect
import re
from pathlib import Path

import pytest

import fastppo
from trainers import config
from trainers.config import PPOTrainerConfig, walk
from trainers.config_types import shown
from trainers.suggestions import ELSEWHERE, last_part, suggest

ROOT = Path(__file__).parents[1]
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("migrate", "migrate_trl", "migrate_verl"))
SYSTEMS = ("TRL", "verl", "NeMo-Aligner", "trlX", "NeMo-RL")


def tree() -> dict[str, tuple[str, ...] | None]:
    """Every key of both trainers, and of every block, with its choices."""
    trees = [walk(cls()) for cls in getattr(config, "CONFIGS", {"ppo": PPOTrainerConfig}).values()]
    keys = {key: field.metadata["choices"] for rows in trees for key, field, _ in rows}
    if not any(key.startswith("reinforce.") for key in keys):
        keys |= {"reinforce" + key[3:]: choices for key, choices in keys.items() if key.startswith("ppo.")}
    return {".".join(key.split(".")[:n]): None for key in keys for n in range(1, key.count(".") + 1)} | keys


KEYS = tree()
BLOCKS = {key.split(".")[0] for key in KEYS}


def section(title: str) -> str:
    found = re.search(rf"^##+ {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, f"docs/migrate*.md have no section {title}"
    return found[1]


def rows(title: str, header: str = "| old key | fastppo key | what differs |") -> list[list[str]]:
    """Those of the section's tables with this header."""
    tables = re.findall(r"^(\|.*)\n\|[-|]+\n((?:\|.*\n?)+)", section(title), re.M)
    lines = [line for first, body in tables if first.startswith(header) for line in body.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(text: str) -> list[str]:
    """The keys of fastppo in backticks, `=value` included."""
    words = re.findall(r"`([^` ]+)`", text)
    return [word for word in words if "." in word and "*" not in word and word.split(".")[0] in BLOCKS]


def exists(word: str) -> bool:
    key, _, value = word.partition("=")
    choices = KEYS.get(key)
    return key in KEYS and (not value or choices is None or value in choices)


def problems(old: str, new: str, note: str) -> list[str]:
    if new.startswith("not yet"):
        return [f"{old}: {word} exists: no longer 'not yet'" for word in named(new) if exists(word)]
    wrong = [f"{old}: no such key or value: {word}" for word in named(new) + named(note) if not exists(word)]
    said = named(new) or new.startswith("`trainers.train(") or re.match(r"no key: \w", new)
    return wrong if said else [f"{old}: {new!r} is neither a key nor a reason"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_names_a_key_that_exists_or_says_why_there_is_none(system):
    table = rows(system)
    assert len(table) > 60 and all(len(row) == 3 for row in table)
    assert [problem for row in table for problem in problems(*row)] == []


def test_keys_named_outside_the_tables_exist():
    prose = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    assert named(prose) and [word for word in named(prose) if not exists(word)] == []


@pytest.mark.parametrize("system", ["TRL", "verl"])
def test_defaults_on_the_page_are_those_here(system):
    trainer = config.CONFIGS["reinforce" if system == "TRL" else "ppo"]()
    here = {key: shown(value) for key, _, value in walk(trainer)}
    table = rows(system, f"| key | {system} | here |")
    assert len(table) > 15 and all(len(row) == 4 for row in table)
    assert [(key, said) for key, _, said, _ in table if said.strip("`") != here[key.strip("`")]] == []
    assert [word for row in table for word in named(row[3]) if not exists(word)] == []


def test_names_of_the_ops_arguments_are_those_of_the_ops():
    table = rows("The ops' arguments", "| elsewhere | here |")
    calls = [call for _, here, _ in table for call in re.findall(r"`(\w+)\(([^)]*)\)`", here)]
    assert len(table) > 20 and len(calls) >= len(table)
    for op, arguments in calls:
        assert set(arguments.split(", ")) <= inspect.signature(getattr(fastppo, op)).parameters.keys(), (op, arguments)


def test_old_names_in_an_error_lead_where_the_page_says():
    moved: dict[str, set[str]] = {}
    for old, new, _ in [row for system in SYSTEMS for row in rows(system)]:
        for key in named(new)[:1]:
            words = re.findall(r"`([\w.]+)`", old)
            for name in {last_part(word, n) for word in words for n in (1, 2)} - {last_part(key)}:
                moved.setdefault(name, set()).add(key.partition("=")[0].replace("reinforce.", "ppo."))
    shared = set(ELSEWHERE) & set(moved)
    assert len(shared) > 180
    assert {name: ELSEWHERE[name] for name in shared if ELSEWHERE[name] not in moved[name]} == {}


def test_old_names_lead_somewhere_in_both_trainers():
    shared = {key for key in KEYS if not key.startswith(("ppo.", "reinforce.", "value"))}
    for block in ("ppo", "reinforce"):
        known = shared | {key for key in KEYS if key.startswith(block + ".")}
        assert suggest("method.num_rollouts", known)[0] == f"{block}.num_prompts_per_step"
        assert suggest("trainer.reinforce.num_rollouts_per_prompt", known)[0] == f"{block}.num_generations_per_prompt"
        assert suggest("model.optim.sched.min_lr", known)[0] == "policy.scheduler.min_lr_ratio"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("policy.sequence_packing.enabled", "policy.packing"),
        ("value.sequence_packing.enabled", "value.packing"),
        ("value.dtensor_cfg.activation_checkpointing", "value.gradient_checkpointing"),
        ("policy.dtensor_cfg.lora_cfg.enabled", "policy.peft.enabled"),
        ("policy.generation.vllm_cfg.precision", "policy.generation.dtype"),
        ("policy.generation.vllm_kwargs", "policy.generation.vllm_cfg.vllm_kwargs"),
        ("policy.generation.trtllm_cfg.gpu_memory_utilization",
         "policy.generation.trtllm_cfg.free_gpu_memory_fraction"),
        ("policy.generation.colocated.enabled", "policy.generation.release_memory"),
        ("policy.refit_buffer_size_gb", "policy.generation.refit_bucket_mb"),
        ("trainer.ppo.trt_llm.enable", "policy.generation.backend"),
        ("algorithm.kl_ctrl.target_kl", "ppo.kl_controller.target"),
        ("algorithm.filter_groups.enable", "ppo.use_dynamic_sampling"),
        ("mask_truncated_completions", "ppo.overlong_filtering"),
    ],
)  # fmt: skip
def test_where_nested_keys_lead(old, new):
    assert suggest(old, KEYS)[0] == new
