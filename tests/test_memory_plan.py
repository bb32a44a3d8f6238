"""The memory that --dry-run foretells, against what the trainer's own tensors take."""

import pytest
import torch
import transformers

from tests import tiny
from trainers.backbone import Padded, name_of
from trainers.config import PeftConfig, PolicyConfig
from trainers.dry_run import dry_run, on_meta, trained_parameters
from trainers.engine_plan import engine_memory, gigabytes, kv_cache_bytes
from trainers.losses import PolicyLoss
from trainers.memory_plan import (
    Activations,
    held_bytes,
    largest_fit,
    reference_bytes,
    size,
)
from trainers.policy.hf import HFPolicy
from trainers.settings import load_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five layers in SmolLM2's proportions, its embeddings tied."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=96, intermediate_size=256, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("small-llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    return folder


def make(folder, unfrozen: int, dtype: torch.dtype, **more: object) -> HFPolicy:
    return HFPolicy(folder, PolicyConfig(num_layers_unfrozen=unfrozen, **more), device=CPU, dtype=dtype)


def bytes_saved(policy: HFPolicy, rows: int, length: int) -> int:
    """What autograd keeps of the trainer's own forward pass; parameters are there anyway."""
    view = Padded(tiny.rollout(((2, length - 2),) * rows), CPU)
    trunk = None if policy.backbone.trunk is None else policy.backbone.trunk_hidden(view.ids)
    weights = {p.data_ptr() for p in policy.model.parameters()}
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage()) and tensor,
        lambda tensor: tensor,
    ):
        hidden = policy.backbone.hidden(view.ids, trunk)
    assert hidden.requires_grad
    return sum(storage.nbytes() for address, storage in saved.items() if address not in weights)


DTYPES = pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float32", "mixed", "bfloat16"],
)


@DTYPES
@pytest.mark.parametrize("unfrozen", [-1, 2])
def test_what_is_saved_for_backward(folder, unfrozen, dtype, stored):
    policy = make(folder, unfrozen, dtype, param_dtype=name_of(stored))
    layers = 5 if unfrozen == -1 else unfrozen
    told = Activations.count(
        policy.model.config, layers=layers, whole=unfrozen == -1, length=64, dtype=dtype, stored=stored, device=CPU
    )
    for rows in (1, 3, 6):
        assert told.bytes(rows) == pytest.approx(bytes_saved(policy, rows, 64), rel=0.05), rows
    # Under autocast autograd keeps a copy of every product's weight, whatever the number of sequences.
    matrices = sum(p.numel() for p in policy.backbone.top.layers.parameters() if p.requires_grad and p.ndim == 2)
    assert told.fixed == pytest.approx(0 if dtype == stored else 2 * matrices, rel=0.05, abs=40_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lora_saves_for_backward(folder, dtype):
    peft = PeftConfig(enabled=True, dim=4)
    policy = make(folder, -1, dtype, peft=peft)
    told = Activations.count(
        policy.model.config, layers=5, whole=True, length=64, dtype=dtype, device=CPU, peft=peft
    )  # fmt: skip
    for rows in (1, 4):
        assert told.bytes(rows) == pytest.approx(bytes_saved(policy, rows, 64), rel=0.1), rows


def test_gradient_checkpointing_keeps_the_layers_inputs_and_one_layer(folder):
    """By hand: 5 inputs of 64 x 96 float32 numbers a sequence, beside what one layer saves."""
    config = transformers.AutoConfig.from_pretrained(folder)
    shape = {"whole": True, "length": 64, "dtype": torch.float32, "device": CPU}
    one = Activations.count(config, layers=1, **shape)
    told = Activations.count(config, layers=5, checkpointing=True, **shape)
    assert told.row == one.row + 5 * 64 * 96 * 4
    assert told.row < Activations.count(config, layers=5, **shape).row / 2
    half = shape | {"dtype": torch.bfloat16, "stored": torch.bfloat16}
    one = Activations.count(config, layers=1, **half)
    assert Activations.count(config, layers=5, checkpointing=True, **half).row == one.row + 5 * 64 * 96 * 2


def test_the_cache_of_keys_and_values(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(3, 20, dtype=torch.int64), use_cache=True).past_key_values
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    # 2 x 5 layers x 2 heads x 16 x 2 bytes x 3 x 20
    assert kv_cache_bytes(model.config, 3, 20, torch.bfloat16) == measured == 38_400


def on_a_gpu(folder, *overrides: str, free: int = 10**9, total: int = 2 * 10**9):
    """16 prompts of up to 100 tokens x 8 responses of up to 60, 24 decoded together, in bfloat16."""
    settings = ["data.max_prompt_length=100", "policy.generation.max_new_tokens=60"]
    settings = [*settings, "policy.generation.max_batch_size=24", *overrides]
    model = transformers.AutoConfig.from_pretrained(folder)
    config = load_config("ppo_copy", settings)
    return engine_memory(config, model, 1_000_000, torch.bfloat16, torch.device("cuda"), free=free, total=total)


def test_a_paged_cache_by_hand(folder):
    # 160 tokens are 3 pages, a prompt 2, its full one shared: 24 x 2 + 16 x 2 = 80, and page 0. A page: 2 x 5 layers
    # x 2 heads x 16 x 2 bytes x 64 = 40,960. State of 25 rows: 3 x 4 of pages, 25, 61 x 20; logits 24 x 64 x 2.
    # Prompts: 1,600 tokens x (8 x 96 + 3 x 256 x 2).
    held, prompts = 81 * 40_960 + 25 * (12 + 25 + 61 * 20) + 24 * 64 * 2, 1_600 * (768 + 1_536)
    told = on_a_gpu(folder)
    assert (told.held, told.generating) == (held, prompts)
    assert told.words == (
        "the embedded engine, KV cache of 5,120 tokens in pages of 64: 3.32 MB, state and logits 0.0345 MB, prompts "
        "3.69 MB; held from the first rollout on"
    )
    given_back = on_a_gpu(folder, "policy.generation.release_memory=true")
    assert (given_back.held, given_back.generating) == (0, held + prompts)
    assert given_back.words.endswith("; given back while the policy trains")
    # One turn of no more requests than places: 4 prompts x 2 x 2 pages + 4 x 2.
    few = on_a_gpu(folder, "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=2",
                   "policy.train_global_batch_size=8")  # fmt: skip
    assert "KV cache of 1,536 tokens" in few.words


def test_a_paged_cache_within_the_memory_there_is(folder):
    # 0.8 x 1,000,000 / 40,960 = 19.5; 0.001 x 2**30 / 40,960 = 26.2; a sequence and its prompt need 4.
    assert "KV cache of 1,216 tokens in pages of 64: 0.819 MB, where 5,120 are wanted" in on_a_gpu(
        folder, free=1_000_000
    ).words  # fmt: skip
    assert "KV cache of 1,664 tokens" in on_a_gpu(folder, "policy.generation.kv_cache_gb=0.001").words
    assert "KV cache of 192 tokens in pages of 64: 0.164 MB, too small for a sequence of 160" in on_a_gpu(
        folder, free=200_000
    ).words  # fmt: skip


def test_the_plan_has_the_pages_that_the_engine_takes(folder):
    """The engine itself, for the requests that the plan assumes."""
    from trainers.engines import Sampling
    from trainers.engines.continuous import ContinuousBatching

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    engine = ContinuousBatching(model, places=24)
    prompts = [[(i + j) % 64 for j in range(100)] for i in range(16) for _ in range(8)]
    engine._reserve(prompts, Sampling(max_new_tokens=60))
    state = [x for x in vars(engine.state).values() if isinstance(x, torch.Tensor) and x.ndim]
    taken = engine.pages.kv.nbytes + sum(x.nbytes for x in state)
    assert on_a_gpu(folder).held == taken + 24 * 64 * 2


def test_other_engines_by_hand(folder):
    # A share of the whole card, 0.25 x 2 GB, with weights of 2 MB in it; 640 bytes a token.
    vllm = on_a_gpu(folder, "policy.generation.backend=vllm", "policy.generation.vllm_cfg.gpu_memory_utilization=0.25")
    assert (vllm.held, vllm.generating) == (500_000_000, 0)
    assert vllm.words.startswith(
        "vLLM, vllm_cfg.gpu_memory_utilization=0.25 of 2 GB: 0.5 GB, weights 2 MB of it, so a KV cache of less than "
        "778,125 tokens; held"
    )
    # In a process of its own two buffers more, each of no more than the weights.
    other = "policy.generation.vllm_cfg.in_process=false"
    assert on_a_gpu(folder, "policy.generation.backend=vllm", other).held == 800_000_000 + 2 * 2_000_000
    # Weights, and a share of what they leave free: 2 MB + 0.5 x 998 MB, and two buffers of 1 MiB.
    settings = ["policy.generation.backend=trtllm", "policy.generation.trtllm_cfg.free_gpu_memory_fraction=0.5",
                "policy.generation.refit_bucket_mb=1", "policy.generation.release_memory=true"]  # fmt: skip
    trtllm = on_a_gpu(folder, *settings)
    assert (trtllm.held, trtllm.generating) == (0, 2_000_000 + 499_000_000 + 2 * 2**20)
    assert "KV cache of 779,687 tokens, trtllm_cfg.free_gpu_memory_fraction=0.5 of what is free" in trtllm.words


@DTYPES
@pytest.mark.parametrize("unfrozen", [-1, 2])
def test_what_is_held_all_along(folder, unfrozen, dtype, stored):
    policy = make(folder, unfrozen, dtype, param_dtype=name_of(stored))
    meta = on_meta(str(folder))
    trained = trained_parameters(meta, unfrozen)
    told = held_bytes(size(trained), size(meta.parameters()) - size(trained), dtype, stored)
    assert told["weights"] == sum(p.nbytes for p in policy.model.parameters())
    own = {p.data_ptr() for p in policy.model.parameters()}
    copies = {p.data_ptr(): p for m in (policy.reference.top, policy.reference.head) for p in m.parameters()}
    copied = sum(p.nbytes for address, p in copies.items() if address not in own)
    assert reference_bytes(meta, trained, dtype, stored) == copied > 0
    masters = policy.masters.pairs.values()
    assert told.get("masters", 0) == sum(master.nbytes for master in masters)
    assert len(masters) == (len(trained) if stored == torch.bfloat16 else 0)

    minibatch = tiny.rollout()
    minibatch.old_logprobs = torch.zeros_like(minibatch.advantages)
    minibatch.num_tokens, minibatch.num_seqs = int(minibatch.mask.sum()), len(minibatch)
    loss = PolicyLoss(load_config("ppo_copy").loss_fn, temperature=1.0, norm_length=4)
    policy.gradients(minibatch, loss)
    stepped = policy.optimizers["actor"].parameters
    assert told["gradients"] == sum(values.grad.nbytes for values in stepped) == 4 * size(trained)
    policy.train_step(minibatch, loss)
    moments = policy.optimizers["actor"].adamw.state.values()
    assert told["Adam"] == sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in moments)


def test_the_largest_micro_batch():
    kept = Activations(fixed=100, row=10)
    beside = lambda rows: 5 * rows  # noqa: E731
    assert kept.bytes(3) == 130
    assert largest_fit(220, kept, beside, most=64) == 8  # 100 + 8 x 15
    assert largest_fit(219, kept, beside, most=64) == 7
    assert largest_fit(220, kept, beside, most=6) == 6
    assert largest_fit(114, kept, beside, most=64) == 0


def test_the_plan_in_words(folder):
    def plan(*overrides: str) -> list[str]:
        settings = [f"policy.model_name={folder}", "cluster.device=cpu", "value.mode=local", *overrides]
        lines = dry_run(load_config("ppo_copy", settings)).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("memory"))
        return [line[10:] for line in lines[start:]]

    # 64 sequences a batch of the policy, 8 of the critic; a sequence is 2 + 4 tokens.
    roomy = plan("cluster.device_memory_gb=1")
    cache = gigabytes(2 * 5 * 2 * 16 * 4 * 128 * 6)
    assert roomy[0].startswith(
        f"generation by the embedded engine, 128 sequences x 6 tokens: KV cache {cache}, sampler "
    )
    assert roomy[1].startswith("scoring of 128 sequences: ")
    assert roomy[2].startswith("policy update of 64 sequences: ") and roomy[3].startswith("value update of 8 sequences")
    assert roomy[4].endswith("which fits in 90% of 1 GB cluster.device_memory_gb")
    assert roomy[5:] == [
        "policy.train_micro_batch_size=64 is the largest that fits, the whole batch of an optimizer step",
        "value.train_micro_batch_size=8 is the largest that fits, the whole batch of an optimizer step",
    ]
    tight = plan("cluster.device_memory_gb=0.03")
    assert "which does not fit in 90% of 30 MB" in tight[4]
    most = int(tight[5].split("=")[1].split()[0])
    assert 0 < most < 64 and tight[5].endswith("is the largest that fits")
    assert "which fits in" in plan("cluster.device_memory_gb=0.03", f"policy.train_micro_batch_size={most}",
                                   "policy.logprob_batch_size=1", "policy.generation.max_batch_size=1")[4]  # fmt: skip
    assert plan("cluster.device_memory_gb=0.001")[5:] == [
        "no policy.train_micro_batch_size fits", "no value.train_micro_batch_size fits"
    ]  # fmt: skip
    # A budget of 30 tokens takes 5 of the longest sequences; the largest is told in tokens.
    budget = plan(
        "cluster.device_memory_gb=1",
        "policy.max_tokens_per_micro_batch=30",
        "policy.train_micro_batch_size=8",
        "policy.logprob_batch_size=8",
    )
    assert budget[1].startswith("scoring of 5 sequences") and budget[2].startswith("policy update of 5 sequences")
    assert budget[5].startswith("policy.max_tokens_per_micro_batch=384 is the largest that fits, the whole batch")
