"""Sequence classifiers of transformers with a linear `score` head on a decoder: how reward models are published.

Their own forward scores the last token that is not `pad_token_id`, which may be one that was sampled: a stop token is
the usual padding. Here the caller says which token is scored, and nothing is masked: under a causal mask what stands to
its right changes nothing.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from trainers.backbone import decoder_of, load_model, quiet


def is_classifier(path: Path | str) -> bool:
    """Whether the model at `path` was saved as a sequence classifier."""
    try:
        architectures = AutoConfig.from_pretrained(path).architectures or []
    except (OSError, ValueError):  # who loads the model says it in the words of the setting
        return False
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def load_classifier(path: Path | str, key: str) -> PreTrainedModel:
    """The classifier in float32 in the CPU's memory.

    Raises:
        ValueError, naming the setting `key`: no classifier; no linear `score` head; weights that the files lack, which
            transformers would draw at random; or scores that differ from the model's own.
    """
    name = f"{key}={str(path)!r}"
    try:
        with quiet():
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: no sequence classifier could be loaded: {error}") from error
    architecture = type(model).__name__
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"{name}: {architecture} has no linear layer `score` on a decoder; expected an architecture such as "
            "LlamaForSequenceClassification or Qwen3ForSequenceClassification"
        )
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"{name}: the files have no {', '.join(missing[:3])}; expected a trained {architecture}, got a model of "
            "another kind"
        )
    _check(model.eval(), name)
    return model


def load_backbone(path: Path | str, key: str) -> tuple[PreTrainedModel, nn.Linear | None]:
    """A critic's model, and the `score` head of the classifier that it was saved in, if it was."""
    if not is_classifier(path):
        return load_model(path), None
    model = load_classifier(path, key)
    return decoder_of(model), model.score


def scores_at(model: PreTrainedModel, ids: Tensor, place: Tensor) -> Tensor:
    """[N, heads]: what the head, like it float32, says of the tokens at `place`, flat indices [N] into `ids` [B, S]."""
    hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[place]
    return model.score(hidden.float())


@torch.no_grad()
def _check(model: PreTrainedModel, name: str) -> None:
    """Scores read here must be the model's own of the same row, alone, whatever stands to the right of it."""
    config = model.config.get_text_config()
    known = [i for i in range(min(config.vocab_size, 9)) if i != config.pad_token_id]
    row = torch.tensor([known[i % len(known)] for i in range(8)])[None]
    own = model(input_ids=row[:, :5], use_cache=False).logits.float()
    read = scores_at(model, row, torch.tensor([4]))
    if own.shape != read.shape or not torch.allclose(own, read, rtol=1e-4, atol=1e-4):
        found = f"differ by {(own - read).abs().max():.2g}" if own.shape == read.shape else f"have shape {own.shape}"
        raise ValueError(
            f"{name}: the scores of {type(model).__name__} {found} from `score` on its decoder's output at the last "
            "token; expected a causal decoder scored so"
        )
