"""The training step of any causal LM of transformers without its logits: `loss` below, in ten lines.

    pip install "fastppo[trainer]"
    python examples/transformers_ten_lines.py             # a small random model: losses, gradients, costs

It is the loss of `model(input_ids, labels=labels)`. With `-logprobs` in the place of a mean, the same lines are the
log-probs of PPO, GRPO or DPO.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import fastppo


def loss(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    hidden = model.base_model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    targets = labels[:, 1:]
    logprobs, _ = fastppo.linear_logprob(
        hidden[:, :-1], head.weight, targets, bias=head.bias, softcap=softcap, temperature=1 / scale, with_entropy=False
    )
    return -logprobs.sum() / (targets != -100).sum()


def compare(model: PreTrainedModel, input_ids: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """The model's own loss, this one, and the largest difference of a gradient, of the largest gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    theirs = model(input_ids, labels=labels).loss
    right = torch.autograd.grad(theirs, parameters)
    ours = loss(model, input_ids, labels)
    got = torch.autograd.grad(ours, parameters)
    largest = max(g.abs().max() for g in right)
    error = max((a - b).abs().max() for a, b in zip(got, right, strict=True))
    return theirs.item(), ours.item(), (error / largest).item()


def resident_mib(line: str) -> float:
    return int(re.search(rf"{line}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def cost(step: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward, the least of three, and MiB that they need above what the process held."""
    seconds, peaks = [], []
    for _ in range(4):  # the first warms up
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        began, base = time.perf_counter(), resident_mib("VmRSS")
        step().backward()
        seconds.append(time.perf_counter() - began)
        peaks.append(resident_mib("VmHWM") - base)
    return min(seconds[1:]), max(peaks[1:])


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=49152))
    ids = torch.randint(49152, (8, 256))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    theirs, ours, error = compare(model, ids, labels)
    print(f"the model's loss {theirs:.6f}, without logits {ours:.6f}, gradients apart by {error:.1e} of the largest")
    for who, step in (
        ("model(input_ids, labels)", lambda: model(ids, labels=labels).loss),
        ("without logits", lambda: loss(model, ids, labels)),
    ):
        seconds, mib = cost(step)
        print(f"{who:24} {seconds:5.2f} s, {mib:5.0f} MiB above the start of the step")


if __name__ == "__main__":
    main()
