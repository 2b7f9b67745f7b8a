"""A DSpark drafter from a folder: config.json and safetensors, in DeepSpec's format or compact.

DeepSpec: the fields of a Qwen3 config beside block_size, target_layer_ids, mask_token_id,
num_target_layers, markov_rank, markov_head_type, enable_confidence_head and
confidence_head_with_markov; these may also stand in a nested `dspark_config` or `dflash_config`
object. Tensors are bfloat16, float16 or float32. `embed_tokens.weight` and `lm_head.weight` may be
absent: then they are the target's.

Compact (ours): the same names and config; one safetensors file with metadata
`{"format": "dspark-int8"}` in which every 2-D tensor NAME [out, in] is int8 and beside it stands
`NAME.scale` [out] float32: the weight is int8 * scale, row by row. Other tensors stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dspark_trt.build.config import ConfigError, DrafterDims, TargetDims, require
from dspark_trt.build.families import QWEN3, layer_dims, sliding_windows
from dspark_trt.build.json_file import Fields, read_object
from dspark_trt.build.safetensors_file import (
    SafetensorsFile,
    SafetensorsWeights,
    canonical_names,
    main_dtype,
    open_shards,
    require_floats,
)
from dspark_trt.build.source import (
    CheckpointError,
    DrafterCheckpoint,
    WeightSource,
    check_finite,
    naming,
)
from dspark_trt.build.tensor_names import check_shapes, drafter_shapes, equal_tensors

COMPACT_FORMAT = "dspark-int8"
INT8_MAX = 127
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
SECTIONS = ("dspark_config", "dflash_config")
METHOD_FIELDS = (
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "num_target_layers",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
)
BARE_NAMES = ("markov_head.markov_w1", "markov_head.markov_w2")


class CompactWeights(SafetensorsWeights):
    """Tensors of our compact file: int8 rows times their scales. A `WeightSource`."""

    def __init__(self, path: Path, file: SafetensorsFile, where: dict[str, str]) -> None:
        scales = {name for name in where if name.endswith(".scale")}
        self._scales = {
            name: f"{name}.scale" for name in where if file.slices[where[name]].dtype == "I8"
        }
        super().__init__(path, [file], where)
        for name, scale in self._scales.items():
            shape = self.shape(name)
            if len(shape) != 2:
                raise CheckpointError(
                    f"{path}: int8 tensor {name} has shape {list(shape)}, not 2-D"
                )
            if scale not in scales or self.shape(scale) != shape[:1]:
                raise CheckpointError(
                    f"{path}: tensor {scale} of shape {[shape[0]]} is missing: int8 tensor {name} "
                    "needs a scale for each row"
                )

    def names(self) -> list[str]:
        """Every tensor, in order of name; scales belong to their tensors."""
        taken = set(self._scales.values())
        return [name for name in super().names() if name not in taken]

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor, checked to be finite; a new array."""
        values = super().tensor(name)
        if name in self._scales:
            values *= super().tensor(self._scales[name])[:, None]
            check_finite(self.path, name, values)
        return values


def write_compact(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a compact file: 2-D tensors as int8 with a scale for each row, others as float32.

    A row's scale is its largest magnitude / 127, so the error of a weight is at most half of that.
    """
    stored: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        values = np.asarray(values, np.float32)
        check_finite(path, name, values)
        if values.ndim != 2:
            stored[name] = np.ascontiguousarray(values)
            continue
        scale = np.abs(values).max(axis=1) / INT8_MAX
        scale[scale == 0] = 1.0
        stored[name] = np.rint(values / scale[:, None]).astype(np.int8)
        stored[f"{name}.scale"] = scale.astype(np.float32)
    save_file(stored, path, metadata={"format": COMPACT_FORMAT})


def open_deepspec(folder: Path, target: TargetDims) -> DrafterCheckpoint:
    """Open a drafter's folder and hold it against its target; reads headers, no weights."""
    path = folder / "config.json"
    with naming(path):
        dims = drafter_dims(path, read_object(path))
        dims.check_against(target)
    files = open_shards(folder)
    where = _names(files)
    dims = _with_own(dims, where)
    weights: SafetensorsWeights
    if files[0].metadata.get("format") == COMPACT_FORMAT:
        if len(files) > 1:
            raise CheckpointError(f"{folder}: a {COMPACT_FORMAT} drafter is one file, not shards")
        weights = CompactWeights(folder, files[0], where)
    else:
        require_floats(files)
        weights = SafetensorsWeights(folder, files, where)
    check_shapes(weights, drafter_shapes(dims))
    return DrafterCheckpoint(
        dims=dims,
        weights=weights,
        weight_dtype=main_dtype(files),
        files=(path, *(file.path for file in files)),
    )


def share_with_target(drafter: DrafterCheckpoint, target: WeightSource) -> DrafterCheckpoint:
    """The drafter with its own embed_tokens and lm_head given up where they equal the target's.

    Published drafters carry copies of both. A tied target's head is its embedding.
    """
    dims = drafter.dims
    head = "lm_head.weight" if "lm_head.weight" in target.names() else "embed_tokens.weight"
    own_embed = dims.own_embed_tokens and not equal_tensors(
        drafter.weights, "embed_tokens.weight", target, "embed_tokens.weight"
    )
    own_head = dims.own_lm_head and not equal_tensors(
        drafter.weights, "lm_head.weight", target, head
    )
    return replace(drafter, dims=replace(dims, own_embed_tokens=own_embed, own_lm_head=own_head))


def _merged(path: Path, values: dict[str, object]) -> Fields:
    """The config with the method's fields lifted out of their nested object, if they are in one."""
    config = Fields(str(path), dict(values))
    for name in SECTIONS:
        section = config.section(name)
        for field in METHOD_FIELDS:
            if not section.has(field):
                continue
            if config.has(field) and config.get(field) != section.get(field):
                raise ConfigError(
                    f"{path}: {field} is {config.get(field)!r} at the top and "
                    f"{section.get(field)!r} in {name}: make them equal"
                )
            config.values[field] = section.get(field)
    return config


def _refuse_others(config: Fields) -> None:
    """Refuse, by name, drafters of other methods and of families that are not built."""
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    model_type = config.get("model_type")
    for name in (first, model_type):
        if isinstance(name, str) and name.lower().startswith("gemma"):
            raise ConfigError(
                f"{config.where}: {name}: drafters of the Gemma family are not supported; "
                f"supported are {', '.join(ARCHITECTURES)} on Qwen3-class layers"
            )
    require(
        first is None or first in ARCHITECTURES,
        f"{config.where}: drafter architecture {first!r} is not supported; supported are "
        f"{', '.join(ARCHITECTURES)}",
    )
    require(
        model_type in (None, "qwen3"),
        f"{config.where}: model_type must be 'qwen3' (the class of the drafter's layers), "
        f"got {model_type!r}",
    )


def drafter_dims(path: Path, values: dict[str, object]) -> DrafterDims:
    """Dimensions from the config.json at `path`; which weights are its own, the files say.

    Depth is `block_size` alone, whatever else the config counts.
    """
    config = _merged(path, values)
    _refuse_others(config)
    layers = config.integer("num_hidden_layers", high=256)
    vocab = config.integer("vocab_size")
    require(
        config.integer("draft_vocab_size", vocab) == vocab,
        f"{config.where}: draft_vocab_size {config.get('draft_vocab_size')} differs from "
        f"vocab_size {vocab}: drafters of a reduced vocabulary are not supported",
    )
    require(
        not any(sliding_windows(config, QWEN3, layers)),
        f"{config.where}: sliding attention in a drafter (layer_types, use_sliding_window) is not "
        "supported: its layers see the whole context",
    )
    _require_full_attention(config, layers)
    rank = config.integer("markov_rank", 0, low=0)
    confidence = config.boolean("enable_confidence_head", False)
    return DrafterDims(
        layer=layer_dims(config, QWEN3),
        num_layers=layers,
        vocab_size=vocab,
        block_size=config.integer("block_size"),
        target_layer_ids=tuple(config.integers("target_layer_ids")),
        mask_token_id=config.integer("mask_token_id", low=0, high=vocab - 1),
        num_target_layers=config.integer("num_target_layers"),
        markov_rank=rank,
        markov_head_type=config.text("markov_head_type") if rank else "vanilla",
        confidence_head=confidence,
        confidence_head_with_markov=confidence and config.boolean("confidence_head_with_markov"),
    )


def _require_full_attention(config: Fields, layers: int) -> None:
    types = config.get("layer_types")
    if types is not None and types != ["full_attention"] * layers:
        raise config.fail("layer_types", f"{layers} times 'full_attention', or absent")


def _names(files: list[SafetensorsFile]) -> dict[str, str]:
    """Canonical name -> stored name; both heads' matrices may be stored without `.weight`."""
    where = canonical_names(files)
    for bare in BARE_NAMES:
        for suffix in ("", ".scale"):
            stored = where.pop(f"{bare}{suffix}", None)
            name = f"{bare}.weight{suffix}"
            if stored is not None and name in where:
                raise CheckpointError(f"{files[0].path}: tensors {stored} and {where[name]} clash")
            if stored is not None:
                where[name] = stored
    return where


def _with_own(dims: DrafterDims, where: dict[str, str]) -> DrafterDims:
    """The dims, told which of embeddings and lm_head the drafter brings itself."""
    return replace(
        dims,
        own_embed_tokens="embed_tokens.weight" in where,
        own_lm_head="lm_head.weight" in where,
    )
