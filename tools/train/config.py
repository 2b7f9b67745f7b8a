"""What a training run is: one frozen struct, from a JSON file, flags, or a checkpoint.

Defaults are the paper's, except the sizes that must follow the target. 0 or an empty tuple stands
for "by the target": see `resolved`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.build.config import HEAD_TYPES, DrafterDims, LayerDims, Rope, TargetDims
from dspark_trt.runtime.typed_json import JsonError, from_json, read_json

MAX_CONFIG_BYTES = 1 << 20
ATTENTION = ("auto", "flex", "sdpa")
MAX_TEMPERATURE = 4.0
FEATURES = 5  # feature layers where none are named


class TrainError(ValueError):
    """Something about a training run that its user can put right."""


def require(condition: bool, message: str) -> None:
    """Raise `TrainError(message)` unless `condition` holds."""
    if not condition:
        raise TrainError(message)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Every setting that changes what is learned; the effective one is saved beside the result."""

    # The drafter. 0 and () are the target's: hidden size, heads and RoPE always are.
    layers: int = 5
    block_size: int = 7  # G
    head: str = "vanilla"  # vanilla | gated | rnn | none
    rank: int = 256  # r
    confidence: bool = True
    intermediate_size: int = 0
    feature_layers: tuple[int, ...] = ()
    mask_token_id: int = -1  # -1: a special token that chats do not use

    # Data: packed rows of `row_tokens`, documents cut there.
    row_tokens: int = 1024
    anchors: int = 256  # sampled in each row
    held_out: float = 0.02  # share of the documents
    seed: int = 0

    # The loss: ce * CE + tv * L1 + confidence_weight * BCE, positions weighted exp(-(k-1) / decay).
    ce_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 1.0
    decay: float = 4.0
    detach_confidence: bool = False

    # Optimisation. A run ends at the first bound it meets: steps, epochs or seconds.
    rows: int = 32  # in a step, over all processes
    micro_rows: int = 0  # in one forward pass of a process; 0: all of its rows
    learning_rate: float = 6e-4
    warmup: float = 0.04  # share of the run
    gradient_norm: float = 1.0
    epochs: float = 10.0
    steps: int = 0  # 0: by the epochs
    max_seconds: float = 0.0  # 0: no bound; else the schedule follows the clock
    max_loss: float = 50.0

    # How it runs.
    attention: str = "auto"
    compile: bool = True  # on CUDA
    vocabulary_chunk: int = 4096  # block positions whose logits exist at once
    checkpoint_every: float = 120.0  # seconds
    evaluate_every: float = 0.0  # seconds; 0: at the end alone
    evaluation_rows: int = 32
    log_every: int = 20  # steps

    def __post_init__(self) -> None:
        require(
            self.head in (*HEAD_TYPES, "none"),
            f"head must be one of {', '.join(HEAD_TYPES)}, none, got {self.head!r}",
        )
        require(
            self.attention in ATTENTION,
            f"attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}",
        )
        bounds = {
            "layers": (1, 64),
            "block_size": (1, 64),
            "rank": (1, 512),
            "intermediate_size": (0, 1 << 20),
            "row_tokens": (self.block_size + 1, 1 << 17),
            "anchors": (1, self.row_tokens),
            "rows": (1, 1 << 16),
            "micro_rows": (0, 1 << 16),
            "steps": (0, 1 << 40),
            "vocabulary_chunk": (16, 1 << 20),
            "evaluation_rows": (1, 1 << 16),
            "log_every": (1, 1 << 30),
            "held_out": (0.0, 0.5),
            "warmup": (0.0, 0.5),
            "learning_rate": (0.0, 1.0),
            "ce_weight": (0.0, 1e3),
            "tv_weight": (0.0, 1e3),
            "confidence_weight": (0.0, 1e3),
            "max_seconds": (0.0, 1e9),
            "checkpoint_every": (0.0, 1e9),
            "evaluate_every": (0.0, 1e9),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            require(low <= value <= high, f"{name} must be in [{low}, {high}], got {value}")
        for name in ("decay", "gradient_norm", "epochs", "max_loss"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")

    @property
    def markov_rank(self) -> int:
        """The rank as a checkpoint counts it: 0 without a head."""
        return 0 if self.head == "none" else self.rank

    def drafter_dims(self, target: TargetDims) -> DrafterDims:
        """The drafter that this run trains; every size must be settled (see `resolved`)."""
        layer = target.layer
        return DrafterDims(
            layer=LayerDims(
                hidden_size=layer.hidden_size,
                intermediate_size=self.intermediate_size,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                rms_norm_eps=layer.rms_norm_eps,
                rope=Rope(layer.rope.theta),
                qk_norm=True,
            ),
            num_layers=self.layers,
            vocab_size=target.vocab_size,
            block_size=self.block_size,
            target_layer_ids=self.feature_layers,
            mask_token_id=self.mask_token_id,
            num_target_layers=target.num_layers,
            markov_rank=self.markov_rank,
            markov_head_type=self.head if self.markov_rank else "vanilla",
            confidence_head=self.confidence,
            confidence_head_with_markov=self.confidence and self.markov_rank > 0,
        )

    def resolved(self, target: TargetDims, mask_token_id: int) -> TrainConfig:
        """The config with everything left to the target filled in; checks it against the target."""
        config = dataclasses.replace(
            self,
            intermediate_size=self.intermediate_size or target.layer.intermediate_size,
            feature_layers=self.feature_layers or spread_layers(target.num_layers),
            mask_token_id=mask_token_id if self.mask_token_id < 0 else self.mask_token_id,
        )
        config.drafter_dims(target)  # refuses, by field, what cannot be built
        longest = target.max_position - config.block_size
        require(
            config.row_tokens <= longest,
            f"row_tokens must be <= {longest} (the target's {target.max_position} positions less "
            f"a block), got {config.row_tokens}",
        )
        return config

    def to_json(self) -> str:
        """The config as an indented JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def spread_layers(layers: int, count: int = FEATURES) -> tuple[int, ...]:
    """Feature layers spread over a target: 1 near the bottom to L - 3, as published drafters do."""
    low, high = min(1, layers - 2), max(layers - 3, min(1, layers - 2))
    steps = max(count - 1, 1)
    return tuple(sorted({low + round(i * (high - low) / steps) for i in range(count)}))


def config_from_file(path: Path, changes: dict[str, object]) -> TrainConfig:
    """The config in the JSON file `path`, with `changes` over it."""
    try:
        values = read_json(path, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(values, dict):
            raise JsonError(f"{path} must hold a JSON object")
        given = {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
        return from_json(TrainConfig, values | given, str(path))
    except JsonError as error:
        raise TrainError(str(error)) from None
