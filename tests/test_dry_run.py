"""The dry run: the plan, the model's size from its config alone, what is refused. It downloads and trains nothing."""

import pytest
import torch

from trainers import models
from trainers.arithmetic import ConfigError
from trainers.cli import answer, load_config, parse
from trainers.dry_run import dry_run, on_meta, trained_parameters


@pytest.fixture(autouse=True)
def offline_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTPPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*_, **__):
        raise AssertionError("a dry run starts no download")

    monkeypatch.setattr(models.subprocess, "run", run)
    return tmp_path / "cache"


def lines_of(*overrides: str, source: str | None = "ppo_copy") -> list[str]:
    return dry_run(load_config(source, overrides)).splitlines()


def test_a_model_that_is_not_there_is_not_fetched(offline_cache):
    lines = lines_of("policy.dtype=float32", source=None)
    assert lines[4] == "prompts   16, so an epoch is 2 steps"
    assert lines[5].endswith(", float32; sampling in float32")
    assert lines[6] == (
        "policy    smollm2-135m is not on this machine yet: its size is known after the first run has fetched it"
    )
    assert not offline_cache.exists()


def test_the_size_of_the_model(offline_cache):
    models.resolve_model("tiny-llama")
    before = sorted(path.name for path in offline_cache.iterdir())
    lines = lines_of("cluster.device=cpu")
    # Embedding and head 2 x 16 x 64; a layer: q and o 2 x 64 x 64, k and v 2 x 32 x 64, mlp 3 x 128 x 64, norms 2 x 64;
    # the last norm 64: 2,048 + 2 x 36,992 + 64.
    assert lines[6] == (
        "model     tiny-llama: LlamaForCausalLM, 76,096 parameters, 76,096 trained, and 65 of the critic's head"
    )
    # 76,161 x 4, x 4, x 8 bytes; the reference 76,096 x 4; the engine shares float32 weights.
    assert lines[7] == (
        "          weights 0.305 MB, gradients 0.305 MB, Adam 0.609 MB, reference 0.304 MB, sampling 0 MB: 1.52 MB"
    )
    assert sorted(path.name for path in offline_cache.iterdir()) == before


def test_a_frozen_trunk_and_a_critic_of_its_own():
    models.resolve_model("tiny-llama")
    lines = lines_of(
        "cluster.device=cpu",
        "policy.dtype=bfloat16",
        "policy.num_layers_unfrozen=1",
        "value.mode=local",
        "value.num_layers_unfrozen=1",
    )
    assert lines[6] == "model     tiny-llama: LlamaForCausalLM, 76,096 parameters, 36,992 trained"
    # 36,992 x 4 + 39,104 x 2; the reference keeps its two norms of 64 in float32; the engine shares the bfloat16 trunk
    # and copies the trained layer.
    assert lines[7].split(":")[0] == (
        "          weights 0.226 MB, gradients 0.148 MB, Adam 0.296 MB, reference 0.0742 MB, sampling 0.074 MB"
    )
    assert lines[8] == "critic    tiny-llama: LlamaForCausalLM, 76,161 parameters, 37,057 trained"


def test_bfloat16_parameters_and_their_masters():
    models.resolve_model("tiny-llama")
    half = ["policy.dtype=bfloat16", "policy.param_dtype=bfloat16", "value.mode=local", "value.param_dtype=bfloat16"]
    lines = lines_of("cluster.device=cpu", *half)
    # 76,096 x 2, x 4, x 4, x 8 bytes; the reference 76,096 x 2; the engine shares everything.
    assert lines[7].strip().split(": ")[0] == (
        "weights 0.152 MB, masters 0.304 MB, gradients 0.304 MB, Adam 0.609 MB, reference 0.152 MB, sampling 0 MB"
    )
    # Its language-model head of 16 x 64 is not trained; its scalar head, 65 numbers, is float32:
    # 76,096 x 2 + 65 x 4, 75,072 x 4, 75,137 x 4, 75,137 x 8.
    assert lines[9].strip().split(": ")[0] == "weights 0.152 MB, masters 0.3 MB, gradients 0.301 MB, Adam 0.601 MB"


@pytest.mark.parametrize("unfrozen", [-1, 1, 2])
def test_it_counts_what_the_policy_trains(unfrozen):
    from transformers import AutoModelForCausalLM

    from trainers.backbone import SplitTransformer

    model = AutoModelForCausalLM.from_pretrained(models.resolve_model("tiny-llama"), dtype=torch.float32)
    SplitTransformer(model, unfrozen, torch.float32)
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    meta = on_meta("tiny-llama")
    assert all(p.device.type == "meta" for p in meta.parameters())
    assert sum(p.numel() for p in trained_parameters(meta, unfrozen)) == trains


def test_a_whole_critic_trains_all_but_the_language_model_head():
    models.resolve_model("tiny-llama")
    lines = lines_of("cluster.device=cpu", "value.mode=local")
    # 76,096 less the untied head of 16 x 64, plus 65 of the scalar head.
    assert lines[8] == "critic    tiny-llama: LlamaForCausalLM, 76,161 parameters, 75,137 trained"


def test_sequences_beyond_the_context_are_pointed_out():
    models.resolve_model("tiny-llama")
    lines = lines_of("cluster.device=cpu", "data.max_prompt_length=300")
    assert lines[8] == "          its context is 256 tokens: sequences of up to 304 would not fit"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.name=python:no_such_module.reward"], "cannot import no_such_module"),
        (["env.name=python:math.sqrd"], r"math has no sqrd; did you mean sqrt\?"),
        (["env.name=python:math.sqrt"], "the environment has no prompts of its own"),
        (
            ["env.name=sentiment", "env.size=512", "ppo.num_prompts_per_step=32"],
            r"only 16 prompts: .*_step=16 and",
        ),
        (["policy.model_name=/no/such/folder"], "neither an existing folder nor a hub id"),
        (["ppo.num_prompts_per_step=3"], "which policy.train_global_batch_size=64 does not divide"),
    ],
)
def test_what_it_refuses(overrides, message):
    if any(text.startswith("env.name") for text in overrides):
        overrides = ["env.size=512", *overrides]
    with pytest.raises((ConfigError, ImportError), match=message):
        lines_of(*overrides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that the test wants to be absent")
def test_a_device_that_is_not_there():
    with pytest.raises(ConfigError, match="cluster.device=cuda but torch sees no CUDA device"):
        lines_of("cluster.device=cuda")


def test_from_the_command_line(capsys):
    assert answer(parse(["config=ppo_copy", "--dry-run"], prog="prog", description=""), prog="prog") is True
    assert capsys.readouterr().out.startswith("rollout   16 prompts x 8 responses = 128 sequences a step")
    arguments = parse(["config=ppo_copy", "--dry-run", "policy.model_name=/no/such"], prog="prog", description="")
    with pytest.raises(SystemExit) as stop:
        answer(arguments, prog="prog")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("prog: error: policy.model_name='/no/such'")
    assert answer(parse(["config=ppo_copy"], prog="prog", description=""), prog="prog") is False
    assert capsys.readouterr().out == ""


def test_adapters_over_a_frozen_base():
    models.resolve_model("tiny-llama")
    lines = lines_of("cluster.device=cpu", "policy.dtype=bfloat16", "policy.peft.enabled=true", "policy.peft.dim=4",
                     "policy.num_layers_unfrozen=1")  # fmt: skip
    # 4 x (in + out) of each matrix: q, o 4 x 128 each; k, v 4 x 96 each; gate, up, down 4 x 192 each.
    assert lines[6] == (
        "model     tiny-llama: LlamaForCausalLM, 80,192 parameters, 4,096 trained, and 65 of the critic's head"
    )
    # 76,096 x 2 + 4,161 x 4; the reference is the base; the engine copies the adapted layer's matrices, 36,864 x 2.
    assert lines[7].split(":")[0] == (
        "          weights 0.169 MB, gradients 0.0166 MB, Adam 0.0333 MB, reference 0 MB, sampling 0.0737 MB"
    )
    with pytest.raises(ConfigError, match="policy.peft.target_modules: expected linear layers .* got 'c_attn'"):
        lines_of("cluster.device=cpu", "policy.peft.enabled=true", "policy.peft.target_modules=[c_attn]")


def test_a_reference_on_the_cpu_takes_none_of_the_gpus_memory(monkeypatch):
    models.resolve_model("tiny-llama")
    monkeypatch.setattr("trainers.dry_run.pick_device", lambda name: torch.device("cuda"))
    assert "reference 0 MB, sampling" in lines_of("policy.reference=cpu_offload")[7]


def test_the_engines_memory_on_a_gpu(monkeypatch):
    models.resolve_model("tiny-llama")
    monkeypatch.setattr("trainers.dry_run.pick_device", lambda name: torch.device("cuda"))

    no_gpu_here = classmethod(lambda cls, *_, **__: cls(fixed=0, row=1000))
    monkeypatch.setattr("trainers.memory_plan.Activations.count", no_gpu_here)

    def plan(*overrides: str) -> list[str]:
        lines = lines_of("cluster.device_memory_gb=1", "value.mode=local", *overrides)
        return lines[next(i for i, line in enumerate(lines) if line.startswith("memory")) :]

    # 128 sequences of 2 + 4 tokens in a page each, and 16 prompts of one: 144 pages. A page takes 2 x 2 layers x 32 x
    # 64 x 4 bytes, with page 0 4.75 MB; state 129 x (4 + 25 + 5 x 20) + 128 x 16 x 4. Beside it weights, gradients,
    # Adam and the reference, 76,096 x 20 + 76,161 x 4 + 75,137 x 12 = 2.73 MB, and scoring, 768 x 2,048 + 2 x 512 x 16
    # x 4.
    held = plan()
    cache = "memory    generation by the embedded engine, KV cache of 9,216 tokens in pages of 64: 4.75 MB, "
    assert held[0] == f"{cache}state and logits 0.0248 MB, prompts 0.0655 MB; held from the first rollout on"
    assert held[4].startswith("          in all 9.14 MB, ")
    released = plan("policy.generation.release_memory=true")
    assert released[0].startswith(cache) and released[0].endswith("; given back while the policy trains")
    assert released[4].startswith("          in all 7.57 MB, ")
    # 0.4 x 1 GB, of which 76,096 x 4 are weights; 512 bytes a token.
    vllm = plan("policy.generation.backend=vllm")
    assert vllm[0].startswith(
        "memory    generation by vLLM, vllm_cfg.gpu_memory_utilization=0.4 of 1 GB: 0.4 GB, weights"
    )
    assert "a KV cache of less than 780,655 tokens" in vllm[0] and vllm[4].startswith("          in all 0.404 GB, ")
    assert all("sampling" not in line for line in lines_of("policy.generation.backend=vllm") if "weights" in line[:20])


def test_a_rank_of_two_has_half_of_a_sharded_model(monkeypatch, capsys):
    models.resolve_model("tiny-llama")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = ["cluster.device=cpu", "policy.dtype=bfloat16", "policy.fully_shard=true"]
    settings += ["value.mode=local", "value.fully_shard=true"]
    arguments = parse(["--dry-run", "config=ppo_copy", *settings], prog="ppo", description="")
    monkeypatch.setenv("RANK", "1")
    assert answer(arguments, prog="ppo") and capsys.readouterr().out == ""  # the other ranks say nothing
    monkeypatch.setenv("RANK", "0")
    assert answer(arguments, prog="ppo")
    told = capsys.readouterr().out.splitlines()
    # And the whole engine, 76,096 x 2; the critic's head, 65 x 16 bytes, is whole on each rank, and half of its
    # vocabulary's, 16 x 64 x 2 bytes, frozen.
    held_by_policy = "weights 0.152 MB, gradients 0.152 MB, Adam 0.304 MB, reference 0.0761 MB, sampling 0.152 MB"
    assert told[7] == f"          {held_by_policy}: 0.837 MB, cut over 2 ranks"
    critic = 76_096 - 1_024
    weights, head = (2 * critic + 65 * 4 + 1_024) / 1e6, 65 / 1e6
    assert told[9].startswith(
        f"          weights {weights:.3g} MB, gradients {2 * critic / 1e6 + 4 * head:.3g} MB, "
        f"Adam {4 * critic / 1e6 + 8 * head:.3g} MB: "
    )
    # Whole at a time, in bfloat16: the head, a layer of 36,992 and the next; in backward the head's gradient, and the
    # layer's, in float32 too.
    gathered = 2 * (1_024 + 2 * 36_992) + 6 * 36_992 + 2 * 1_024
    assert f"{gathered / 1e6:.3g} MB of it gathered weights and gradients" in told[12]
