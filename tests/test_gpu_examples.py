"""The examples on a GPU: fastppo beside the trainer or model that it is put into, with the CUDA or Triton kernels."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples import load
from tests.test_dist import ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL: pip install trl==1.16.0, for Python 3.11 or newer")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("bf16", [False, True])
def test_trls_trainers_have_the_losses_that_they_have_without(algorithm, bf16, capsys):
    example = load("trl_trainers")
    size = example.Size(vocab=1024, hidden=64, prompts=4, prompt_tokens=5, response_tokens=19, learning_rate=1e-4)
    before, after = example.compare(algorithm, size, device="cuda", bf16=bf16)
    assert "linear_logprob" in capsys.readouterr().out
    assert len(before.losses) == 5 and max(map(abs, before.losses)) > 1e-3 and min(before.grad_norms) > 1e-3
    # float32: both multiply in it, no TF32. bfloat16: two rounded products, of the same rounded inputs.
    rel, near = (2e-2, 2e-4) if bf16 else (1e-4, 1e-6)
    for name in ("losses", "grad_norms", "entropies"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=rel, abs=near), name


def test_ten_lines_give_the_loss_and_gradients_of_the_model():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
    )
    model = LlamaForCausalLM(config).cuda()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # far from uniform
    ids = torch.randint(1000, (3, 65), device="cuda")
    labels = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.3, -100)
    theirs, ours, gradient = load("transformers_ten_lines").compare(model, ids, labels)
    assert ours == pytest.approx(theirs, rel=1e-6) and gradient < 1e-5


@pytest.mark.skipif(find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"')
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_has_its_own_cross_entropys_values_and_gradients(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["-m", "examples.megatron_logprob", "--tp", str(ranks)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
    logprob, gradient, largest = (float(word.rstrip(",")) for word in run.stdout.split() if word[0].isdigit())
    assert logprob < 5e-6 and gradient < 5e-6 * largest and largest > 1
