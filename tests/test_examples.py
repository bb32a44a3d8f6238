"""The examples that need no other trainer: each computes what it says it does."""

import os
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from tests import megatron_cpu
from tests.examples import load

needs_gymnasium = pytest.mark.skipif(
    find_spec("gymnasium") is None, reason='needs gymnasium: pip install "fastppo[examples]"'
)
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'
)

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
# What of the head differs: nothing; a softcap and tied weights; a bias; logits divided; logits multiplied.
MODELS = {
    "Llama": {},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 0.5},
    "Phi": {},
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("name", MODELS)
def test_ten_lines_give_the_loss_and_gradients_of_the_model(name):
    config = getattr(transformers, f"{name}Config")(
        **SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2, **MODELS[name]
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20)  # far from uniform
        if head.bias is not None:
            head.bias.normal_()
    assert (head.bias is not None) == (name == "Phi")
    ids = torch.randint(50, (3, 9))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    theirs, ours, gradient = load("transformers_ten_lines").compare(model, ids, labels)
    assert ours == pytest.approx(theirs, rel=1e-6) and gradient < 1e-5
    assert abs(theirs - torch.tensor(50.0).log()) > 1e-3


@needs_gymnasium
def test_cartpole_has_the_losses_of_hand_written_ops():
    example = load("cartpole_ppo")
    settings = example.Settings(total_steps=4 * 256, epochs=3)
    fused, plain = (example.train(3, ops, settings) for ops in ("fastppo", "torch"))
    assert len(fused.losses) == 4
    assert fused.losses == pytest.approx(plain.losses, rel=1e-4)
    assert fused.mean_return == pytest.approx(plain.mean_return, rel=0.05)


@needs_gymnasium
def test_cartpole_bootstraps_what_was_cut_and_not_what_fell():
    """Advantages of both forms where episodes end in every way, whitened, against the definition step by step."""
    example = load("cartpole_ppo")
    s = example.Settings()
    rewards, values, bootstrap = torch.randn(3, 7, 4)
    terminated, truncated = torch.rand(2, 7, 4) < 0.3
    truncated[-1] = True
    assert (terminated & truncated).any() and (truncated & ~terminated).any()
    inputs = (rewards, values, terminated, truncated, bootstrap)
    fused, plain = (ops.advantages(*inputs, s) for ops in (example.FastppoOps, example.TorchOps))
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    fell = rewards[terminated]  # returns of a step that ended the episode: its reward
    torch.testing.assert_close(fused[1][terminated], fell)
    cut = truncated & ~terminated
    torch.testing.assert_close(fused[1][cut], (rewards + s.gamma * bootstrap)[cut])


@needs_gymnasium
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_solved(seed):
    assert load("cartpole_ppo").train(seed).mean_return >= 475


LAYOUTS = {"tp1": (1, False, False), "tp2": (2, False, False), "tp2_sp": (2, True, False), "tp2_tied": (2, False, True)}


def rank_of_megatron(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.apply()
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    example = load("megatron_logprob")
    results = {name: example.compare(*layout) for name, layout in LAYOUTS.items()}
    dist.destroy_process_group()
    torch.save(results, os.path.join(folder, f"{rank}.pt"))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[float, float, float]]]:
    folder: Path = tmp_path_factory.mktemp("megatron")
    megatron_cpu.spawn(rank_of_megatron, (str(folder),), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@needs_megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_has_its_own_cross_entropys_values_and_gradients(megatron, layout):
    for logprob, gradient, largest in (of_rank[layout] for of_rank in megatron):
        assert logprob < 5e-6 and gradient < 5e-6 * largest and largest > 1
