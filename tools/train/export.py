"""The trained drafter as files: DeepSpec's format, and our compact int8 one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dspark_trt.build.config import DrafterDims, TargetDims
from dspark_trt.build.drafter_checkpoint import write_compact
from dspark_trt.runtime.directory_swap import staged_directory, sync_tree
from dspark_trt.tools.train.drafter import Drafter

WEIGHTS = "model.safetensors"


def drafter_config(dims: DrafterDims, target: TargetDims, anchors: int) -> dict[str, Any]:
    """config.json in DeepSpec's format."""
    layer = dims.layer
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": layer.hidden_size,
        "vocab_size": dims.vocab_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * dims.num_layers,
        "torch_dtype": "float32",
        "eos_token_id": list(target.eos_token_ids),
        "block_size": dims.block_size,
        "target_layer_ids": list(dims.target_layer_ids),
        "mask_token_id": dims.mask_token_id,
        "num_anchors": anchors,
        "num_target_layers": dims.num_target_layers,
        "markov_rank": dims.markov_rank,
        "markov_head_type": dims.markov_head_type,
        "enable_confidence_head": dims.confidence_head,
        "confidence_head_with_markov": dims.confidence_head_with_markov,
    }
    return config


def save_drafter(
    folder: Path,
    drafter: Drafter,
    target: TargetDims,
    *,
    anchors: int,
    dtype: str = "bfloat16",
    int8: bool = False,
) -> None:
    """Write config.json and model.safetensors in place of `folder`; `int8`: the compact format."""
    config = drafter_config(drafter.dims, target, anchors) | {"torch_dtype": dtype}
    state = {name: value.detach().cpu() for name, value in drafter.state_dict().items()}
    with staged_directory(folder) as staged:
        text = json.dumps(config, indent=2) + "\n"
        (staged / "config.json").write_text(text, encoding="utf-8")
        if int8:
            arrays = {name: np.asarray(value.float().numpy()) for name, value in state.items()}
            write_compact(staged / WEIGHTS, arrays)
        else:
            kind = getattr(torch, dtype)
            cast = {name: value.to(kind).contiguous() for name, value in state.items()}
            save_file(cast, staged / WEIGHTS, metadata={"format": "pt"})
        sync_tree(staged)
