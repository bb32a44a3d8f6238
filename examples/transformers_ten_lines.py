"""The training step of a causal LM of transformers without its logits: `loss` below, in ten lines.

    pip install "fastppo[trainer]"
    python examples/transformers_ten_lines.py                   # a small random model: losses, gradients, costs
    python examples/transformers_ten_lines.py --device cuda     # one of 1.5 billion parameters

It is the loss of `model(input_ids, labels=labels)` where logits are the output layer's product, times `logit_scale`,
over `logits_scaling`, or softcapped: of nearly all models. A few have factors under other names (FalconH1,
HyperCLOVAX); `compare` tells for yours. Of a PEFT model pass `model.get_base_model()`. With `-logprobs` in the place of
a mean, the same lines are the log-probs of PPO, GRPO or DPO.
"""

import argparse
import time
from collections.abc import Callable

import torch
from peak import Peak
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


def cost(step: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """Seconds of forward and backward, the least of three, and MiB that they need above the start of the step."""
    seconds, peaks = [], []
    for _ in range(4):  # the first warms up
        peak, began = Peak(device), time.perf_counter()
        step().backward()
        peaks.append(peak.read())
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:]), max(peaks[1:])


SMALL = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=49152)
LLAMA_1B = LlamaConfig(  # the shape of Llama-3.2-1B, with a head of its own
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(0)
    config, shape, dtype = (
        (SMALL, (8, 256), torch.float32) if device.type == "cpu" else (LLAMA_1B, (8, 1024), torch.bfloat16)
    )
    with device:
        model = LlamaForCausalLM(config).to(dtype)
        ids = torch.randint(config.vocab_size, shape)
        labels = ids.masked_fill(torch.rand(shape) < 0.3, -100)
    theirs, ours, error = compare(model, ids, labels)
    print(f"the model's loss {theirs:.6f}, without logits {ours:.6f}, gradients apart by {error:.1e} of the largest")
    for who, step in (
        ("model(input_ids, labels)", lambda: model(ids, labels=labels).loss),
        ("without logits", lambda: loss(model, ids, labels)),
    ):
        seconds, mib = cost(step, device)
        print(f"{who:24} {seconds:6.3f} s, {mib:6.0f} MiB above the start of the step")


if __name__ == "__main__":
    main()
