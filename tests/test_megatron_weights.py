"""A megatron-core model that was given Hugging Face's weights computes what transformers does, at any layout; and back.

Four ranks over gloo, on a CPU. Each case is loaded, exported, and run through megatron-core's own schedule, which also
reduces the gradients: logits and gradients must be those of transformers, the exported weights the very bits.
"""

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import megatron_cpu
from tests.megatron_models import MODELS, build_hf, config_of, file_names
from trainers.config_megatron import MegatronConfig
from trainers.engines import TensorSpec
from trainers.megatron_layout import gate_up_rows, qkv_rows
from trainers.policy.megatron_model import build_model, check, padded_vocab, rope_frequencies, takes_transformer_engine

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'
)
CPU = torch.device("cpu")
WORLD = 4
B, S = 4, 8  # sequences, and tokens of each, which sequence parallelism divides

TP2, SP, PP2 = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# What these leave of the four ranks is data-parallel.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": TP2,
    "tp2_recompute": TP2 | RECOMPUTE,
    "tp4_sp": {"tensor_model_parallel_size": 4} | SP,
    "pp2": PP2,
    "tp2_sp_pp2": TP2 | SP | PP2,
    "pp2_interleaved": PP2 | {"virtual_pipeline_model_parallel_size": 2},
    "pp2_uneven": PP2 | {"num_layers_in_first_pipeline_stage": 1},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2_sp_pp2_ep2": TP2 | SP | PP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
EVERY = ("tp1", "tp2", "tp4_sp", "pp2", "tp2_sp_pp2")
CASES = [
    *((model, layout) for model in ("llama", "qwen2", "qwen3", "qwen3_tied") for layout in EVERY),
    *(("llama", layout) for layout in ("tp2_recompute", "pp2_interleaved", "pp2_uneven")),
    *(("qwen3_moe", layout) for layout in ("tp1", "tp4_sp", "ep2", "tp2_sp_pp2_ep2")),
    ("qwen3_moe_unnormalised", "tp1"),
]


def problem(name: str) -> dict[str, Any]:
    """Weights of a model, an input, an upstream gradient of the logits; and what transformers makes of them."""
    model = build_hf(name)
    generator = torch.Generator().manual_seed(1)
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (B, S), generator=generator)
    upstream = torch.randn(B, S, vocab, generator=generator)
    logits = model(input_ids=ids, use_cache=False).logits
    logits.backward(upstream)
    return {
        "config": model.config,
        "weights": file_names((name, p.detach()) for name, p in model.named_parameters()),
        "grads": file_names((name, p.grad) for name, p in model.named_parameters()),
        "ids": ids,
        "upstream": upstream,
        "logits": logits.detach(),
    }


class File(Mapping):
    """Tensors that are read as they are asked for; `read`: which were."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.read = tensors, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.tensors[name]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.apply()
    from megatron.core import parallel_state

    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    problems = torch.load(os.path.join(folder, "problems.pt"), weights_only=False)
    results: dict[Any, Any] = {}
    for layout, options in LAYOUTS.items():
        groups = {key: value for key, value in options.items() if key.endswith("_parallel_size")}
        parallel_state.initialize_model_parallel(**groups, create_gloo_process_groups=False)
        for model in MODELS:
            if (model, layout) in CASES:
                results[model, layout] = evaluate(problems[model], options)
        if layout == "tp2_sp_pp2":
            results["apart"] = apart(problems, options)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if rank == 0:
        results["run"] = run_as_module(Path(folder))
    torch.save(results, os.path.join(folder, f"{rank}.pt"))


def evaluate(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from trainers.megatron_weights import hf_tensors, load_hf, manifest

    summed = {"calculate_per_token_loss": True, "finalize_model_grads_func": finalize_model_grads}
    chunks = build_model(case["config"], dtype=torch.float32, device=CPU, **summed, **options)
    load_hf(chunks, case["weights"])
    exported = list(hf_tensors(chunks))
    wrapped = [DistributedDataParallel(c.config, DistributedDataParallelConfig(), c) for c in chunks]
    error, compared = run(wrapped, case)
    gradients = dict(hf_tensors(wrapped, of=lambda parameter: parameter.main_grad))
    return {
        "logits_error": error,
        "logits_compared": compared,
        "manifest": list(manifest(chunks).items()),
        "specs": [(name, TensorSpec(tuple(t.shape), t.dtype)) for name, t in exported],
        "changed": changed(case["weights"], dict(exported)),
        "gradient_errors": {
            name: ((gradients[name] - right).norm() / right.norm()).item() for name, right in case["grads"].items()
        },
        "norm": gradient_norm(wrapped),
        "right_norm": torch.stack([g.norm() for g in case["grads"].values()]).norm().item(),
    }


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before.keys() | after.keys() if not before[name].equal(after[name])]


def run(chunks: list[Any], case: dict[str, Any]) -> tuple[float, int]:
    """Forward and backward over this data-parallel rank's sequences, one at a time. Returns the greatest error of the
    logits that this rank has, and how many they are."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    vocab, rows = case["config"].vocab_size, range(replica, B, replicas)
    error, compared = 0.0, 0

    def forward(data, model):
        row = next(data)

        def loss(logits):  # [1, S, this rank's share of the padded vocabulary]
            nonlocal error, compared
            width = logits.shape[-1]
            mine = slice(rank * width, max(rank * width, min(rank * width + width, vocab)))
            ours, right = logits[0, :, : mine.stop - mine.start], case["logits"][row, :, mine]
            if right.numel():
                error, compared = max(error, (ours - right).abs().max().item()), compared + right.numel()
            return (ours * case["upstream"][row, :, mine]).sum() * len(rows), {}  # the schedule divides by it

        return model(case["ids"][row : row + 1], torch.arange(S)[None], None), loss

    for chunk in chunks:
        chunk.zero_grad_buffer()
    data = [iter(rows) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks,
        num_microbatches=len(rows),
        seq_length=S,
        micro_batch_size=1,
    )
    return error, compared


def gradient_norm(chunks: list[Any]) -> float:
    """As megatron-core's optimizer counts: what a parameter says of itself decides which rank counts it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    counted = [p for c in chunks for p in c.parameters() if param_is_not_shared(p)]
    counted = [p.main_grad for p in counted if param_is_not_tensor_parallel_duplicate(p)]
    total = sum((g.square().sum() for g in counted), torch.zeros(()))
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return total.sqrt().item()


def apart(problems: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What needs no schedule: other dtypes and orders, what is read, what is refused."""
    from trainers.megatron_weights import Table, hf_tensors, load_hf, manifest
    from trainers.policy.megatron_model import layer_specs

    out: dict[str, Any] = {"refused": {}}
    case, tied = problems["llama"], problems["qwen2"]
    weights = case["weights"]

    halves = build_model(case["config"], dtype=torch.bfloat16, device=CPU, **options)
    file = File(weights)
    load_hf(halves, file)
    out["read"] = file.read
    exported = dict(hf_tensors(halves))
    out["halves_changed"] = changed({name: t.bfloat16() for name, t in weights.items()}, exported)
    out["halves_manifest"] = {spec.dtype for spec in manifest(halves).values()}
    out["fused_names"] = layer_specs(halves[0].config, None).layer_specs[0].submodules.sharded_state_dict_keys_map
    out["entries"] = [entry.names for entry in Table(halves).entries if len(entry.names) > 1][:2]

    model = build_model(tied["config"], dtype=torch.float32, device=CPU, **options)
    for parameter in model[0].parameters():
        parameter.data.fill_(float("nan"))
    ignored = {"lm_head.weight": torch.zeros(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}
    load_hf(model, reversed(list((tied["weights"] | ignored).items())))
    out["reversed_changed"] = changed(tied["weights"], dict(hf_tensors(model)))
    out["padding"] = [p[max(0, 37 - 64 * model[0].tp_group.rank()) :] for _, p in vocabulary(model[0])]

    name, tensor = "model.layers.3.mlp.up_proj.weight", weights["model.layers.3.mlp.up_proj.weight"]
    without = {key: value for key, value in weights.items() if key != name}
    mistakes = {
        "missing": without,
        "twice": [(name, tensor), (name, tensor)],
        "shape": [*without.items(), (name, tensor.T)],
        "unknown": weights | {"model.layers.3.mlp.up_proj.bias": tensor},
    }
    for key, state in mistakes.items():
        with pytest.raises(ValueError) as caught:
            load_hf(halves, state)
        out["refused"][key] = str(caught.value)
    halves[0].register_parameter("score", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError) as caught:
        manifest(halves)
    out["refused"]["unmapped"] = str(caught.value)
    return out


def vocabulary(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if "word_embeddings" in name or "output_layer" in name]


def run_as_module(folder: Path) -> list[Any]:
    """What a module sees that tests/megatron_cpu.py runs."""
    (folder / "probe.py").write_text(
        "import sys, torch\nseen = [__name__, sys.argv[1:], torch.ones(1, device='cuda')]\n"
    )
    sys.path.insert(1, str(folder))
    sys.argv = ["tests/megatron_cpu.py", "probe", "policy.backend=megatron", "--dry-run"]
    return [*megatron_cpu.main()["seen"], sys.path[0]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """By rank."""
    folder = tmp_path_factory.mktemp("megatron")
    torch.save({name: problem(name) for name in MODELS}, folder / "problems.pt")
    megatron_cpu.spawn(worker, (str(folder),), WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@needs_megatron
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_loaded_model_computes_what_transformers_does(results, case):
    cases = [rank[case] for rank in results]
    for got in cases:
        assert got["logits_error"] <= 1e-5
        assert max(got["gradient_errors"].values()) <= 1e-5
        assert got["changed"] == []
        assert got["manifest"] == got["specs"]
    vocab = config_of(case[0]).vocab_size
    assert sum(got["logits_compared"] for got in cases) == B * S * vocab  # each once


@needs_megatron
@pytest.mark.parametrize("case", [case for case in CASES if "ep2" not in case[1]], ids="-".join)
def test_each_gradient_counts_once_in_their_norm(results, case):
    for rank in results:
        assert rank[case]["norm"] == pytest.approx(rank[case]["right_norm"], rel=1e-5)


@needs_megatron
def test_loading_takes_any_order_and_dtype_and_reads_what_a_stage_holds(results):
    for rank, apart in enumerate(r["apart"] for r in results):
        assert apart["halves_changed"] == apart["reversed_changed"] == []
        assert apart["halves_manifest"] == {torch.bfloat16}
        assert all(padding.count_nonzero() == 0 for padding in apart["padding"])
        layers = {int(name.split(".")[2]) for name in apart["read"] if ".layers." in name}
        ends = [name for name in apart["read"] if ".layers." not in name]
        if rank < 2:
            assert layers == {0, 1} and ends == ["model.embed_tokens.weight"]
        else:
            assert layers == {2, 3} and ends == ["model.norm.weight", "lm_head.weight"]
        assert len(apart["read"]) == len(set(apart["read"])) == 2 * 9 + len(ends)


@needs_megatron
def test_names_of_fused_layers_are_those_that_megatron_core_maps_its_own_to(results):
    apart, layer = results[0]["apart"], "decoder.layers.0."
    assert len(apart["fused_names"]) == 2
    assert apart["entries"] == [
        (f"{layer}{own}weight", f"{layer}{fused}weight") for own, fused in apart["fused_names"].items()
    ]


@needs_megatron
def test_refusals_name_the_tensor_on_every_rank(results):
    for rank in results:
        refused = rank["apart"]["refused"]
        assert refused["missing"] == "1 of the model's 39 tensors are missing: model.layers.3.mlp.up_proj.weight"
        assert refused["twice"] == "model.layers.3.mlp.up_proj.weight was given twice"
        assert refused["shape"] == "model.layers.3.mlp.up_proj.weight must be (48, 32), got (32, 48)"
        assert refused["unknown"] == (
            "model.layers.3.mlp.up_proj.bias is no tensor of this llama model; "
            "near it: model.layers.3.mlp.up_proj.weight"
        )
        assert refused["unmapped"] == "score: no tensor of a llama model is known for this parameter"


@needs_megatron
def test_the_patched_process_runs_a_module(results):
    name, arguments, made, path = results[0]["run"]
    assert name == "__main__" and arguments == ["policy.backend=megatron", "--dry-run"]
    assert made.device == CPU and path == str(Path(__file__).parents[1])


def test_rows_of_the_joint_parameters_by_hand():
    """Two groups of two queries, head size 1: q0 q1 k0 v0 q2 q3 k1 v1. Two ranks: g0 g1 u0 u1, then g2 g3 u2 u3."""
    qkv = qkv_rows(2, 2, 1, CPU)
    assert {name: rows.tolist() for name, rows in qkv.items()} == {
        "q_proj": [0, 1, 4, 5],
        "k_proj": [2, 6],
        "v_proj": [3, 7],
    }
    gate_up = gate_up_rows(4, 2, CPU)
    assert {name: rows.tolist() for name, rows in gate_up.items()} == {
        "gate_proj": [0, 1, 4, 5],
        "up_proj": [2, 3, 6, 7],
    }


def test_the_vocabulary_is_padded_to_a_multiple_of_each_rank():
    assert [padded_vocab(150, ranks) for ranks in (1, 2, 4)] == [192, 256, 256]
    assert padded_vocab(151936, 8) == 152064


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_frequencies_are_those_of_transformers(name):
    model = build_hf(name)
    assert rope_frequencies(model.config).equal(model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("llama", {"mlp_bias": True}, "mlp_bias must be False, got True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window must be False, got True"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type must be default or linear or llama3, got yarn",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(model, changes, message):
    for key in ("policy", "value"):
        with pytest.raises(ValueError) as caught:
            check(config_of(model, **changes), key)
        assert str(caught.value) == f"{key}.backend=megatron: the model's {message}"


def test_transformer_engine_that_is_missing_is_asked_for_by_its_block():
    for key in ("policy", "value"):
        with pytest.raises(ValueError, match=rf"^{key}\.megatron\.transformer_engine=true needs a GPU and the package"):
            takes_transformer_engine(True, CPU, key)
    assert not takes_transformer_engine(None, CPU)


def test_a_critic_asks_for_transformer_engine_under_its_own_key(tmp_path):
    from trainers.config import ClusterConfig, ValueConfig
    from trainers.value.megatron import MegatronValue

    config_of("llama").save_pretrained(tmp_path)
    cfg = ValueConfig(backend="megatron", megatron=MegatronConfig(transformer_engine=True))
    with pytest.raises(ValueError, match=r"^value\.megatron\.transformer_engine=true needs a GPU"):
        MegatronValue(tmp_path, cfg, ClusterConfig(), device=CPU, dtype=torch.float32, score_batch=1)


def test_other_architectures_are_refused():
    from transformers import Gemma2Config

    with pytest.raises(ValueError, match="takes models of type llama, qwen2, qwen3, qwen3_moe, got gemma2"):
        build_model(Gemma2Config(), dtype=torch.float32, device=CPU)


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_without_megatron_core_the_extra_is_named():
    with pytest.raises(ImportError, match=r'pip install "fastppo\[megatron\]"'):
        build_model(config_of("llama"), dtype=torch.float32, device=CPU)
