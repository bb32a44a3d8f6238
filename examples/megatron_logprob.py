"""linear_logprob after a megatron-core GPTModel's decoder, in the place of its output layer and cross-entropy.

    pip install "fastppo[megatron]"
    torchrun --nproc-per-node 2 -m examples.megatron_logprob --tp 2                              # GPUs
    torchrun --nproc-per-node 2 tests/megatron_cpu.py examples.megatron_logprob --tp 2           # CPUs, over gloo

`token_logprobs` is what you would copy. The rest holds it against `vocab_parallel_cross_entropy`: values, and gradients
of every parameter.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastppo


def token_logprobs(
    model: Any, input_ids: Tensor, position_ids: Tensor, labels: Tensor, vocab_size: int, temperature: float = 1.0
) -> fastppo.LogprobOutput:
    """Log-probs and entropies, [S, B] as megatron-core's, of labels [B, S]; no logits. Where the last stage is.

    Ids from vocab_size on are padding of the embedding and count as no tokens; megatron-core's own loss counts them.
    """
    model.post_process = False  # forward then ends after the decoder and its norm
    try:
        hidden = model(input_ids, position_ids, None)  # [S, B, D]; S / tp of it under sequence parallelism
    finally:
        model.post_process = True
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    rank, rows = model.tp_group.rank(), weight.shape[0]
    return fastppo.linear_logprob(
        hidden,
        weight,
        labels.t(),
        temperature=temperature,
        vocab=fastppo.VocabShard(rank * rows, (rank + 1) * rows, model.tp_group, vocab_size),
        reduce_dhidden="reduce_scatter" if model.config.sequence_parallel else "all_reduce",
    )


def small_model(tp: int, sequence_parallel: bool, tied: bool, device: torch.device) -> Any:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from transformers import LlamaConfig

    from trainers.policy.megatron_model import build_model

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,  # which two ranks hold without padding
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)  # attention asks for its random state, though nothing is dropped out
    options = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    (model,) = build_model(config, dtype=torch.float32, device=device, **options)
    rank = model.tp_group.rank()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        sharded = getattr(parameter, "tensor_model_parallel", False)
        draw = torch.Generator().manual_seed(100 * index + (rank if sharded else 0))
        values = torch.randn(parameter.shape, generator=draw)
        parameter.data.copy_(1 + 0.1 * values if "norm" in name else 0.1 * values)
    return model


def compare(
    tp: int, sequence_parallel: bool = False, tied: bool = False, device: str = "cpu"
) -> tuple[float, float, float]:
    """Largest difference of a log-prob, of a gradient and the largest gradient. Collective, in an initialised group."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    model = small_model(tp, sequence_parallel, tied, torch.device(device))
    draw = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(256, (3, 16), generator=draw).to(device) for _ in range(2))
    positions = torch.arange(16, device=device).expand(3, 16)
    upstream = torch.randn(16, 3, generator=draw).to(device)

    def gradients(logprobs: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((upstream * logprobs).sum(), list(model.parameters())))

    logits = model(ids, positions, None).transpose(0, 1)  # [S, B, V / tp]
    theirs = -vocab_parallel_cross_entropy(logits.contiguous(), labels.t().contiguous())
    right = gradients(theirs)
    ours = token_logprobs(model, ids, positions, labels, vocab_size=256).logprobs
    got = gradients(ours)
    parallel_state.destroy_model_parallel()
    error = max((a - b).abs().max().item() for a, b in zip(got, right, strict=True))
    return (ours - theirs).abs().max().item(), error, max(g.abs().max().item() for g in right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    logprob, gradient, largest = compare(args.tp, args.sequence_parallel, device="cuda" if cuda else "cpu")
    if dist.get_rank() == 0:
        layout = f"tp={args.tp}" + ", sequence parallel" * args.sequence_parallel
        print(f"{layout}: log-probs apart by {logprob:.1e}, gradients by {gradient:.1e} of at most {largest:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
