"""The dimensions of a target and of a drafter, checked at birth.

Every checkpoint format is read into these two structs; the graphs are written from them alone.
Symbols are those of the method: `E` hidden, `L` layers, `H`/`KVH` heads, `D` head_dim, `V`
vocabulary, `G` block positions, `r` Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
HEAD_TYPES = ("vanilla", "gated", "rnn")


class ConfigError(ValueError):
    """A field of a checkpoint's configuration is missing, out of bounds or not supported."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `inv_freq` from `theta`, optionally rescaled as Llama 3 does."""

    theta: float
    # Llama 3 scaling (`rope_type: llama3`), or None: (factor, low_freq_factor, high_freq_factor,
    # original_max_position_embeddings).
    llama3: tuple[float, float, float, int] | None = None
    # Linear scaling (`rope_type: linear`): positions are divided by this factor.
    linear_factor: float = 1.0

    def __post_init__(self) -> None:
        require(self.theta > 0, f"rope_theta must be > 0, got {self.theta}")
        require(self.linear_factor > 0, f"rope factor must be > 0, got {self.linear_factor}")
        if self.llama3 is not None:
            factor, low, high, original = self.llama3
            require(factor >= 1, f"rope_scaling.factor must be >= 1, got {factor}")
            require(
                high > low > 0,
                "rope_scaling needs high_freq_factor > low_freq_factor > 0, "
                f"got high_freq_factor={high}, low_freq_factor={low}",
            )
            require(
                original > 0,
                f"rope_scaling.original_max_position_embeddings must be > 0, got {original}",
            )


@dataclass(frozen=True, slots=True)
class LayerDims:
    """What one decoder layer of any supported family needs; shared by target and drafter."""

    hidden_size: int  # E
    intermediate_size: int
    num_heads: int  # H
    num_kv_heads: int  # KVH
    head_dim: int  # D
    rms_norm_eps: float
    rope: Rope
    qk_norm: bool = False  # RMSNorm on q and k per head (Qwen3)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_attention_heads ({self.num_heads}) must be a multiple of "
            f"num_key_value_heads ({self.num_kv_heads})",
        )
        require(self.head_dim % 2 == 0, f"head_dim must be even for RoPE, got {self.head_dim}")
        require(
            1e-12 <= self.rms_norm_eps <= 1,
            f"rms_norm_eps must be in [1e-12, 1], got {self.rms_norm_eps}",
        )


@dataclass(frozen=True, slots=True)
class TargetDims:
    """A target model: its layers and what stands around them."""

    family: str
    layer: LayerDims
    num_layers: int  # L
    vocab_size: int  # V
    max_position: int  # longest context the checkpoint was made for, tokens
    tie_word_embeddings: bool
    # Sliding window of each layer in tokens, 0 = full attention; length L.
    sliding_windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.family in FAMILIES,
            f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}",
        )
        for name in ("num_layers", "vocab_size", "max_position"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        require(
            len(self.sliding_windows) == self.num_layers,
            f"sliding windows are given for {len(self.sliding_windows)} layers, "
            f"the model has {self.num_layers}",
        )
        for eos in self.eos_token_ids:
            require(
                0 <= eos < self.vocab_size,
                f"eos_token_id must be in [0, {self.vocab_size}), got {eos}",
            )


@dataclass(frozen=True, slots=True)
class DrafterDims:
    """A DSpark drafter: Qwen3-class layers, a sequential head and a confidence head."""

    layer: LayerDims
    num_layers: int
    vocab_size: int  # V, the target's
    block_size: int  # G
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    markov_rank: int  # r; 0 = no sequential head
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False
    own_embed_tokens: bool = False
    own_lm_head: bool = False

    def __post_init__(self) -> None:
        require(1 <= self.block_size <= 64, f"block_size must be in [1, 64], got {self.block_size}")
        require(
            0 <= self.markov_rank <= 512, f"markov_rank must be in [0, 512], got {self.markov_rank}"
        )
        require(
            self.markov_head_type in HEAD_TYPES,
            f"markov_head_type must be one of {', '.join(HEAD_TYPES)}, "
            f"got {self.markov_head_type!r}",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id must be in [0, {self.vocab_size}), got {self.mask_token_id}",
        )
        require(self.num_layers > 0, f"num_hidden_layers must be > 0, got {self.num_layers}")
        ids = self.target_layer_ids
        require(len(ids) > 0, "target_layer_ids is empty: name at least one layer")
        require(
            all(a < b for a, b in zip(ids, ids[1:])),
            f"target_layer_ids must be strictly increasing, got {list(ids)}",
        )
        for i in ids:
            require(
                -1 <= i < self.num_target_layers - 1,
                f"target_layer_ids must be -1 or in [0, {self.num_target_layers - 1}) (the last "
                f"layer's output is not a feature), got {i}",
            )
        require(
            not (self.confidence_head_with_markov and self.markov_rank == 0),
            "confidence_head_with_markov needs markov_rank > 0, got markov_rank 0: "
            "set confidence_head_with_markov to false",
        )

    def check_against(self, target: TargetDims) -> None:
        """Refuse, by field, a drafter that was not made for `target`."""
        for field, mine, theirs in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.layer.hidden_size, target.layer.hidden_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        ):
            require(
                mine == theirs,
                f"the drafter's {field} is {mine}, the target's is {theirs}: "
                "this drafter belongs to another target",
            )
