"""A target from a Hugging Face folder: config.json, safetensors (single or sharded), tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspark_trt.build.families import family_of, target_dims
from dspark_trt.build.json_file import Fields, read_object
from dspark_trt.build.safetensors_file import (
    SafetensorsWeights,
    canonical_names,
    main_dtype,
    open_shards,
    require_floats,
)
from dspark_trt.build.source import TargetCheckpoint, naming
from dspark_trt.build.tokenizer_files import (
    check_vocabulary,
    eos_ids,
    read_generation_config,
    read_tokenizer,
)


def open_huggingface(folder: Path, tokenizer_folder: Path | None = None) -> TargetCheckpoint:
    """Open a folder as `save_pretrained` writes it; reads headers and configs, no weights."""
    path = folder / "config.json"
    config = Fields(str(path), read_object(path))
    generation = read_generation_config(folder)
    with naming(path):
        dims = target_dims(config, family_of(config))
    ends = eos_ids(
        Fields(str(folder / "generation_config.json"), generation),
        config,
        vocab_size=dims.vocab_size,
    )
    tokenizer = read_tokenizer(tokenizer_folder or folder, ends)
    check_vocabulary(tokenizer, dims.vocab_size, where=tokenizer_folder or folder)
    dims = replace(dims, eos_token_ids=_eos(tokenizer.config["eos_token_ids"]))
    files = open_shards(folder)
    require_floats(files)
    return TargetCheckpoint(
        source_format="huggingface",
        dims=dims,
        weights=SafetensorsWeights(folder, files, canonical_names(files)),
        weight_dtype=main_dtype(files),
        tokenizer=tokenizer,
        generation_config=generation,
        files=(path, *(file.path for file in files)),
    )


def _eos(value: object) -> tuple[int, ...]:
    assert isinstance(value, list)
    return tuple(value)
