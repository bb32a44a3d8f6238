"""The sizes that a model's memory, traffic and arithmetic follow from, and those of some public models.

`shape:NAME` in place of a model's name is its shape without weights, for --dry-run alone. Numbers are those of the
models' own config.json.
"""

import difflib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trainers.config_checks import ConfigError
from trainers.config_types import one_of
from trainers.extras import require

PREFIX = "shape:"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # whose layers the sizes below describe


@dataclass(frozen=True)
class ModelShape:
    """A decoder of pre-norm layers with rotary attention and gated MLPs, some or all of them of experts."""

    name: str
    family: str  # transformers' model_type
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0  # of a model with experts: layers without

    def as_config(self) -> Any:
        """The names that transformers' config has for those sizes that ranks divide."""
        return SimpleNamespace(
            model_type=self.family,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            num_experts=self.experts,
            moe_intermediate_size=self.expert_ffn,
        )

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def qkv(self) -> int:
        """Query, key and value of a token."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def norms(self) -> int:
        """Of a layer."""
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def attention(self) -> int:
        bias = self.qkv if self.qkv_bias else 0
        return self.hidden * (self.qkv + self.heads * self.head_dim) + bias

    @property
    def mlp(self) -> int:
        return 3 * self.hidden * self.ffn

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.expert_ffn

    @property
    def router(self) -> int:
        return self.hidden * self.experts

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def in_layers(self) -> int:
        """Parameters of all layers."""
        dense = (self.layers - self.sparse_layers) * self.mlp
        sparse = self.sparse_layers * (self.router + self.experts * self.expert)
        return self.layers * (self.norms + self.attention) + dense + sparse

    @property
    def largest_layer(self) -> int:
        mlp = self.router + self.experts * self.expert if self.sparse_layers else self.mlp
        return self.norms + self.attention + mlp

    @property
    def parameters(self) -> int:
        return self.in_layers + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def multiplied(self) -> int:
        """Parameters in the layers that one token is multiplied with."""
        mlp = (self.layers - self.sparse_layers) * self.mlp
        experts = self.sparse_layers * (self.router + self.experts_per_token * self.expert)
        return self.layers * self.attention + mlp + experts

    @property
    def active(self) -> int:
        """As "A22B" in a model's name counts: what one token reads, embedding and head included."""
        unread = self.sparse_layers * (self.experts - self.experts_per_token) * self.expert
        return self.parameters - unread

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values in bfloat16, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}
_CODER = {"num_experts": 160, "num_experts_per_tok": 8, "num_key_value_heads": 8}


def _facts(hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": ffn, **more}


# Name -> (model_type, settings of its transformers config).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("llama", _facts(2048, 16, 32, 8192, tie_word_embeddings=True, **_LLAMA)),
    "llama-3.1-8b": ("llama", _facts(4096, 32, 32, 14336, **_LLAMA)),
    "llama-3.1-70b": ("llama", _facts(8192, 80, 64, 28672, **_LLAMA)),
    "llama-3.1-405b": ("llama", _facts(16384, 126, 128, 53248, **_LLAMA)),
    "qwen3-0.6b": ("qwen3", _facts(1024, 28, 16, 3072, num_key_value_heads=8, tie_word_embeddings=True, **_QWEN3)),
    "qwen3-8b": ("qwen3", _facts(4096, 36, 32, 12288, num_key_value_heads=8, **_QWEN3)),
    "qwen3-32b": ("qwen3", _facts(5120, 64, 64, 25600, num_key_value_heads=8, **_QWEN3)),
    "qwen3-30b-a3b": ("qwen3_moe", _facts(2048, 48, 32, 6144, moe_intermediate_size=768, **_EXPERTS, **_QWEN3)),
    "qwen3-235b-a22b": ("qwen3_moe", _facts(4096, 94, 64, 12288, moe_intermediate_size=1536, **_EXPERTS, **_QWEN3)),
    "qwen3-coder-480b-a35b": (
        "qwen3_moe",
        _facts(
            6144,
            62,
            96,
            8192,
            moe_intermediate_size=2560,
            **_CODER,
            **_QWEN3,
        ),
    ),
}


def is_shape(name: str) -> bool:
    return name.startswith(PREFIX)


def named_config(name: str, key: str = "policy.model_name") -> Any:
    """The transformers config of `shape:NAME`, the value of the setting `key`.

    Raises:
        ConfigError: no such shape.
    """
    short = name.removeprefix(PREFIX)
    if short not in SHAPES:
        near = difflib.get_close_matches(short, SHAPES, 1, 0.6)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        raise ConfigError(f"{key}={name}: expected {PREFIX} before {one_of(list(SHAPES))}{hint}")
    kind, settings = SHAPES[short]
    return require("transformers").AutoConfig.for_model(kind, **settings)


def shape_of(config: Any, name: str) -> ModelShape:
    """Of a transformers config.

    Raises:
        ConfigError: a model whose layers are not those that the sizes describe.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"cluster.gpus: the plan knows models of type {one_of(FAMILIES)}, but {name} is of type {kind}: without "
            "cluster.gpus the memory of one device is told for any model"
        )
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            raise ConfigError(f"cluster.gpus: the plan knows no {key}=true, which {name} has")
    moe = kind == "qwen3_moe" and config.num_experts > 0
    sparse = [
        i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0
        for i in range(config.num_hidden_layers if moe else 0)
    ]
    return ModelShape(
        name=name,
        family=kind,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=config.num_experts if moe else 0,
        experts_per_token=config.num_experts_per_tok if moe else 0,
        expert_ffn=config.moe_intermediate_size if moe else 0,
        dense_layers=sparse.count(False),
    )
