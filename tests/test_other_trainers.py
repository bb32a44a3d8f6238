"""The examples for verl, OpenRLHF and NeMo-RL against these packages' own source.

Where a package's files are on the path, though not what it needs (Ray, DeepSpeed, ...), its own loss is loaded from its
file, with empty modules for what that file imports and the loss does not use, and must give the example's values and
gradients. `.ci/run` has the first two so; NeMo-RL is on no index:

    pip install --no-deps --only-binary :all: --python-version 3.11 --platform manylinux1_x86_64 \\
        --target build/peers verl==0.9.1 openrlhf==0.11.2
    rm -r build/peers/tests build/peers/scripts  # which would be taken for this repository's
    git clone https://github.com/NVIDIA-NeMo/RL build/nemo_rl && git -C build/nemo_rl checkout 7ea279a
    PYTHONPATH=build/peers:build/nemo_rl pytest tests/test_other_trainers.py

Always: signatures against tests/trainer_signatures.json, and the example for NeMo-RL against the numbers of NeMo-RL's
source in tests/nemo_rl_losses.json, which that source makes anew:

    PYTHONPATH=build/nemo_rl python -m tests.test_other_trainers > tests/nemo_rl_losses.json
"""

import ast
import importlib
import json
import os
import re
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.examples import EXAMPLES, load

RECORDED = json.loads((Path(__file__).parent / "trainer_signatures.json").read_text())
# Ours -> what it takes the place of.
REPLACED = {
    ("verl_fastppo", "policy_loss"): "compute_policy_loss_vanilla",
    ("verl_fastppo", "fused_head"): "FusedLinearForPPO.forward",
    ("openrlhf_fastppo", "forward"): "PolicyLoss.forward",
    ("nemo_rl_fastppo", "FastPPOLossFn.__init__"): "ClippedPGLossFn.__init__",
    ("nemo_rl_fastppo", "FastPPOLossFn.__call__"): "ClippedPGLossFn.__call__",
}


def arguments(source: str, name: str) -> list[str]:
    """Of a function or a class's method, read from its source."""
    nodes: list[ast.stmt] = ast.parse(source).body
    for part in name.split("."):
        found = next(node for node in nodes if getattr(node, "name", None) == part)
        nodes = found.body
    return [argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


@pytest.mark.parametrize(("ours", "theirs"), REPLACED.items(), ids=lambda x: x if isinstance(x, str) else x[0])
def test_examples_take_what_the_trainers_pass(ours, theirs):
    recorded = {name: args for files in RECORDED.values() for names in files.values() for name, args in names.items()}
    file, name = ours
    assert arguments((EXAMPLES / f"{file}.py").read_text(), name) == recorded[theirs]


def root(package: str) -> Path:
    """The folder of a package, which is not imported."""
    spec = PathFinder.find_spec(package)
    if spec is None:
        pytest.skip(f"needs the source of {package} on the path: see this file's docstring")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.mark.parametrize("release", RECORDED)
def test_recorded_signatures_are_those_of_the_package(release):
    folder = root(release.split()[0]).parent
    for file, names in RECORDED[release].items():
        for name, recorded in names.items():
            assert arguments((folder / file).read_text(), name) == recorded, name


class Anything(ModuleType):
    """A module that has whatever is imported from it."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (dict,), {})


@pytest.fixture
def packages(monkeypatch):
    """packages(names, stubs): packages whose own __init__ is not run, and modules that are empty."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])

    def make(names: str, stubs: str) -> None:
        first = names.split()[0]
        folder = root(first)
        for name in [key for key in sys.modules if key == first or key.startswith(first + ".")]:
            monkeypatch.delitem(sys.modules, name)
        modules = {name: Anything(name) for name in names.split()}
        for name, module in modules.items():
            module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        modules |= {name: Anything(name) for name in stubs.split() if "." in name or find_spec(name) is None}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, last = name.rpartition(".")
            if parent in modules:
                setattr(modules[parent], last, module)

    yield make
    for name in [key for key in sys.modules if key.split(".")[0] in ("verl", "openrlhf", "nemo_rl")]:
        del sys.modules[name]


def rows(width: int = 11) -> dict[str, torch.Tensor]:
    old = -3 * torch.rand(4, width)
    mask = torch.rand(4, width) < 0.7
    mask[2] = False  # a response without a token
    return {
        "logprobs": (old + 0.4 * torch.randn(4, width)).requires_grad_(),
        "old": old,
        "advantages": 2 * torch.randn(4, width),
        "mask": mask.float(),
        "rollout": old + 0.3 * torch.randn(4, width),
        "ref": old + 0.3 * torch.randn(4, width),
    }


def same(ours, theirs, inputs) -> None:
    """Loss and gradient."""
    torch.testing.assert_close(ours, theirs)
    got, right = (torch.autograd.grad(loss, inputs)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, right)
    assert right.abs().max() > 1e-3


VERL = "verl verl.trainer verl.trainer.ppo verl.utils verl.utils.experimental"
VERL_STUBS = "omegaconf tensordict verl.utils.device verl.trainer.config verl.workers verl.workers.config"


class Config(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("weighted", [False, True])
def test_verls_registered_loss_is_its_vanilla_loss(mode, weighted, packages):
    packages(VERL, VERL_STUBS)
    load("verl_fastppo")
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    x = rows()
    counts = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 7, "loss_scale_factor": 5}
    for batch in ({}, counts):
        config = Config(
            clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.28, clip_ratio_c=1.3, global_batch_info=batch
        )
        keywords = {"loss_agg_mode": mode, "config": config}
        keywords["rollout_is_weights"] = 2 * torch.rand(4, 11) if weighted else None
        arguments = (x["old"], x["logprobs"], x["advantages"], x["mask"])
        losses = [algorithms.get_policy_loss_fn(name)(*arguments, **keywords) for name in ("fastppo", "vanilla")]
        same(losses[0][0], losses[1][0], x["logprobs"])
        assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-5)
        assert min(losses[1][1].values()) != 0


def test_verls_fused_head_has_its_own_values_and_gradients(packages):
    packages(VERL, VERL_STUBS)
    fused = importlib.import_module("verl.utils.experimental.torch_functional")
    theirs = fused.FusedLinearForPPO()
    arguments = [torch.randn(2, 9, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)]
    ids, weights = torch.randint(50, (2, 9)), torch.randn(2, 9)
    results = []
    for module in ("theirs", "ours"):
        if module == "ours":
            load("verl_fastppo")
        logprobs, entropy = theirs(*arguments, ids.int(), temperature=0.7)
        grads = torch.autograd.grad((weights * (logprobs + 0.1 * entropy)).sum(), arguments)
        results.append((logprobs, entropy, *grads))
    for ours, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert "LinearLogprob" in logprobs.grad_fn.next_functions[0][0].name()


OPENRLHF = "openrlhf openrlhf.models openrlhf.trainer openrlhf.trainer.ray openrlhf.cli openrlhf.utils"
OPENRLHF_STUBS = (
    "deepspeed ray.util ray.util.placement_group openrlhf.models.utils openrlhf.trainer.ppo_utils "
    "openrlhf.trainer.ppo_utils.experience openrlhf.utils.deepspeed openrlhf.utils.deepspeed.deepspeed_utils "
    "openrlhf.utils.distributed_util openrlhf.utils.loss_utils openrlhf.utils.vlm_utils "
    "openrlhf.trainer.ray.launcher openrlhf.trainer.ray.ppo_critic openrlhf.trainer.ray.utils"
)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("token_level", [True, False])
def test_openrlhfs_policy_loss_is_replaced_by_its_equal(kind, token_level, packages):
    packages("openrlhf openrlhf.models", "deepspeed")
    load("openrlhf_fastppo").install()
    losses = importlib.import_module("openrlhf.models.loss")
    x = rows()
    x["mask"][2, 0] = 1
    arguments = (x["logprobs"], x["old"], x["advantages"])
    for counts in ({}, {"dp_size": 2, "batch_num_tokens": torch.tensor(40.0), "global_batch_size": torch.tensor(7.0)}):
        for dual_clip in (None, 1.3):
            settings = {
                "clip_eps_high": 0.28,
                "dual_clip": dual_clip,
                "token_level_loss": token_level,
                "policy_loss_type": kind,
            }
            loss = losses.PolicyLoss(**settings)
            ours, theirs = (
                forward(*arguments, action_mask=x["mask"], **counts) for forward in (loss, loss.openrlhf_forward)
            )
            same(ours[0], theirs[0], x["logprobs"])
            torch.testing.assert_close(ours[2].float(), theirs[2])
            assert ours[3:] == theirs[3:] == (None, None)
            if kind == "ppo":  # GSPO's masked positions have ratio 0 there, and count as clipped
                torch.testing.assert_close(ours[1].float(), theirs[1])


def test_openrlhfs_corrections_are_left_to_it(packages):
    packages("openrlhf openrlhf.models", "deepspeed")
    load("openrlhf_fastppo").install()
    loss = importlib.import_module("openrlhf.models.loss").PolicyLoss(is_correction_level="token")
    x = rows()
    x["mask"][2, 0] = 1
    arguments = (x["logprobs"], x["old"], x["advantages"], x["mask"], x["rollout"])
    ours, theirs = (forward(*arguments) for forward in (loss, loss.openrlhf_forward))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and theirs[3] is not None


class Ray(ModuleType):
    """What OpenRLHF's actors and the example ask of Ray; `started` has the runtime_env of each `init`."""

    def __init__(self):
        super().__init__("ray")
        self.started: list[dict] = []

    def init(self, runtime_env):
        self.started.append(runtime_env)

    def is_initialized(self):
        return bool(self.started)

    def remote(self, **resources):
        return lambda function: function


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Ray())
    for name in load("openrlhf_fastppo").ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return sys.modules["ray"]


def test_rays_workers_are_given_the_hook_and_where_it_is(ray, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    example = load("openrlhf_fastppo")
    example.start_ray()
    [started] = ray.started
    module, name = started["worker_process_setup_hook"].split(".")
    folder, mine = started["env_vars"].pop("PYTHONPATH").split(os.pathsep)
    assert (Path(folder) / f"{module}.py").samefile(example.__file__) and mine == "mine"
    assert getattr(example, name) is example.install
    assert started["env_vars"] == example.ENVIRONMENT | {"NCCL_DEBUG": "INFO"}


def test_openrlhf_takes_the_ray_that_the_example_started(ray, packages):
    packages(OPENRLHF, OPENRLHF_STUBS + " openrlhf.trainer.ray.ppo_actor")
    example, trainer = load("openrlhf_fastppo"), importlib.import_module("openrlhf.cli.train_ppo_ray")

    class StartedError(Exception):
        pass

    def stop(args):
        raise StartedError

    trainer.get_strategy = stop  # what it asks for next
    for start in (lambda: None, example.start_ray):
        ray.started.clear()
        start()
        with pytest.raises(StartedError):
            trainer.train(None)
        [started] = ray.started
        assert started["env_vars"].items() >= example.ENVIRONMENT.items()
    assert started["worker_process_setup_hook"] == "openrlhf_fastppo.install"


def test_the_hook_waits_for_the_losses_and_openrlhfs_actor_has_ours(ray, packages, capsys):
    packages(OPENRLHF, OPENRLHF_STUBS)
    example = load("openrlhf_fastppo")
    example.install()
    assert "openrlhf.models.loss" not in sys.modules and not capsys.readouterr().out
    losses = importlib.import_module("openrlhf.models.loss")
    assert f"PolicyLoss is fastppo's in process {os.getpid()}" in capsys.readouterr().out
    sys.modules["openrlhf.models"].PolicyLoss = losses.PolicyLoss  # as its __init__ does
    actor = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
    assert actor.PolicyLoss.forward is example.forward
    again = load("openrlhf_fastppo")
    again.install()  # by hand, after the import
    assert actor.PolicyLoss.forward is again.forward


NEMO = "nemo_rl nemo_rl.algorithms nemo_rl.algorithms.loss nemo_rl.distributed nemo_rl.models nemo_rl.models.dtensor"
NEMO_STUBS = (
    "nemo_rl.distributed.batched_data_dict nemo_rl.distributed.model_utils nemo_rl.models.dtensor.parallelize "
    "nemo_rl.algorithms.x_token nemo_rl.algorithms.x_token.loss_utils nemo_rl.data nemo_rl.data.chat_templates "
    "nemo_rl.models.policy nemo_rl.utils nemo_rl.utils.fastokens nemo_rl.utils.logger"
)
NEMO_FILE = Path(__file__).parent / "nemo_rl_losses.json"
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}


def corrected(kind: str, high: float, low: float | None = None) -> dict:
    truncated = {"type": kind, "ratio": high, "ratio_min": low}
    settings = {f"truncated_importance_sampling_{name}": value for name, value in truncated.items()}
    return settings | {"use_importance_sampling_correction": True}


NEMO_LOSSES = {
    "ppo": {"ratio_clip_max": 0.28, "ratio_clip_c": 1.3},
    "no_kl": {"reference_policy_kl_penalty": 0.0},
    "kl_in_reward": {"use_kl_in_reward": True},
    "per_sequence": {"token_level_loss": False},
    "reinforce": {"disable_ppo_ratio": True, "ratio_clip_c": 1.3},
    "cispo": {"use_cispo": True},
    "gspo": GSPO | {"ratio_clip_max": 0.03, "ratio_clip_c": 1.02},
    "gspo_reinforce": GSPO | {"disable_ppo_ratio": True},
    "on_policy": {"force_on_policy_ratio": True},
    "on_policy_reinforce": {"force_on_policy_ratio": True, "disable_ppo_ratio": True},
    "on_policy_gspo": GSPO | {"force_on_policy_ratio": True},
    "on_policy_tis": corrected("tis", 1.2, 0.9) | {"force_on_policy_ratio": True},
    "tis": corrected("tis", 1.2),
    "icepop": corrected("icepop", 1.2, 0.8),
    "seq_mask_tis": corrected("seq-mask-tis", 1.1, 0.98),
    "per_sequence_seq_mask_tis": corrected("seq-mask-tis", 1.1, 0.98) | {"token_level_loss": False},
}
BASE = {"reference_policy_kl_penalty": 0.05}


def nemo_inputs() -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in json.loads(NEMO_FILE.read_text())["inputs"].items()}


def nemo_run(loss_fn, inputs: dict[str, torch.Tensor]) -> dict:
    first = torch.zeros(len(inputs["sample_mask"]), 1)  # what stands at a row's first token is not read
    data = {name: torch.cat([first, value], 1) for name, value in inputs.items() if value.dim() == 2}
    logprobs = data.pop("logprobs")[:, 1:].clone().requires_grad_()
    data["sample_mask"] = inputs["sample_mask"]
    counts = {"global_valid_seqs": torch.tensor(6.0), "global_valid_toks": torch.tensor(50.0)}
    loss, metrics = loss_fn(next_token_logprobs=logprobs, data=data, **counts)
    return {"loss": loss.item(), "grad": torch.autograd.grad(loss, logprobs)[0], "metrics": metrics}


METRICS = ("loss", "kl_penalty", "probs_ratio", "token_mult_prob_error", "num_valid_samples")


def nemo_same(kind: str, ours: dict, theirs: dict) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    torch.testing.assert_close(ours["grad"], torch.as_tensor(theirs["grad"]))
    names = set(ours["metrics"])
    assert names == set(METRICS)
    if kind in ("reinforce", "gspo_reinforce"):  # there it is the mean log-prob, here the ratio
        names -= {"probs_ratio"}
    for name in names:
        assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], rel=1e-5), name


@pytest.fixture
def recorded_nemo(monkeypatch):
    """The example's class, on what its __init__ takes from NeMo-RL's; configs have NeMo-RL's defaults."""

    class ClippedPGLossFn:
        def __init__(self, cfg, use_fused_linear_logprobs=False):
            vars(self).update(vars(cfg))
            self.reference_policy_kl_penalty = 0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
            self.loss_type = "token" if cfg.token_level_loss else "sequence"

    for name in (*NEMO.split()[:3], "nemo_rl.algorithms.loss.interfaces", "nemo_rl.algorithms.loss.loss_functions"):
        monkeypatch.setitem(sys.modules, name, Anything(name))
    sys.modules["nemo_rl.algorithms.loss.interfaces"].LossType = SimpleNamespace(TOKEN_LEVEL="token")
    sys.modules["nemo_rl.algorithms.loss.loss_functions"].ClippedPGLossFn = ClippedPGLossFn
    defaults, example = json.loads(NEMO_FILE.read_text())["defaults"], load("nemo_rl_fastppo")
    return lambda settings: example.FastPPOLossFn(SimpleNamespace(**(defaults | settings)))


@pytest.mark.parametrize("kind", NEMO_LOSSES)
def test_nemo_rls_recorded_numbers_are_the_examples(kind, recorded_nemo):
    theirs = json.loads(NEMO_FILE.read_text())["losses"][kind]
    nemo_same(kind, nemo_run(recorded_nemo(BASE | NEMO_LOSSES[kind]), nemo_inputs()), theirs)


@pytest.mark.parametrize("kind", NEMO_LOSSES)
def test_nemo_rls_loss_function_is_replaced_by_its_equal(kind, packages):
    packages(NEMO, NEMO_STUBS)
    example = load("nemo_rl_fastppo")
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    cfg = losses.ClippedPGLossConfig(**(BASE | NEMO_LOSSES[kind]))
    normal, right = example.FastPPOLossFn(cfg), losses.ClippedPGLossFn(cfg)
    ours, theirs = (nemo_run(loss_fn, nemo_inputs()) for loss_fn in (normal, right))
    nemo_same(kind, ours, theirs)
    nemo_same(kind, ours, json.loads(NEMO_FILE.read_text())["losses"][kind])
    assert theirs["grad"].abs().max() > 1e-3 and theirs["metrics"].get("is_oob_ratio") != 0
    assert set(ours["metrics"]) <= set(normal.metric_normalizations)


CORRECTED = corrected("tis", 1.2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_on_policy_kl_approximation": True}, "use_on_policy_kl_approximation"),
        ({"positive_example_nll_weight": 0.1}, "positive_example_nll_weight"),
        ({"reference_policy_kl_type": "k1"}, "reference_policy_kl_type"),
        ({"kl_input_clamp_value": 5.0}, "kl_input_clamp_value"),
        ({"use_importance_sampling_correction": True}, "truncated_importance_sampling_type"),
        ({"truncated_importance_sampling_ratio": 1.2}, "truncated_importance_sampling_type"),
        (GSPO | CORRECTED, "sequence_level_importance_ratios"),
        (GSPO | corrected("icepop", 1.2, 0.8), "sequence_level_importance_ratios"),
        (GSPO | CORRECTED | {"force_on_policy_ratio": True}, "sequence_level_importance_ratios"),
    ],
)
def test_nemo_rls_settings_that_are_not_served_are_refused(settings, named, recorded_nemo):
    with pytest.raises(ValueError, match=rf"loss_fn\.{named}"):
        recorded_nemo(settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (CORRECTED | {"use_importance_sampling_correction": False}, "use_importance_sampling_correction"),
        (corrected("sometimes", 1.2), "truncated_importance_sampling_type"),
        (corrected("icepop", 1.2), "truncated_importance_sampling_ratio_min"),
        (GSPO | {"token_level_loss": True}, "token-level"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
    ],
)
def test_what_nemo_rl_refuses_is_refused(settings, named, packages):
    packages(NEMO, NEMO_STUBS)
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    with pytest.raises(ValueError, match=named):
        load("nemo_rl_fastppo").FastPPOLossFn(losses.ClippedPGLossConfig(**settings))


def test_a_filtered_sampler_with_a_kl_is_refused(recorded_nemo):
    """NeMo-RL hands over these log-probs to a loss that has a reference_policy_kl_penalty."""
    inputs, loss_fn = nemo_inputs(), recorded_nemo(BASE)
    assert loss_fn.reference_policy_kl_penalty == BASE["reference_policy_kl_penalty"]
    with pytest.raises(ValueError, match="curr_logprobs_unfiltered.*top-k"):
        nemo_run(loss_fn, inputs | {"curr_logprobs_unfiltered": inputs["logprobs"]})


def shortened(values: torch.Tensor, digits: int) -> list:
    """As JSON, to that many significant digits."""
    return [shortened(row, digits) if row.dim() else float(f"{row.item():.{digits}g}") for row in values]


def record() -> dict:
    """NeMo-RL's own numbers, from its source on the path."""
    torch.manual_seed(0)
    shape = (5, 7)
    old = -1.5 - 3 * torch.rand(shape)
    mask = (torch.rand(shape) < 0.7).float()
    mask[2] = 0  # a response without a token; the last one is left out as a whole
    inputs = {
        "logprobs": old + 0.4 * torch.randn(shape),
        "prev_logprobs": old,
        "generation_logprobs": old + 0.3 * torch.randn(shape),
        "reference_policy_logprobs": old + 0.3 * torch.randn(shape),
        "advantages": 2 * torch.randn(shape),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
    }
    inputs = {name: torch.round(value, decimals=4) for name, value in inputs.items()}
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    runs = {}
    for kind, settings in NEMO_LOSSES.items():
        run = nemo_run(losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**(BASE | settings))), inputs)
        runs[kind] = {
            "loss": run["loss"],
            "grad": shortened(run["grad"], 7),
            "metrics": {name: run["metrics"][name] for name in METRICS},
        }
    return {
        "source": "NeMo-RL 7ea279a: PYTHONPATH=build/nemo_rl python -m tests.test_other_trainers",
        "defaults": losses.ClippedPGLossConfig().model_dump(),
        "inputs": {name: shortened(value, 5) for name, value in inputs.items()},
        "losses": runs,
    }


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        make = packages.__wrapped__(patch)
        next(make)(NEMO, NEMO_STUBS)
        text = json.dumps(record(), indent=1)
    print(re.sub(r"\[[^][{}]+\]", lambda numbers: " ".join(numbers[0].split()), text))  # a row on a line
