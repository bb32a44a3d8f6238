"""LoRA: what is trained, what the reference and the engine see, what is saved."""

import copy
import gc
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainers.policy.hf
from tests import tiny
from tests.test_policy import loss, prepared
from tests.test_ppo import lines, small
from trainers.arithmetic import ConfigError, check
from trainers.config import PeftConfig
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.policy.hf import HFPolicy
from trainers.ppo import PPOTrainer
from trainers.refit import refit
from trainers.rollout import pack

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.tensor([[2, 3, 4, 5, 6]])


def adapted_policy(num_layers_unfrozen=-1, dtype=torch.float32, path=None, **peft):
    cfg = copy.deepcopy(tiny.config().policy)
    cfg.num_layers_unfrozen, cfg.peft = num_layers_unfrozen, PeftConfig(enabled=True, **peft)
    return HFPolicy(path or tiny.tiny_model(), cfg, device=torch.device("cpu"), dtype=dtype)


def trained(policy, steps=3):
    batch = prepared(policy)
    for _ in range(steps):
        policy.train_step(batch, loss())
    return policy


def storages(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(("dtype", "rslora"), [(torch.float32, False), (torch.bfloat16, True)])
def test_weights_are_w_plus_scale_b_a_under_the_models_own_names(dtype, rslora):
    policy = trained(adapted_policy(dtype=dtype, dim=4, alpha=6, use_rslora=rslora), steps=1)
    base = AutoModelForCausalLM.from_pretrained(tiny.tiny_model())
    weights, inside = dict(policy.weights()), dict(policy.model.named_parameters())
    assert list(weights) == [name for name, _ in base.named_parameters()]
    assert {name: (spec.shape, spec.dtype) for name, spec in policy.manifest().items()} == {
        name: (tuple(w.shape), dtype) for name, w in weights.items()
    }
    changed = 0
    for name, start in base.named_parameters():
        right = start.detach().to(dtype)
        module = name.removesuffix(".weight")
        if module.endswith(LINEAR):
            a, b = (inside[f"{module}.lora_{side}.default.weight"].detach() for side in "AB")
            assert a.dtype == b.dtype == torch.float32 and a.shape[0] == 4
            delta = (6 / math.sqrt(4) if rslora else 6 / 4) * (b @ a)
            assert delta.abs().max() > 1e-4
            right = (right.float() + delta).to(dtype)
            changed += not torch.equal(right, start.to(dtype))
        assert torch.allclose(weights[name], right, rtol=1e-6 if dtype == torch.float32 else 0, atol=0), name
    assert changed == 2 * len(LINEAR)


def test_the_gradient_of_b_is_that_of_w_times_a(monkeypatch):
    """d loss/d B = scale * d loss/d W @ A^T and d loss/d A = 0 while B is 0, of the whole model's own gradients."""
    seen = {}

    def record(optimizers):
        seen[len(seen)] = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
        return {"actor": {}}

    monkeypatch.setattr(trainers.policy.hf, "step_all", record)
    for policy in (tiny.policy(), adapted_policy(dim=4, alpha=6)):
        policy.train_step(prepared(policy), loss())
    whole, adapters = seen[0], seen[1]
    assert len(adapters) == 2 * 2 * len(LINEAR)
    for name, gradient in adapters.items():
        if "lora_A" in name:
            assert not gradient.any()
            continue
        a = policy.model.get_parameter(name.replace("lora_B", "lora_A"))
        right = 6 / 4 * whole[name.replace(".lora_B.default", "")] @ a.T
        assert right.abs().max() > 1e-5
        assert torch.allclose(gradient, right, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(("num_layers_unfrozen", "dtype"), [(-1, torch.bfloat16), (1, torch.float32)])
def test_the_reference_is_the_base_model_whatever_is_trained(num_layers_unfrozen, dtype):
    policy = adapted_policy(num_layers_unfrozen, dtype)
    base = {name: p.clone() for name, p in policy.adapters.base()}
    batch = prepared(policy)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    first = policy.train_step(batch, loss())
    assert first.sums["ratio_error_max"].item() == 0.0
    trained(policy)
    after = policy.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    assert torch.equal(after["ref_logprobs"], batch.ref_logprobs)
    assert (after["old_logprobs"] - batch.old_logprobs).abs().max() > 1e-3
    for name, parameter in policy.adapters.base():
        assert parameter.dtype == dtype and torch.equal(parameter, base[name]), name


def test_no_weight_exists_twice():
    """The policy's own tensors are the base model's bytes and the adapters': the reference adds none."""

    def alive():
        gc.collect()
        # Those with storage: what torch.compile may have left in other tests (fake and functional tensors) has none.
        plain = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
        return storages(t for t in plain if not torch._is_functional_tensor(t))

    before = alive()
    policy = adapted_policy(dim=4)
    new = {pointer: size for pointer, size in alive().items() if pointer not in before}
    # Of each adapted matrix [out, in]: 4 x (out + in). q, o: 64, 64; k, v: 32, 64; gate, up, down: 128, 64.
    adapters = 2 * 4 * (2 * 128 + 2 * 96 + 3 * 192)
    weights = 4 * (76_096 + adapters)
    assert sum(p.numel() for p in policy.model.parameters() if p.requires_grad) == adapters
    assert weights <= sum(new.values()) < weights + 8_192  # a little for rotary frequencies


def test_adapters_in_the_top_layers_over_a_trunk_that_runs_once(monkeypatch):
    policy = adapted_policy(1)
    assert {name.split(".")[2] for name in policy.adapters.own} == {"1"}
    assert sum(p.requires_grad for p in policy.model.parameters()) == 2 * len(LINEAR)
    batch, runs = tiny.rollout(), []
    run = policy.backbone.trunk_hidden
    monkeypatch.setattr(policy.backbone, "trunk_hidden", lambda ids: runs.append(ids) or run(ids))
    batch = prepared(policy, trunk_hidden=policy.score(batch, {"old_logprobs", "ref_logprobs"})["trunk_hidden"])
    before = len(runs)
    policy.train_step(batch, loss())
    scored = policy.score(batch, {"old_logprobs", "ref_logprobs"})
    assert before == 2 and len(runs) == before  # once in each of the two scorings above
    assert (scored["old_logprobs"] - scored["ref_logprobs"]).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("num_layers_unfrozen", "dtype", "engine_dtype", "tolerance"),
    [
        (-1, torch.float32, torch.float32, 1e-4),
        (1, torch.bfloat16, torch.bfloat16, 0.05),
        (-1, torch.float32, torch.bfloat16, 0.05),
    ],
)
def test_the_engine_generates_with_merged_weights_and_shares_the_rest(
    num_layers_unfrozen, dtype, engine_dtype, tolerance
):
    policy = adapted_policy(num_layers_unfrozen, dtype)
    engine = NativeEngine(policy.engine_model(engine_dtype), policy.tokenizer)
    assert list(engine.parameters) == list(policy.manifest())
    assert all(not hasattr(module, "base_layer") for module in engine.model.modules())
    own = set(storages(engine.parameters.values())) - set(storages(policy.model.parameters()))
    copied = list(policy.adapters.adapted if engine_dtype == dtype else engine.parameters)
    assert own == set(storages(engine.parameters[name] for name in copied))
    prompts, sampling = [[4, 5, 6, 7], [8, 9]], Sampling(6, greedy=True, ignore_eos=True)
    start = pack(prompts, engine.generate(prompts, sampling, [0, 1]))
    for version in (1, 2):
        trained(policy)
        moved = refit(policy, engine, version)
        assert moved == sum(engine.parameters[name].numel() * engine_dtype.itemsize for name in copied)
        said = pack(prompts, engine.generate(prompts, sampling, [0, 1]))
        scored = policy.score(said, {"old_logprobs"})["old_logprobs"]
        assert torch.allclose(said.rollout_logprobs, scored, rtol=0, atol=tolerance)
    assert (said.rollout_logprobs - start.rollout_logprobs).abs().max() > 2 * tolerance


def test_a_run_resumes_bit_for_bit(tmp_path):
    options = {"policy__peft__enabled": True, "policy__num_layers_unfrozen": 1, "policy__dtype": "bfloat16"}
    PPOTrainer(small(tmp_path / "whole", ppo__max_num_steps=3, **options)).fit()
    PPOTrainer(small(tmp_path / "broken", ppo__max_num_steps=2, **options)).fit()
    PPOTrainer(small(tmp_path / "broken", ppo__max_num_steps=3, **options)).fit()
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    assert lines(tmp_path / "whole")[-1]["critic/kl/mean"] != 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exported_folder_is_the_merged_model(tmp_path, dtype):
    policy = trained(adapted_policy(dtype=dtype))
    policy.save(tmp_path)
    assert not any("lora" in str(path) or "adapter" in path.name for path in tmp_path.iterdir())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in policy.adapters.weights(torch.float32):
        assert torch.equal(reloaded.get_parameter(name), weight.float()), name
    if dtype == torch.float32:
        with torch.no_grad():
            assert torch.allclose(reloaded(IDS).logits, policy.model(IDS).logits, atol=1e-5)
            untrained = AutoModelForCausalLM.from_pretrained(tiny.tiny_model())
            assert (reloaded(IDS).logits - untrained(IDS).logits).abs().max() > 1e-2
    AutoTokenizer.from_pretrained(tmp_path)


def test_the_exported_adapter_is_one_that_peft_loads(tmp_path):
    from peft import PeftModel

    policy = trained(adapted_policy(1, export="adapter"))
    policy.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny.tiny_model()), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, policy.model(IDS).logits)
        with loaded.disable_adapter():
            assert (loaded(IDS).logits - policy.model(IDS).logits).abs().max() > 1e-2


def folder_of(model, folder):
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    return folder


def test_tied_embeddings_and_biases(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    policy = trained(adapted_policy(path=folder_of(Qwen2ForCausalLM(config), tmp_path / "base")))
    policy.save(tmp_path / "trained")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.allclose(reloaded(IDS).logits, policy.model(IDS).logits, atol=1e-5)
    engine = NativeEngine(policy.engine_model(torch.float32), policy.tokenizer)
    refit(policy, engine, 1)
    with torch.no_grad():
        assert torch.allclose(engine.model(IDS).logits, policy.model(IDS).logits, atol=1e-5)


def test_a_mixture_of_experts_is_exported_as_it_came(tmp_path):
    """Its experts are fused in memory and single in the folder; adapters are on the linear layers beside them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    policy = trained(adapted_policy(path=folder_of(Qwen3MoeForCausalLM(config), tmp_path / "base")))
    policy.save(tmp_path / "trained")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    with torch.no_grad():
        assert torch.allclose(reloaded(IDS).logits, policy.model(IDS).logits, atol=1e-5)


def test_transposed_linear_layers_are_merged_the_right_way_round(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    policy = trained(adapted_policy(path=folder_of(model, tmp_path), dim=2))
    engine = policy.engine_model(torch.float32)
    refit(policy, NativeEngine(engine, policy.tokenizer), 1)
    with torch.no_grad():
        assert torch.allclose(engine(IDS).logits, policy.model(IDS).logits, atol=1e-5)
        assert (engine(IDS).logits - model.eval()(IDS).logits).abs().max() > 1e-3


def test_target_modules():
    chosen = adapted_policy(target_modules=["q_proj", "mlp.down_proj"]).adapters.adapted
    assert [name.removeprefix("model.layers.").removesuffix(".weight") for name in chosen] == [
        "0.self_attn.q_proj", "0.mlp.down_proj", "1.self_attn.q_proj", "1.mlp.down_proj",
    ]  # fmt: skip
    # The output layer is not the decoder's: the fused loss reads its weight as it is.
    for name in ("lm_head", "proj", "embed_tokens"):
        with pytest.raises(ValueError, match=rf"policy.peft.target_modules: .*down_proj, gate_proj.* got '{name}'"):
            adapted_policy(target_modules=["q_proj", name])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"enabled": False, "dim": 8}, "policy.peft.dim=8 has no effect with policy.peft.enabled=false"),
        ({"enabled": False, "export": "adapter"}, "policy.peft.export=adapter has no effect"),
        ({"dim": 0}, "policy.peft.dim=0: expected a number >= 1"),
        ({"alpha": 0}, "policy.peft.alpha=0: expected a number >= 1"),
        ({"target_modules": "[]"}, r"policy.peft.target_modules=\[\]: expected \[all-linear\], or names"),
        ({"target_modules": "[all-linear, q_proj]"}, r"target_modules=\[all-linear, q_proj\]: expected \[all-linear\]"),
    ],
)
def test_settings_that_cannot_be_used(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(tiny.config(**{f"policy__peft__{key}": value for key, value in ({"enabled": True} | overrides).items()}))


def test_a_reference_on_the_cpu_has_no_effect_with_adapters():
    with pytest.raises(ConfigError, match="policy.reference=cpu_offload has no effect with policy.peft.enabled=true"):
        check(tiny.config(policy__peft__enabled=True, policy__reference="cpu_offload"))


def test_without_peft_the_error_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'peft is not installed: pip install "fastppo\[trainer\]"'):
        adapted_policy()
    tiny.policy()
