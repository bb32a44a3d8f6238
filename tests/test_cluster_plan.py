"""`--dry-run cluster.gpus=N`: sizes of published models, bytes and seconds by hand, what is refused, and in words."""

import pickle
import shlex

import pytest
import transformers

from trainers import megatron_rules
from trainers.arithmetic import ConfigError, check_launched
from trainers.cluster_layout import Group, Layout, candidates
from trainers.cluster_memory import (
    Part,
    gathered_bytes,
    head_bytes,
    kept_bytes,
    layer_bytes_kept,
    local_parameters,
    reference_bytes,
    state_bytes,
)
from trainers.cluster_plan import EnginePlan, Job, Stage, Work, flops, host_bytes, plan_of
from trainers.cluster_traffic import (
    PICKLED_FLOAT,
    PICKLED_ID,
    Machine,
    Traffic,
    all_to_all,
    engine_traffic,
    optimizer_traffic,
    pass_traffic,
    refit_traffic,
    ring,
    rollout_traffic,
)
from trainers.config import ReinforceTrainerConfig
from trainers.dry_run import dry_run
from trainers.model_shapes import ModelShape, named_config, shape_of
from trainers.settings import load_config

MACHINE = Machine()
N8, N70 = 8_030_261_248, 70_553_706_496


def shape(name: str) -> ModelShape:
    return shape_of(named_config(f"shape:{name}"), name)


def part(name: str, layout: Layout, batch: int = 256, micro: int = 2, **more) -> Part:
    return Part(shape(name), layout, batch, micro, **more)


def megatron(dp: int = 1, **sizes) -> Layout:
    sizes = {"tp": 1} | sizes
    return Layout("megatron", dp, **{"etp": sizes["tp"], "sequence_parallel": sizes["tp"] > 1} | sizes)


def words(text: str, config_class: type | None = None) -> list[str]:
    return dry_run(load_config(None, shlex.split(text), *([config_class] if config_class else []))).splitlines()


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        words(text)
    return str(error.value)


class TestSizes:
    @pytest.mark.parametrize(
        ("name", "parameters", "active"),
        [
            ("llama-3.1-8b", N8, N8),
            ("llama-3.1-70b", N70, N70),
            ("llama-3.1-405b", 405_853_388_800, 405_853_388_800),
            ("qwen3-0.6b", 596_049_920, 596_049_920),
            ("llama-3.2-1b", 1_235_814_400, 1_235_814_400),
            ("qwen3-8b", 8_190_735_360, 8_190_735_360),
            ("qwen3-32b", 32_762_123_264, 32_762_123_264),
            ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
            ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520),
            ("qwen3-coder-480b-a35b", 480_154_875_392, 35_474_765_312),
        ],
    )
    def test_published_totals(self, name, parameters, active):
        """Those of the models' safetensors; "A22B" and the like are rounded from `active`."""
        assert (shape(name).parameters, shape(name).active) == (parameters, active)

    def test_sizes_are_those_of_transformers(self):
        import torch

        sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                 "num_hidden_layers": 4, "num_key_value_heads": 2}  # fmt: skip
        for config in (
            transformers.MistralConfig(**sizes, head_dim=8),
            transformers.Qwen2Config(**sizes, tie_word_embeddings=True),
            transformers.Qwen3Config(**sizes, head_dim=12),
            transformers.Qwen3MoeConfig(**sizes, head_dim=12, num_experts=4, moe_intermediate_size=20,
                                        num_experts_per_tok=2, mlp_only_layers=[1]),
        ):  # fmt: skip
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            assert shape_of(config, "x").parameters == sum(p.numel() for p in model.parameters()), config.model_type

    def test_another_model_is_refused(self):
        with pytest.raises(ConfigError, match=r"the plan knows models of type llama, .* but x is of type gpt2"):
            shape_of(transformers.GPT2Config(), "x")
        with pytest.raises(ConfigError, match="the plan knows no attention_bias=true, which x has"):
            shape_of(transformers.LlamaConfig(attention_bias=True), "x")
        with pytest.raises(
            ConfigError, match=r"policy.model_name=shape:llama-3.1-8: .*did you mean shape:llama-3.1-8b"
        ):
            named_config("shape:llama-3.1-8")


class TestMemory:
    def test_adamw_with_bfloat16_weights_and_float32_masters_takes_18_bytes_a_parameter(self):
        whole = part("llama-3.1-8b", Layout(dp=8))
        assert state_bytes(whole, 0) == {"weights": 2 * N8, "gradients": 4 * N8, "optimizer": 12 * N8}
        stored = state_bytes(part("llama-3.1-8b", Layout(dp=8), stored_in_float32=True), 0)
        assert stored == {"weights": 4 * N8, "gradients": 4 * N8, "optimizer": 8 * N8}
        assert reference_bytes(whole, 0) == 2 * N8

    def test_fully_shard_takes_16_over_the_ranks(self):
        cut = part("llama-3.1-8b", Layout(dp=8, fully_shard=True))
        assert sum(state_bytes(cut, 0).values()) == 16 * N8 // 8
        assert (reference_bytes(cut, 0), reference_bytes(cut, 0, scoring=True)) == (2 * N8 // 8, 6 * N8 // 8)
        # Two layers of 218,112,000 and the head of 128,256 x 4,096, or the embeddings, as large, in place of one.
        layer, head = 218_112_000, 525_336_576
        assert gathered_bytes(cut, backward=False) == 2 * (layer + head + head)
        assert gathered_bytes(cut, backward=True) == 2 * (layer + head + head) + 6 * layer + 2 * head
        assert gathered_bytes(part("llama-3.1-8b", Layout(dp=8)), backward=True) == 0

    def test_a_frozen_trunk_and_a_critic(self):
        top = part("llama-3.1-8b", Layout(dp=8), unfrozen=2)
        trained = 2 * 218_112_000
        assert state_bytes(top, 0) == {"weights": 2 * N8, "gradients": 4 * trained, "optimizer": 12 * trained}
        # Its vocabulary's head is kept but not trained; the scalar head is float32.
        critic = state_bytes(part("llama-3.1-8b", Layout(dp=8), critic=True), 0)
        trained = N8 - 128_256 * 4_096
        assert critic == {
            "weights": 2 * N8 + 4 * 4_097, "gradients": 4 * (trained + 4_097), "optimizer": 12 * trained + 8 * 4_097
        }  # fmt: skip

    def test_megatron_core_by_hand(self):
        """70B, TP 8, PP 4: 20 layers, each 16,384 of norms, 150,994,944 of attention and 704,643,072 of an MLP / 8; the
        vocabulary's 16,032 rows padded to 16,064."""
        layers, rows = 20 * (16_384 + 18_874_368 + 88_080_384), 16_064 * 8_192
        policy = part("llama-3.1-70b", megatron(2, tp=8, pp=4))
        assert [local_parameters(policy, stage) for stage in range(4)] == [
            (layers + rows, 0), (layers, 0), (layers, 0), (layers + rows + 8_192, 0)
        ]  # fmt: skip
        n = layers + rows
        assert state_bytes(policy, 0) == {"weights": 2 * n, "gradients": 4 * n, "optimizer": 12 * n // 2}
        apart = part("llama-3.1-70b", megatron(2, tp=8, pp=4, distributed_optimizer=False))
        assert state_bytes(apart, 0)["optimizer"] == 12 * n
        critic = part("llama-3.1-70b", megatron(2, tp=8, pp=4), critic=True)
        assert local_parameters(critic, 3) == (layers + 8_192 + 8_193, 0)

    def test_experts_by_hand(self):
        """235B, TP 4, PP 2, EP 8, ETP 1 on 64 GPUs: 47 layers of 16 experts of 3 x 4,096 x 1,536; 4 copies of each
        expert, 8 of all else."""
        policy = part("qwen3-235b-a22b", megatron(8, tp=4, pp=2, ep=8, etp=1))
        experts = 47 * 16 * 18_874_368
        dense = 47 * (8_448 + (4_096 * 9_216 + 8_192 * 4_096) // 4 + 4_096 * 128) + 38_016 * 4_096
        assert local_parameters(policy, 0) == (dense, experts)
        assert state_bytes(policy, 0)["optimizer"] == 12 * dense // 8 + 12 * experts // 4

    def test_what_a_layer_keeps_of_a_token(self):
        """8B: 8 x 4,096 + 4 x 4,096 + 4 x 1,024 + 10 x 14,336; all / 8 with sequence parallel."""
        llama = shape("llama-3.1-8b")
        assert layer_bytes_kept(llama, Layout(), 4_096) == 32_768 + 16_384 + 4_096 + 143_360
        assert layer_bytes_kept(llama, megatron(tp=8), 4_096) == (32_768 + 16_384 + 4_096 + 143_360) / 8
        whole = megatron(tp=8, sequence_parallel=False)
        assert layer_bytes_kept(llama, whole, 4_096) == 32_768 + (16_384 + 4_096 + 143_360) / 8
        # Scores of 32 heads, and keys and values for each head.
        scores = megatron(flash=False)
        assert layer_bytes_kept(llama, scores, 4_096) == 32_768 + 32_768 + 143_360 + 6 * 32 * 4_096
        again = megatron(flash=False, recompute="selective")
        assert layer_bytes_kept(llama, again, 4_096) == 32_768 + 32_768 + 143_360
        # 235B: norms of query and key; 8 experts of 12 x 1,536 + 2 x 4,096 each.
        moe = 32_768 + 4 * 8_192 + 4 * 512 + 2 * 8_704 + 8 * (12 * 1_536 + 8_192)
        assert layer_bytes_kept(shape("qwen3-235b-a22b"), megatron(), 4_096) == moe

    def test_what_a_stage_keeps(self):
        """Of micro-batches of 2 x 1,000 tokens through 80 layers in 4 stages: the first keeps 4 of them, the last 1."""
        layer = 2_000 * layer_bytes_kept(shape("llama-3.1-70b"), megatron(tp=8), 1_000)

        def kept(stage: int, batch: int = 256, **sizes) -> float:
            return kept_bytes(part("llama-3.1-70b", megatron(2, tp=8, pp=4, **sizes), batch), 1_000, stage)

        assert [kept(stage) for stage in (0, 1, 3)] == [4 * 20 * layer, 3 * 20 * layer, 20 * layer]
        assert kept(0, batch=8) == 2 * 20 * layer  # there are no more
        # Two virtual stages of 10 layers: 2 x 3 + 4 + 1 on the first, 4 + 1 on the last.
        assert [kept(stage, vp=2) for stage in (0, 3)] == [11 * 10 * layer, 5 * 10 * layer]
        inputs = 2 * 8_192 * 2_000 / 8
        assert kept(0, recompute="full") == 4 * 20 * inputs + layer
        half = part("llama-3.1-8b", Layout(dp=8), micro=1, unfrozen=4)
        assert kept_bytes(half, 1_000, 0) == 4 * 1_000 * layer_bytes_kept(shape("llama-3.1-8b"), Layout(), 1_000)

    def test_what_the_head_takes(self):
        """2 x 1,000 tokens, 500 of each scored: hidden states, 1,000 x 16,032 logits and their gradient in bfloat16;
        the head's gradient has a place unless reductions overlap backward."""
        hidden, logits = 8 * 8_192 * 2_000, 4 * 1_000 * 16_032
        split = part("llama-3.1-70b", megatron(tp=8))
        assert head_bytes(split, 2, 1_000, 500) == hidden + logits
        overlapped = part("llama-3.1-70b", megatron(tp=8, overlap_gradients=True))
        assert head_bytes(overlapped, 2, 1_000, 500) == hidden + logits + 4 * 16_032 * 8_192
        assert head_bytes(part("llama-3.1-70b", megatron(tp=8), critic=True), 2, 1_000, 500) == hidden

    def test_an_engine_and_the_policy(self):
        """8B on 8 GPUs: an engine shares weights that are whole and bfloat16, has its own of others, whole or not."""
        work = Work(8, 8, 1_000, 2_000, 8)

        def plan(layout: Layout, **engine):
            return plan_of(Job(work, part("llama-3.1-8b", layout), engine=EnginePlan(**engine)), Machine(memory_gb=400))

        cache = 8 * 2_000 * 131_072  # sequences, tokens, 2 x 32 layers x 8 heads x 128 x 2 bytes
        whole = plan(Layout(dp=8))
        assert (whole.parts["engine's weights"], whole.parts["KV cache"], whole.rows) == (0, cache, 8)
        assert whole.peaks["generation"] == 16 * N8 + cache
        cut = plan(Layout(dp=8, fully_shard=True))
        assert cut.parts["engine's weights"] == 2 * N8 and cut.peaks["generation"] == (12 + 2 * 8 + 2) * N8 // 8 + cache
        vllm = plan(Layout(dp=8), backend="vllm", tp=4, share=0.1)
        assert (vllm.parts["engine's weights"], vllm.parts["KV cache"]) == (N8 // 2, 40_000_000_000 - N8 // 2)
        assert not plan(Layout(dp=8), backend="vllm", share=0.04).fits
        # Given back, it is there in generation and refit alone.
        released = plan(Layout(dp=8, fully_shard=True), released=True)
        assert cut.peaks["scoring"] - released.peaks["scoring"] == 2 * N8 + cache


class TestTraffic:
    def test_rings(self):
        """An all-reduce sends 2 (n - 1) / n; of 16 ranks in two nodes an eighth of it between these."""
        assert ring("x", Group.of(8, 1, 8), 800.0, rounds=2).nvlink == 2 * 7 / 8 * 800
        two = ring("x", Group.of(16, 1, 8), 800.0, rounds=2)
        assert (two.nvlink, two.network) == (7 / 8 * 1_500, 1_500 / 8)
        assert ring("x", Group.of(1, 1, 8), 800.0) == Traffic("x")
        far = all_to_all("x", Group.of(32, 1, 8), 320.0)  # 10 to each rank, 7 others near
        assert (far.nvlink, far.network) == (70.0, 240.0)
        assert Group.of(4, 8, 8) == Group(4, 1) and Group.of(4, 2, 8) == Group(4, 4)

    def test_gradients_of_data_parallel_ranks(self):
        (sent,) = optimizer_traffic(part("llama-3.1-8b", Layout(dp=8)), MACHINE)
        assert sent.nvlink == 2 * 7 / 8 * 4 * N8 and not sent.beside
        assert not list(optimizer_traffic(part("llama-3.1-8b", Layout()), MACHINE))

    def test_fully_shard_moves_8_bytes_a_parameter_for_each_micro_batch(self):
        cut = part("llama-3.1-8b", Layout(dp=8, fully_shard=True))
        weights, gradients = pass_traffic(cut, 1_000, MACHINE, backward=True)
        assert weights.nvlink == gradients.nvlink == 7 / 8 * 4 * N8 and weights.beside
        assert [sent.nvlink for sent in pass_traffic(cut, 1_000, MACHINE, backward=False)] == [7 / 8 * 2 * N8]
        assert not list(optimizer_traffic(cut, MACHINE))
        (gather,) = refit_traffic(cut.shape, cut.layout, MACHINE)
        assert gather.nvlink == 7 / 8 * 2 * N8

    @pytest.mark.parametrize(
        ("changes", "rounds", "forward"),
        [
            ({"sequence_parallel": False}, 80 * 8 + 4, 80 * 4 + 2),  # two all-reduces forward, two backward
            ({}, 80 * 10 + 4, 80 * 4 + 2),  # and inputs gathered once more
            ({"recompute": "full"}, 80 * 14 + 4, 80 * 4 + 2),
        ],
    )
    def test_tensor_parallel(self, changes, rounds, forward):
        policy, x = part("llama-3.1-70b", megatron(tp=8, **changes)), 2 * 8_192 * 1_000
        (sent,) = pass_traffic(policy, 1_000, MACHINE, backward=True)
        assert sent.nvlink == rounds * 7 / 8 * x
        (sent,) = pass_traffic(policy, 1_000, MACHINE, backward=False)
        assert sent.nvlink == forward * 7 / 8 * x

    def test_stages_experts_and_their_optimizer(self):
        """235B, TP 4, PP 2, EP 8, ETP 1 on 64 GPUs of 8: tokens are divided by 4; 47 layers; ranks of experts are 8
        neighbours; copies of an expert 8 apart, of all else 4."""
        policy = part("qwen3-235b-a22b", megatron(8, tp=4, pp=2, ep=8, etp=1))
        x = 2 * 4_096 * 1_000 / 4
        sent = {part.what: part for part in pass_traffic(policy, 1_000, MACHINE, backward=True)}
        assert sent["experts"] == Traffic("experts", nvlink=2 * 2 * 47 * 8 * x * 7 / 8)
        assert sent["pipeline"] == Traffic("pipeline", network=2 * x)
        assert sent["tensor parallel"].nvlink == (47 * 2 * 2.5 + 4) * 3 / 4 * 4 * x
        virtual = part("llama-3.1-70b", megatron(2, tp=8, pp=4, vp=5))
        assert [s.network for s in pass_traffic(virtual, 8, MACHINE, backward=True)][1] == 2 * 5 * 2 * 8_192
        steps = {part.what: part for part in optimizer_traffic(policy, MACHINE)}
        dense, experts = max((local_parameters(policy, stage) for stage in (0, 1)), key=sum)
        assert steps["experts' gradients"].network == 3 / 4 * 4 * experts
        assert steps["experts' new weights"].network == 3 / 4 * 2 * experts
        assert steps["gradients"].nvlink + steps["gradients"].network == pytest.approx(7 / 8 * 4 * dense)
        assert steps["gradients"].network == 7 / 8 * 4 * dense / 2  # two of its 8 in a node
        whole = part("llama-3.1-70b", megatron(2, tp=8, pp=4, distributed_optimizer=False, overlap_gradients=True))
        (sum_,) = optimizer_traffic(whole, MACHINE)
        assert sum_.network == 4 * sum(local_parameters(whole, 3)) and sum_.beside

    def test_refit_engine_and_rollouts(self):
        policy = part("qwen3-235b-a22b", megatron(8, tp=4, pp=2, ep=8, etp=1))
        sent = {part.what: part for part in refit_traffic(policy.shape, policy.layout, MACHINE)}
        experts = 2 * 94 * 128 * 18_874_368
        rest = 2 * 235_093_634_560 - experts
        assert sent["broadcast over stages"].network == rest / 4 + experts / 8
        assert sent["gather over tensor parallel"].nvlink == 3 / 4 * rest
        assert sent["gather over experts"].nvlink == 7 / 8 * experts
        assert not list(refit_traffic(policy.shape, Layout(dp=8), MACHINE))
        (two,) = engine_traffic(shape("llama-3.1-70b"), 8, 1_000, MACHINE)
        assert two.nvlink == 80 * 2 * 2 * 7 / 8 * 2 * 8_192 * 1_000
        assert not list(engine_traffic(policy.shape, 1, 1_000, MACHINE))
        texts, scores = rollout_traffic(16, 100.0, 200.0, 4, MACHINE)
        assert (texts.network, scores.network) == (15 / 16 * (500 + 2_800), 15 / 16 * 4 * 4 * 300)
        assert len(pickle.dumps([70_000] * 1_000)) == pytest.approx(1_000 * PICKLED_ID, rel=0.02)
        assert len(pickle.dumps([-0.5] * 1_000)) == pytest.approx(1_000 * PICKLED_FLOAT, rel=0.02)


class TestPlan:
    def test_flops(self):
        """Of 1,000 tokens through one of 2 layers: 2 a parameter, 4 x context x width of attention; the head of 10."""
        small = ModelShape("x", "llama", 2, 8, 2, 1, 4, 16, 32)
        products = 8 * (2 + 2) * 4 + 8 * 8 + 3 * 8 * 16
        assert small.multiplied == 2 * products
        assert flops(small, 1_000, 50, layers=1, head=10) == 1_000 * (2 * products + 4 * 50 * 8) + 2 * 32 * 8 * 10

    def test_seconds_of_a_stage_and_its_limit(self):
        slow, fast = Traffic("x", nvlink=450e9), Traffic("y", network=50e9 / 4, beside=True)
        stage = Stage("update", products=2.0, bubble=0.5, traffic=(slow, fast))
        assert (stage.sending(MACHINE), stage.seconds(MACHINE), stage.limit(MACHINE)) == (1.0, 3.5, "products")
        late = Stage("update", products=1.0, traffic=(fast.times(20),))  # 5 seconds, 1 of them beside products
        assert (late.sending(MACHINE), late.seconds(MACHINE), late.limit(MACHINE)) == (4.0, 5.0, "y")
        assert Stage("generation", products=1.0, reading=3.0).limit(MACHINE) == "reading"

    def test_stages_by_hand(self):
        """70B on 64 GPUs: 512 sequences of 4,096 tokens, a reference, 2 micro-batches of 2 a step in 4 stages."""
        policy = part("llama-3.1-70b", megatron(2, tp=8, pp=4, vp=2, recompute="full"), batch=8)
        engine = EnginePlan("vllm", 8, rows=32, share=0.4)
        plan = plan_of(Job(Work(64, 8, 1_024, 4_096, 2), policy, engine=engine), MACHINE)
        stages, rate = {stage.name: stage for stage in plan.stages}, 64 * 989e12 * 0.4
        assert [*stages] == ["generation", "rollout gather", "scoring", "policy update", "refit"]
        llama, tokens, scored = policy.shape, 512 * 4_096, 512 * 3_072
        forward = tokens * (2 * llama.multiplied + 4 * 80 * 2_048 * 8_192)
        head = 2 * 128_256 * 8_192 * scored
        assert stages["scoring"].products == pytest.approx(2 * (forward + head) / rate)
        assert stages["policy update"].products == pytest.approx((4 * forward + 3 * head) / rate)
        assert stages["policy update"].bubble == pytest.approx(stages["policy update"].products * 3 / (2 * 2))
        # 8 engines, two times 32 sequences, 3,072 times their share of the weights and of a cache half filled.
        cache = 32 * (1_024 + 1_536) * 2 * 80 * 128 * 2
        assert stages["generation"].reading == pytest.approx(2 * 3_072 * (2 * N70 / 8 + cache) / 3_350e9)
        assert stages["refit"].products == 0 and stages["refit"].seconds(MACHINE) > 0.5

    def test_where_the_critic_is(self):
        work, cut = Work(8, 8, 1_000, 2_000, 8), part("llama-3.1-8b", Layout(dp=8, fully_shard=True))
        critic = part("llama-3.1-8b", Layout(dp=8), critic=True)
        large = Machine(memory_gb=400)
        alone = plan_of(Job(work, cut), large)
        local = plan_of(Job(work, cut, critic, "local"), large)
        remote = plan_of(Job(work, cut, critic_mode="remote"), large)
        assert local.parts["critic"] == sum(state_bytes(critic, 0).values())
        assert [stage.name for stage in local.stages][-2:] == ["critic update", "refit"]
        assert remote.parts == alone.parts and remote.peaks == alone.peaks
        # Ids and mask, and values back; again to train on, with values and returns.
        (asked,) = next(stage for stage in remote.stages if stage.name == "critic service").traffic
        assert asked.network == 64 * 2_000 * (9 + 4 + 9 + 8)

    def test_what_waits_outside(self):
        """While responses are generated. The optimizer of a divided model is back for each checkpoint."""
        work, whole = Work(8, 8, 1_000, 2_000, 8), part("llama-3.1-8b", Layout(dp=8))
        cut = part("llama-3.1-8b", Layout(dp=8, fully_shard=True))
        critic = part("llama-3.1-8b", Layout(dp=8), critic=True)
        held, away = state_bytes(critic, 0), {"offload_optimizer": True, "offload_critic": True}
        for policy, optimizer in ((whole, 12 * N8), (cut, 0)):
            here, there = (
                plan_of(Job(work, policy, critic, "local", **how), Machine(memory_gb=600)).peaks for how in ({}, away)
            )
            assert here["generation"] - there["generation"] == optimizer + held["weights"] + held["optimizer"]
            assert here["policy update"] == there["policy update"]

    def test_what_a_nodes_memory_holds_while_models_load(self):
        """4 bytes a parameter of the larger model on each of a node's 8 ranks; of megatron-core's parts nothing, but
        for its embedded engine 2 a parameter of a whole policy."""
        work, machine = Work(8, 8, 1_000, 2_000, 8), Machine()

        def loading(layout: Layout, **engine) -> int:
            critic = part("llama-3.1-70b", layout, critic=True)
            job = Job(work, part("llama-3.1-8b", layout), critic, "local", engine=EnginePlan(**engine))
            return host_bytes(job, machine)[0]

        assert loading(Layout(dp=16, fully_shard=True)) == 8 * 4 * N70
        assert loading(megatron(2, tp=8)) == 8 * 2 * N8
        assert loading(megatron(tp=4)) == 4 * 2 * N8
        assert loading(megatron(2, tp=8), backend="vllm", tp=8) == 0

    def test_candidates_divide_the_gpus(self):
        found = list(candidates(shape("qwen3-30b-a3b"), 16, 8, Layout(dp=16)))
        assert all(layout.gpus == 16 and layout.tp <= 8 and layout.expert_dp >= 1 for layout in found)
        for sizes in ({layout.pp for layout in found}, {layout.ep for layout in found}):
            assert sizes == {1, 2, 4, 8, 16}
        assert len(set(found)) == len(found)


BASE = "cluster.gpus=8 policy.model_name=shape:llama-3.1-8b policy.num_layers_unfrozen=-1 value.mode=local"
SPREAD = f"{BASE} policy.backend=megatron value.backend=megatron"
TP = "policy.megatron.tensor_model_parallel_size=8 policy.megatron.sequence_parallel=true"


class TestRefusals:
    """A layout that cannot be is refused by name, before anything is planned."""

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ("tensor_model_parallel_size=3", "policy.megatron.tensor_model_parallel_size=3 x policy.megatron."),
            ("pipeline_model_parallel_size=16", "torchrun must start a multiple of that, here are 8"),
            ("expert_model_parallel_size=2", "policy.megatron.expert_model_parallel_size=2 has no effect"),
        ],
    )
    def test_sizes_of_megatron_core(self, settings, message):
        both = f"policy.megatron.{settings} value.megatron.{settings}"
        assert message in refusal(f"{SPREAD} {both}")

    def test_what_does_not_divide_the_model(self):
        sizes = "policy.megatron.tensor_model_parallel_size=12 policy.megatron.pipeline_model_parallel_size=3 "
        sizes += sizes.replace("policy", "value") + "policy.train_global_batch_size=32 value.train_global_batch_size=32"
        told = refusal(f"{SPREAD} {sizes} cluster.gpus=36".replace("cluster.gpus=8 ", ""))
        for key in ("policy", "value"):
            assert (
                f"{key}.megatron.tensor_model_parallel_size=12 does not divide the model's num_attention_heads" in told
            )
            assert (
                f"{key}.megatron.pipeline_model_parallel_size=3 does not divide the model's num_hidden_layers" in told
            )

    def test_a_model_that_megatron_core_would_compute_otherwise(self, tmp_path):
        """Each is refused by its own key, and by megatron-core's rules before the plan's."""
        transformers.LlamaConfig(hidden_act="gelu", attention_bias=True).save_pretrained(tmp_path)
        spread = SPREAD.replace("policy.model_name=shape:llama-3.1-8b ", "")
        critic = refusal(f"{SPREAD} value.model_name={tmp_path}")
        assert critic == "value.backend=megatron: the model's hidden_act must be silu, got gelu"
        both = refusal(f"{spread} policy.model_name={tmp_path}").splitlines()
        assert both == [critic.replace("value", "policy"), critic]

    def test_batches_engines_and_what_is_not_planned(self):
        assert "fewer than the 64 ranks" in refusal(BASE.replace("gpus=8", "gpus=64"))
        engine = "policy.generation.backend=vllm policy.generation.vllm_cfg.tensor_parallel_size="
        assert "needs a multiple of 3 ranks, one a GPU" in refusal(f"{BASE} {engine}3")
        uneven = f"{BASE} {engine}6 cluster.gpus=6"
        assert "tensor_parallel_size=6 does not divide the 32 attention heads of shape:llama" in refusal(uneven)
        assert "policy.peft.enabled=true: cluster.gpus=8 plans" in refusal(f"{BASE} policy.peft.enabled=true")
        assert "policy.dtype=float32: cluster.gpus=8 plans for bfloat16" in refusal(f"{BASE} policy.dtype=float32")
        assert "cluster.gpus=8 are GPUs, got cluster.device=cpu" in refusal(f"{BASE} cluster.device=cpu")
        assert "cluster.gpus_per_node=4 has no effect with cluster.gpus=null" in refusal("cluster.gpus_per_node=4")

    def test_a_run_is_what_was_planned(self, monkeypatch):
        config = load_config("ppo_copy", ["cluster.gpus=2"])
        with pytest.raises(ConfigError, match="cluster.gpus=2, but 1 rank was started"):
            check_launched(config)
        monkeypatch.setenv("WORLD_SIZE", "2")
        check_launched(config)


class TestWords:
    def test_the_plan_of_the_settings_and_others(self):
        told = words(
            f"{BASE} policy.fully_shard=true policy.gradient_checkpointing=true policy.reference=cpu_offload "
            "value.fully_shard=true"
        )
        starts = [line.split()[0] for line in told if not line.startswith(" ")]
        assert starts == [
            "rollout", "policy", "critic", "whole", "cluster", "policy", "critic", "reference", "memory", "step",
            "turn", "traffic", "host", "others",
        ]  # fmt: skip
        assert told[5] == "policy    shape:llama-3.1-8b, 8,030,261,248 parameters: fully_shard over 8 recompute"
        assert told[8].startswith("memory    GB of the fullest GPU: weights 4.02, gradients 4.02, optimizer 8.03, ")
        # Each of 8 ranks loads 4 bytes a parameter; the reference is float32 as the shards are, and swapped with them.
        loading = "host      GB of a node's memory: 257 while models load, each rank a whole one in float32"
        assert f"{loading}; 64.2 of what waits there" in told
        assert told[-1].startswith("          the first: policy.")
        # Without a layout the policy is whole on each GPU, which cannot be.
        whole = words(BASE)
        assert "policy    shape:llama-3.1-8b, 8,030,261,248 parameters: data parallel over 8" in whole
        assert any("does not fit in 72, 90% of 80" in line for line in whole)

    def test_the_first_other_layout_can_be_asked_for(self):
        """The settings that are printed give that plan."""
        text = f"{BASE} policy.generation.backend=vllm policy.generation.release_memory=true"
        other = next(line for line in words(text) if "the first: " in line).partition("the first: ")[2]
        mine = words(f"{text} {other}")
        assert any(line.endswith(": fits in 72, 90% of 80") for line in mine)

    def test_reinforce_has_no_critic(self):
        text = f"{BASE.replace(' value.mode=local', '')} policy.fully_shard=true"
        told = words(text, ReinforceTrainerConfig)
        assert not any(line.startswith("critic") or "critic update" in line for line in told)

    def test_what_megatron_core_loads(self):
        host = next(line for line in words(f"{SPREAD} {TP} {TP.replace('policy', 'value')}") if line.startswith("host"))
        # 8 ranks x 2 bytes a parameter.
        assert host == (
            "host      GB of a node's memory: 128 while models load, each rank a whole one in bfloat16 for its engine"
        )
        vllm = f"{SPREAD} {TP} {TP.replace('policy', 'value')} policy.generation.backend=vllm"
        host = next(line for line in words(vllm) if line.startswith("host"))
        assert host == "host      no whole model in a node's memory, ranks read their own parts"


class TestLaunched:
    """Without cluster.gpus."""

    @pytest.fixture(autouse=True)
    def megatron_runs_here(self, monkeypatch):
        monkeypatch.setattr("trainers.extras.find_spec", lambda module: object())
        monkeypatch.setattr(megatron_rules, "DEVICES", ["cuda", "cpu"])

    ALONE = "policy.model_name=shape:llama-3.1-8b policy.num_layers_unfrozen=-1 cluster.device=cpu"
    REMOTE = "value.mode=remote value.url=http://critic:8900 policy.backend=megatron"

    def test_megatron_core_is_planned_for_the_ranks_that_were_started(self, monkeypatch):
        """The norms of 32 layers and the last are whole; half of 41,943,040 of attention and 176,160,768 of an MLP in
        each, and of 2 x 128,256 rows of the vocabulary; 2 bytes each, where one rank has 16.06 GB."""
        one = words(f"{self.ALONE} {self.REMOTE}")
        assert any(line.startswith("cluster   1 GPU of 80 GB in 1 node") for line in one)
        assert any(line.startswith("memory    GB of the fullest GPU: weights 16.1, gradients 32.1, ") for line in one)
        monkeypatch.setenv("WORLD_SIZE", "2")
        two = words(f"{self.ALONE} {self.REMOTE} policy.megatron.tensor_model_parallel_size=2")
        half = 32 * (2 * 4_096 + (41_943_040 + 176_160_768) // 2) + 128_256 * 4_096 + 4_096
        assert f"{2 * half / 1e9:.2f}, {4 * half / 1e9:.1f}" == "8.03, 16.1"
        assert any(line.startswith("memory    GB of the fullest GPU: weights 8.03, gradients 16.1, ") for line in two)
        assert any(line.startswith("prompts   ") for line in two)  # what a run here reads is told as well

    def test_nodes_and_their_gpus_are_those_of_the_run(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        told = words(f"{self.ALONE} {self.REMOTE} {TP} cluster.device_memory_gb=141")
        assert any(line.startswith("cluster   8 GPUs of 141 GB in 2 nodes") for line in told)

    def test_what_is_not_planned_can_run(self):
        told = words(f"{self.ALONE} {self.REMOTE} policy.dtype=float32")
        assert told[-1] == "memory    not known: policy.dtype=float32: --dry-run plans for bfloat16"
