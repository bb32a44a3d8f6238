"""The examples for verl, OpenRLHF and NeMo-RL against these packages' own source.

Signatures are held against tests/trainer_signatures.json always. Where a package's files are on the path, though not
what it needs (Ray, DeepSpeed, ...), its own loss is loaded from its file, with empty modules for what that file imports
and the loss does not use, and must give the example's values and gradients:

    pip install --no-deps --target build/peers verl==0.9.1 openrlhf==0.11.2
    rm -r build/peers/tests  # OpenRLHF's, which would be taken for these
    git clone https://github.com/NVIDIA-NeMo/RL build/nemo_rl && git -C build/nemo_rl checkout 7ea279a
    PYTHONPATH=build/peers:build/nemo_rl pytest tests/test_other_trainers.py
"""

import ast
import importlib
import json
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
    ("openrlhf_fastppo", "PolicyLoss.forward"): "PolicyLoss.forward",
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
VERL_STUBS = "tensordict verl.utils.device verl.trainer.config verl.workers verl.workers.config"


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


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("token_level", [True, False])
def test_openrlhfs_policy_loss_is_replaced_by_its_equal(kind, token_level, packages):
    packages("openrlhf openrlhf.models", "deepspeed")
    example = load("openrlhf_fastppo")
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
            ours, theirs = (
                cls(**settings)(*arguments, action_mask=x["mask"], **counts)
                for cls in (example.PolicyLoss, example.Theirs)
            )
            same(ours[0], theirs[0], x["logprobs"])
            torch.testing.assert_close(ours[2].float(), theirs[2])
            assert ours[3:] == theirs[3:] == (None, None)
            if kind == "ppo":  # GSPO's masked positions have ratio 0 there, and count as clipped
                torch.testing.assert_close(ours[1].float(), theirs[1])


def test_openrlhfs_corrections_are_left_to_it(packages):
    packages("openrlhf openrlhf.models", "deepspeed")
    example = load("openrlhf_fastppo")
    x = rows()
    x["mask"][2, 0] = 1
    arguments = (x["logprobs"], x["old"], x["advantages"], x["mask"], x["rollout"])
    ours, theirs = (cls(is_correction_level="token")(*arguments) for cls in (example.PolicyLoss, example.Theirs))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and theirs[3] is not None


NEMO = "nemo_rl nemo_rl.algorithms nemo_rl.algorithms.loss nemo_rl.distributed nemo_rl.models nemo_rl.models.dtensor"
NEMO_STUBS = (
    "nemo_rl.distributed.batched_data_dict nemo_rl.distributed.model_utils nemo_rl.models.dtensor.parallelize "
    "nemo_rl.algorithms.x_token nemo_rl.algorithms.x_token.loss_utils nemo_rl.data nemo_rl.data.chat_templates "
    "nemo_rl.models.policy nemo_rl.utils nemo_rl.utils.fastokens nemo_rl.utils.logger"
)
NEMO_LOSSES = {
    "ppo": {"ratio_clip_max": 0.28, "ratio_clip_c": 1.3},
    "per_sequence": {"token_level_loss": False},
    "reinforce": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "on_policy": {"force_on_policy_ratio": True},
    "tis": {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.2},
    "icepop": {
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.2,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
}


def nemo_data(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = lambda name: torch.cat([torch.zeros(4, 1), x[name]], 1)  # noqa: E731
    return {
        "token_mask": first("mask"),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": first("advantages"),
        "prev_logprobs": first("old"),
        "generation_logprobs": first("rollout"),
        "reference_policy_logprobs": first("ref"),
    }


@pytest.mark.parametrize("kind", NEMO_LOSSES)
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_nemo_rls_loss_function_is_replaced_by_its_equal(kind, kl, packages):
    packages(NEMO, NEMO_STUBS)
    example = load("nemo_rl_fastppo")
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    settings = NEMO_LOSSES[kind] | {"reference_policy_kl_penalty": kl}
    settings["use_importance_sampling_correction"] = kind in ("tis", "icepop")
    cfg = losses.ClippedPGLossConfig(**settings)
    x = rows()
    arguments = {"data": nemo_data(x), "global_valid_seqs": torch.tensor(6.0), "global_valid_toks": torch.tensor(50.0)}
    ours, theirs = (
        cls(cfg)(next_token_logprobs=x["logprobs"], **arguments)
        for cls in (example.FastPPOLossFn, losses.ClippedPGLossFn)
    )
    same(ours[0], theirs[0], x["logprobs"])
    names = {"loss", "token_mult_prob_error", "num_valid_samples"} | ({"probs_ratio"} if kind == "ppo" else set())
    for name in names:
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-5), name
    normal, right = example.FastPPOLossFn(cfg), losses.ClippedPGLossFn(cfg)
    assert set(ours[1]) == set(normal.metric_normalizations) <= set(right.metric_normalizations)
    assert (normal.loss_type, normal.input_type) == (right.loss_type, right.input_type)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_on_policy_kl_approximation": True}, "use_on_policy_kl_approximation"),
        ({"positive_example_nll_weight": 0.1}, "positive_example_nll_weight"),
        ({"reference_policy_kl_type": "k1"}, "reference_policy_kl_type"),
        ({"use_importance_sampling_correction": True}, "truncated_importance_sampling_type"),
    ],
)
def test_nemo_rls_settings_that_are_not_served_are_refused(settings, named, packages):
    packages(NEMO, NEMO_STUBS)
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    with pytest.raises(ValueError, match=named):
        load("nemo_rl_fastppo").FastPPOLossFn(losses.ClippedPGLossConfig(**settings))
