"""docs/migrate.md against TRL's and verl's own files: names, defaults, the two scripts, losses and their gradients.

Of both packages only verl's core_algos is imported; how its files come onto the path: tests/test_other_trainers.py.
"""

import ast
import importlib
import math
import re
import shlex
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from tests.test_migrate import exists, named, rows, section
from tests.test_other_trainers import VERL, VERL_STUBS, packages, root  # noqa: F401
from trainers.advantages import estimate_advantages
from trainers.arithmetic import check
from trainers.config import CONFIGS, ReinforceTrainerConfig
from trainers.engines import Completion
from trainers.environments import Sample
from trainers.environments.function import FunctionEnvironment
from trainers.losses import PolicyLoss, SelectedRows
from trainers.rewards import Rewards
from trainers.rollout import pack
from trainers.settings import load_config

FIELDS = ("GRPOConfig", "trl/trainer/grpo_config.py"), ("RLOOConfig", "trl/trainer/rloo_config.py")
OTHERS = ("_BaseConfig", "trl/trainer/base_config.py"), ("TrainingArguments", "transformers/training_args.py")
# Arguments of the trainers, of the command line, and words of the page.
ARGUMENTS = {
    *("model", "model_name_or_path", "peft_config", "reward_funcs", "tools", "environment_factory", "rollout_func"),
    *("train_dataset", "eval_dataset", "processing_class", "callbacks", "prompt", "scale_rewards", "epsilon"),
}


def parsed(file: str) -> ast.Module:
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    if spec is None or not (path := Path(next(iter(spec.submodule_search_locations))) / rest).exists():
        pytest.skip(f"needs {package}: pip install trl==1.16.0, for Python 3.11 or newer")
    return ast.parse(path.read_text(encoding="utf-8"))


def member(file: str, *names: str) -> ast.AST:
    node = parsed(file)
    for name in names:
        node = next(each for each in node.body if getattr(each, "name", None) == name)
    return node


def settings(name: str, file: str) -> dict[str, object]:
    """Fields of a dataclass and those of their defaults that are literals."""
    found = {}
    for node in member(file, name).body:
        if isinstance(node, ast.AnnAssign):
            keywords = {each.arg: each.value for each in getattr(node.value, "keywords", [])}
            value = keywords.get("default", node.value)
            found[node.target.id] = value.value if isinstance(value, ast.Constant) else value
    return found


def old_names(system: str) -> set[str]:
    return {name for row in rows(system) for name in re.findall(r"`([\w.*]+)(?:=[^`]*)?`", row[0])}


def test_the_page_names_every_setting_of_grpo_and_rloo_and_no_other():
    own = set().union(*(settings(*each) for each in FIELDS))
    known = own.union(*(settings(*each) for each in OTHERS))
    written = {
        name for name in old_names("TRL") - old_names("PPOConfig") | {"learning_rate", "temperature"} if "." not in name
    }
    assert sorted(own - written) == []
    assert sorted(written - known - ARGUMENTS) == []


def test_trls_defaults_on_the_page_are_its_own():
    theirs: dict[str, object] = {}
    for each in reversed((*FIELDS[:1], *OTHERS)):
        theirs |= settings(*each)
    shown = [said for row in rows("TRL", "| key | TRL |") for said in re.findall(r"`(\w+)=([^`]*)`", row[1])]
    assert len(shown) > 12
    assert [(name, said) for name, said in shown if theirs[name] != ast.literal_eval(said)] == []


@pytest.fixture
def verl_settings():
    folder = root("verl") / "trainer" / "config"

    def flat(tree, prefix=""):
        for key, value in tree.items():
            yield prefix + key, value
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")

    keys = dict(flat(yaml.safe_load((folder / "_generated_ppo_megatron_trainer.yaml").read_text())))
    return keys | dict(flat(yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text())))


def full(name: str) -> str:
    """The page leaves out actor_rollout_ref."""
    return "actor_rollout_ref." * (name.partition(".")[0] in ("actor", "rollout", "ref", "model")) + name


def test_the_page_names_settings_that_verl_has(verl_settings):
    names = {full(name).removesuffix(".*") for name in old_names("verl") if "." in name}
    names = {name for name in names if not name.startswith("reward.reward_kwargs.")}  # open: read by the dapo manager
    assert len(names) > 120 and sorted(names - verl_settings.keys()) == []


def test_verls_defaults_on_the_page_are_its_own(verl_settings):
    cells = [row[1] for row in rows("verl", "| key | verl |")]
    shown = [said for cell in cells for said in re.findall(r"`([\w.]+)=([^`]*)`", cell)]
    wrong = [(name, said) for name, said in shown if str(verl_settings[full(name)]) != said]
    assert len(shown) > 20 and wrong == []


def code(system: str, mark: str) -> str:
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)^```", section(system), re.M | re.S)
    return found[1]


def call(source: str, name: str) -> ast.Call:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return next(node for node in calls if ast.unparse(node.func) == name)


def test_trls_script_and_the_one_here_are_of_the_same_run():
    theirs = {each.arg: ast.literal_eval(each.value) for each in call(code("TRL", "trl"), "GRPOConfig").keywords}
    ours = {each.arg: each.value for each in call(code("TRL", "fastppo"), "trainers.train").keywords}
    assert ast.literal_eval(ours["algorithm"]) == "reinforce"
    config = load_config(ast.literal_eval(ours["config"]), config_class=ReinforceTrainerConfig)
    plan, ranks = check(config), 8
    rollout = theirs["per_device_train_batch_size"] * ranks * theirs["steps_per_generation"]
    assert plan.sequences == rollout == plan.prompts * theirs["num_generations"]
    each = theirs["per_device_train_batch_size"] * ranks * theirs["gradient_accumulation_steps"]
    assert plan.policy_batch == each and plan.total_policy_steps == theirs["max_steps"]
    policy, loss, last = config.policy, config.loss_fn, config.checkpointing.save_period
    assert last * plan.policy_steps_per_rollout == theirs["save_steps"]
    assert policy.scheduler.decay_steps + policy.scheduler.warmup_steps == theirs["max_steps"]
    assert policy.generation.max_new_tokens == theirs["max_completion_length"]
    assert (policy.optimizer.lr, loss.reference_policy_kl_penalty) == (theirs["learning_rate"], theirs["beta"])
    assert loss.ratio_clip_max == theirs["epsilon_high"] and loss.aggregation == "token_sum_norm"


def test_trls_settings_in_the_script_exist():
    known = set().union(*(settings(*each) for each in (*FIELDS, *OTHERS)))
    assert {each.arg for each in call(code("TRL", "trl"), "GRPOConfig").keywords} <= known


def test_the_reward_of_trls_script_is_called_as_trl_calls_it():
    function = next(node for node in ast.parse(code("TRL", "fastppo")).body if isinstance(node, ast.FunctionDef))
    scope: dict = {"concise": lambda prompts, completions, **columns: [len(text) for text in completions]}
    exec(ast.unparse(function), scope)
    environment = FunctionEnvironment(scope["reward"], [{"prompt": "Say:", "completion": "x"}])
    sample = Sample(environment.prompts()[0], (1,), (2, 3), "hello", "stop")
    assert environment.score([sample, sample]) == [5, 5]


def words(mark: str) -> list[str]:
    return shlex.split(code("verl", mark).replace("\\\n", ""))


def test_verls_script_and_the_one_here_are_of_the_same_run(tmp_path, monkeypatch):
    theirs = dict(word.split("=", 1) for word in words("verl")[3:])
    command = words("fastppo")
    assert command[:5] == [
        "torchrun",
        "--nproc-per-node",
        theirs["trainer.n_gpus_per_node"],
        "-m",
        "trainers.reinforce",
    ]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "8")
    for word in command[5:]:
        if word.startswith(("data.prompts=", "data.val_prompts=")):
            path = Path(word.partition("=")[2]).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    config = load_config(None, command[5:], ReinforceTrainerConfig)
    plan, number = check(config), lambda name: float(theirs[name])
    actor, responses = "actor_rollout_ref.actor.", number("actor_rollout_ref.rollout.n")
    assert (plan.prompts, plan.responses_per_prompt) == (number("data.train_batch_size"), responses)
    assert plan.policy_batch == number(f"{actor}ppo_mini_batch_size") * responses
    assert plan.policy_micro_batch == number(f"{actor}ppo_micro_batch_size_per_gpu")
    assert config.policy.optimizer.lr == number(f"{actor}optim.lr")
    assert config.loss_fn.reference_policy_kl_penalty == number(f"{actor}kl_loss_coef")
    assert config.data.max_prompt_length == number("data.max_prompt_length")
    assert config.policy.generation.max_new_tokens == number("data.max_response_length")
    steps = 7473 // plan.prompts * number("trainer.total_epochs")
    assert config.algorithm.max_num_steps == steps and config.algorithm.max_num_epochs == number("trainer.total_epochs")


def test_verls_settings_in_the_script_exist(verl_settings):
    assert {word.partition("=")[0] for word in words("verl")[3:]} <= verl_settings.keys()


def test_the_reward_of_verls_script_calls_compute_score_once_for_each_response():
    source = code("verl", "verl_reward.py")
    scope: dict = {"compute_score": lambda *row: {"score": len(row[1])} if row[3]["dict"] else float(row[1] == row[2])}
    exec(source[source.index("def reward") :], scope)
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "ability": "math"}
    columns = {name: [row[name]] * 2 for name in row} | {"extra_info": [{"dict": False}, {"dict": True}]}
    assert scope["reward"](samples=["", ""], prompts=["", ""], outputs=["4", "five"], **columns) == [1.0, 4]


# Losses: responses of 5, 3, 1 and 6 tokens under a head of 11 tokens.

LENGTHS, WIDTH = torch.tensor([5, 3, 1, 6]), 6
MASK = torch.arange(WIDTH) < LENGTHS[:, None]


@pytest.fixture
def batch():
    torch.manual_seed(3)
    hidden, weight = torch.randn(4, WIDTH, 8, requires_grad=True), torch.randn(11, 8)
    targets = torch.randint(11, (4, WIDTH))
    logp = (hidden @ weight.T).log_softmax(-1)
    logprobs = logp.gather(-1, targets[..., None])[..., 0]
    old = logprobs.detach() + 0.4 * torch.randn(4, WIDTH)
    return SimpleNamespace(
        hidden=hidden, weight=weight, targets=targets, logprobs=logprobs, entropy=-(logp.exp() * logp).sum(-1),
        old=old, rollout=old + 0.8 * torch.randn(4, WIDTH), ref=old + 0.5 * torch.randn(4, WIDTH),
        advantages=torch.tensor([1.5, -0.7, 2.0, -1.1]), mask=MASK,
    )  # fmt: skip


def said(system: str, *cells: str) -> list[str]:
    """The `key=value` of the rows of these settings, those of the second column last."""
    found = [row for cell in cells for row in rows(system) if f"`{cell}`" in row[0] or cell == row[0]]
    assert len(found) == len(cells), cells
    return [word for column in (2, 1) for row in found for word in named(row[column]) if "=" in word and exists(word)]


def ours(batch, overrides: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the hidden states with these settings."""
    overrides = [word for word in overrides if word.startswith("loss_fn.")]
    config = load_config(None, ["loss_fn.reference_policy_kl_penalty=0", *overrides], ReinforceTrainerConfig)
    loss = PolicyLoss(config.loss_fn, temperature=1.0, norm_length=WIDTH)
    per_token = {
        "old_logprobs": batch.old,
        "rollout_logprobs": batch.rollout,
        "ref_logprobs": batch.ref,
        "advantages": batch.advantages[:, None].expand(4, WIDTH),
    }
    selected = SelectedRows(
        targets=batch.targets[MASK],
        cu_seqlens=torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)),
        num_tokens=int(LENGTHS.sum()),
        num_seqs=4,
        fields={name: value[MASK] for name, value in per_token.items()},
    )
    step = loss(batch.hidden[MASK], batch.weight, selected)
    return step.loss, torch.autograd.grad(step.loss, batch.hidden)[0]


def trls(batch, kind: str = "grpo", **changed) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of TRL's own `_compute_loss`, compiled from its file."""
    name, file = f"{kind.upper()}Trainer", f"trl/trainer/{kind}_trainer.py"
    function = member(file, name, "_compute_loss")
    scope: dict = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    args = settings(*FIELDS[kind == "rloo"]) | changed
    high = args["epsilon"] if args["epsilon_high"] is None else args["epsilon_high"]
    me = SimpleNamespace(**args | {"epsilon_high": high, "epsilon_low": args["epsilon"]})
    me.args = SimpleNamespace(**args | {"steps_per_generation": 1})
    me.accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    me.accelerator.sync_gradients = False
    me._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logprobs, batch.entropy, None)
    me.model, me._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
    me.aux_loss_enabled, me.current_gradient_accumulation_steps = False, 1
    me._entropy_bonus_enabled = bool(args.get("entropy_coef"))
    me.max_completion_length = WIDTH
    nothing = torch.zeros(4, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": batch.targets,
        "completion_mask": MASK.int(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "old_logps": (batch.old * MASK).sum(1),
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": MASK.sum(),
    }
    ratio, most = (batch.old - batch.rollout).exp(), args.get("vllm_importance_sampling_clip_max")
    if args.get("vllm_importance_sampling_mode") == "token_truncate":
        inputs["importance_sampling_ratio"] = ratio.clamp(max=most)
    elif args.get("vllm_importance_sampling_mode") == "token_mask":
        inputs["importance_sampling_ratio"] = ratio.masked_fill(ratio > most, 0.0)
    loss = scope["_compute_loss"](me, None, inputs)
    return loss, torch.autograd.grad(loss, batch.hidden)[0]


def assert_same(got, right) -> None:
    torch.testing.assert_close(got[0], right[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[1], right[1], rtol=1e-4, atol=1e-6)
    assert right[1].abs().max() > 1e-2


SEQUENCE = 'importance_sampling_level="sequence"'
TRUNCATE, MASKED = ('vllm_importance_sampling_mode="token_truncate"', 'vllm_importance_sampling_mode="token_mask"')


@pytest.mark.parametrize(
    ("cells", "more", "others"),
    [
        (['loss_type="dapo"'], [], {}),
        (['loss_type="bnpo"'], [], {}),
        (['loss_type="grpo"'], [], {}),
        (['loss_type="dr_grpo"'], [], {}),
        (['loss_type="cispo"'], ["loss_fn.ratio_clip_max=0.3"], {"epsilon_high": 1.3}),
        (['loss_type="sapo"'], [], {}),
        (['loss_type="luspo"'], [], {"importance_sampling_level": "sequence"}),
        (['loss_type="grpo"', SEQUENCE], [], {}),
        (['loss_type="dapo"', SEQUENCE], [], {}),
        (['loss_type="dapo"'], ["loss_fn.ratio_clip_max=0.3"], {"epsilon_high": 0.3}),
        (['loss_type="dapo"'], ["loss_fn.ratio_clip_c=1.4"], {"delta": 1.4}),
        (['loss_type="dapo"'], ["loss_fn.entropy_bonus=0.1"], {"entropy_coef": 0.1}),
        (['loss_type="dapo"', TRUNCATE], ["loss_fn.importance_sampling.max=1.5"], {"use_vllm": True}),
        (['loss_type="dapo"', MASKED], ["loss_fn.importance_sampling.max=1.5"], {"use_vllm": True}),
    ],
)
def test_trls_losses_are_those_of_the_pages_settings(cells, more, others, batch):
    theirs = {name: value for cell in cells for name, value in re.findall(r'^(\w+)="(\w+)"$', cell)}
    theirs |= {"beta": 0.0, "vllm_importance_sampling_clip_max": 1.5} | others
    assert_same(ours(batch, [*said("TRL", *cells), *more]), trls(batch, **theirs))


@pytest.mark.parametrize("corrected", [True, False])
def test_trls_kl_has_the_gradient_that_the_page_says(corrected, batch):
    """With the ratio's factor equal where the ratio is 1, without it everywhere."""
    if corrected:
        batch.old = batch.logprobs.detach()
    page = ["loss_fn.use_kl_in_reward=false", "loss_fn.reference_policy_kl_penalty=0.3"]
    page += ["loss_fn.reference_policy_kl_type=k3"]
    page += said("TRL", "use_bias_correction_kl" if corrected else "use_bias_correction_kl=False")
    right = trls(batch, loss_type="dapo", beta=0.3, use_bias_correction_kl=corrected)
    assert_same(ours(batch, page), right)


def test_rloos_first_optimizer_step_is_that_of_the_pages_settings(batch):
    batch.old = batch.logprobs.detach()
    (_, got), (_, right) = ours(batch, said("TRL", "RLOO's loss")), trls(batch, "rloo")
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


ACTOR = "actor."
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("mode", "aggregation"),
    [(loss, how) for loss in ("vanilla", "gspo", "cispo") for how in MODES]
    + [("sapo", "token-mean"), ("geo_mean", "token-mean"), ("gpg", "token-mean")],
)
def test_verls_losses_are_those_of_the_pages_settings(mode, aggregation, batch, packages):  # noqa: F811
    packages(VERL, VERL_STUBS)
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    config = algorithms.ActorConfig()
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "tau_pos": 1.0, "tau_neg": 1.05}
    config.__dict__.update(values, clip_ratio_c=3.0, global_batch_info={}, loss_agg_mode=aggregation)
    advantages = batch.advantages[:, None].expand(4, WIDTH)
    loss, _ = algorithms.get_policy_loss_fn(mode)(
        batch.old, batch.logprobs, advantages, MASK.float(), loss_agg_mode=aggregation, config=config
    )
    page = said("verl", f"{ACTOR}loss_agg_mode={aggregation}") + said("verl", f"{ACTOR}policy_loss.loss_mode={mode}")
    if mode in ("vanilla", "gspo", "cispo", "geo_mean"):
        page.append("loss_fn.ratio_clip_max=0.3")
    if mode == "vanilla":
        page.append("loss_fn.ratio_clip_c=3")
    assert_same(ours(batch, page), (loss, torch.autograd.grad(loss, batch.hidden, retain_graph=True)[0]))


@pytest.mark.parametrize("kind", ["low_var_kl", "mse", "k3+"])
def test_verls_kl_losses_are_those_of_the_pages_settings(kind, batch, packages):  # noqa: F811
    packages(VERL, VERL_STUBS)
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    estimate = algorithms.kl_penalty(batch.logprobs, batch.ref, kind)
    theirs = 0.3 * algorithms.agg_loss(estimate, MASK.float(), "token-mean")
    name = {"low_var_kl": "k3", "mse": "k2", "k3+": "k3"}[kind]
    table = {row[0]: row[2 if kind != "k3+" else 1] for row in rows("verl")}
    cell = f"`{ACTOR}kl_loss_type`" if kind != "k3+" else f"`{ACTOR}kl_loss_type=k3+` and others with a plus"
    assert kind == "k3+" or f"{kind}: {name}" in table[cell]
    batch.advantages = torch.zeros(4)
    page = ["loss_fn.use_kl_in_reward=false", "loss_fn.reference_policy_kl_penalty=0.3"]
    page += [f"loss_fn.reference_policy_kl_type={name}", *named(table[cell])]
    assert_same(ours(batch, page), (theirs, torch.autograd.grad(theirs, batch.hidden)[0]))


REWARDS = torch.tensor([1.0, 0.0, 5.0, 3.0])  # two prompts, two responses each


def advantages(page: list[str], algorithm: str = "reinforce") -> torch.Tensor:
    """[B, WIDTH] of one prompt token and LENGTHS response tokens each, values 0, 0.1, ...; 0 outside the mask."""
    prefix = f"{algorithm}."
    config = load_config(None, [word for word in page if word.startswith(prefix)], CONFIGS[algorithm])
    sampled = [Completion([8] * n, [-1.0] * n, "stop", 0) for n in LENGTHS.tolist()]
    packed = pack([[5]] * 4, sampled)
    zeros = torch.zeros(packed.tokens.numel())
    scores = zeros.clone()
    scores[packed.last_selected()] = REWARDS
    values = 0.1 * (packed.positions - 1).clamp(min=0)
    packed.update(raw_reward=REWARDS, token_scores=scores, values=values, next_values=torch.zeros(4))
    packed.update(group=torch.tensor([0, 0, 1, 1]), old_logprobs=zeros, ref_logprobs=zeros)
    estimated = estimate_advantages(Rewards(config.algorithm, config.loss_fn)(packed, 0.0), config.algorithm)
    return torch.zeros(4, WIDTH).masked_scatter(MASK, estimated.advantages[packed.mask])


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_trls_advantages_are_those_of_the_pages_settings(scale):
    less_mean = REWARDS - REWARDS.view(2, 2).mean(1).repeat_interleave(2)
    deviation = {"group": REWARDS.view(2, 2).std(1).repeat_interleave(2), "none": 1.0, "batch": REWARDS.std()}[scale]
    right = less_mean / deviation * (math.sqrt(4 / 3) if scale == "batch" else 1)  # over n - 1 there
    got = advantages(said("TRL", f'scale_rewards="{scale}"'))
    torch.testing.assert_close(got, MASK * right[:, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_verls_advantages_are_those_of_the_pages_settings(name, packages):  # noqa: F811
    packages(VERL, VERL_STUBS)
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    rewards = torch.zeros(4, WIDTH)
    rewards[torch.arange(4), LENGTHS - 1] = REWARDS
    arguments = {"token_level_rewards": rewards, "response_mask": MASK.float()}
    page = said("verl", f"algorithm.adv_estimator={name}")
    if name == "gae":
        values = 0.1 * torch.arange(WIDTH).expand(4, WIDTH) * MASK
        arguments |= {"values": values, "gamma": 0.9, "lam": 0.8}
        page += ["ppo.adv_estimator.gae_gamma=0.9", "ppo.adv_estimator.gae_lambda=0.8"]
    else:
        arguments["index"] = np.array(["a", "a", "b", "b"])
        arguments["config"] = SimpleNamespace(gamma=1.0)
    right = algorithms.get_adv_estimator_fn(name)(**arguments)[0] * MASK
    tokens = int(MASK.sum())
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):  # the deviation is over n - 1 there
        right *= math.sqrt(tokens / (tokens - 1))
    got = advantages(page, "ppo" if name == "gae" else "reinforce")
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
