"""Dimensions from config.json: defaults of absent keys, RoPE in both spellings, windows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dspark_trt.build.config import ConfigError, Rope, TargetDims
from dspark_trt.build.families import FAMILIES, family_of, rope_of, target_dims
from dspark_trt.build.json_file import Fields

CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 1000,
}


def fields(**values: Any) -> Fields:
    return Fields("config.json", values)


def dims(family: str, **values: Any) -> TargetDims:
    config = fields(model_type=family, **(SIZES | values))
    return target_dims(config, family_of(config))


@pytest.mark.parametrize("family", CLASSES)
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    ours, theirs = dims(family), CLASSES[family](**SIZES)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // 32
    assert ours.layer.num_kv_heads == theirs.num_key_value_heads
    assert ours.layer.head_dim == head_dim
    assert ours.layer.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings is False
    assert ours.layer.rope == Rope(theirs.rope_parameters["rope_theta"])
    window = theirs.sliding_window if family == "mistral" else 0
    assert ours.sliding_windows == (window,) * 32


@pytest.mark.parametrize("family", CLASSES)
def test_null_kv_heads_mean_as_many_as_query_heads(family: str) -> None:
    assert dims(family, num_key_value_heads=None).layer.num_kv_heads == 32


def test_every_family_is_found_by_either_name() -> None:
    for architecture, family in FAMILIES.items():
        assert family_of(fields(architectures=[architecture])) is family
        assert family_of(fields(model_type=family.name)) is family


def test_attention_bias_means_what_the_family_says() -> None:
    for family, (qkv, out) in {
        "llama": (True, True),
        "qwen3": (True, True),
        "qwen2": (True, False),
        "mistral": (False, False),
    }.items():
        layer = dims(family, attention_bias=True, mlp_bias=True).layer
        assert (layer.qkv_bias, layer.o_bias, layer.mlp_bias) == (qkv, out, family == "llama")
    assert dims("qwen2").layer.qkv_bias


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({}, Rope(10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            Rope(5e5, llama3=(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            Rope(5e5, llama3=(8.0, 1.0, 4.0, 8192)),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, Rope(10000.0, linear_factor=4.0)),
        ({"rope_theta": 1000000, "rope_parameters": None}, Rope(1e6)),
    ],
)
def test_rope_in_both_spellings(values: dict[str, Any], rope: Rope) -> None:
    assert rope_of(fields(**values)) == rope


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope"])
def test_other_rope_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"rope_type '{kind}' is not supported; supported are"):
        rope_of(fields(rope_scaling={"rope_type": kind, "factor": 2.0}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 0}, "rope_theta must be a number > 0, got 0"),
        ({"rope_theta": "big"}, "rope_theta must be a number > 0"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a number > 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
            "high_freq_factor > low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
    ],
)
def test_rope_faults_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_of(fields(**values))


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"sliding_window": 8, "use_sliding_window": False}, (0, 0, 0, 0)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 8, 8)),
        ({"sliding_window": None, "use_sliding_window": True}, (0, 0, 0, 0)),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family: str, values: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert dims(family, num_hidden_layers=4, **values).sliding_windows == windows


def test_window_of_mistral() -> None:
    assert dims("mistral", num_hidden_layers=2, sliding_window=8).sliding_windows == (8, 8)
    assert dims("mistral", num_hidden_layers=2, sliding_window=None).sliding_windows == (0, 0)


def test_wrong_layer_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_types must be 32 entries out of"):
        dims("qwen2", use_sliding_window=True, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="layer_types must be 32 entries out of"):
        dims("qwen2", use_sliding_window=True, layer_types=["chunked_attention"] * 32)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2.0}),
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope_theta": 3e4, "rope_type": "default"}),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4}, {}),
        ({"rope_type": "linear", "factor": 4.0}, None),
    ],
)
@pytest.mark.parametrize("theta", [{}, {"rope_theta": 1e6}])
def test_of_two_rope_sections_transformers_choice_counts(
    parameters: dict[str, Any], scaling: dict[str, Any] | None, theta: dict[str, float]
) -> None:
    values = {"rope_parameters": parameters, "rope_scaling": scaling, **theta}
    ours = rope_of(fields(**values))
    theirs = LlamaConfig(**SIZES, **json.loads(json.dumps(values))).rope_parameters
    assert ours.theta == theirs["rope_theta"]
    kind = theirs["rope_type"]
    assert ours.linear_factor == (theirs["factor"] if kind == "linear" else 1.0)
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    assert ours.llama3 == (tuple(theirs[k] for k in keys) if kind == "llama3" else None)


@pytest.mark.parametrize("eps", [1e-13, 2.0])
def test_rms_norm_eps_is_bounded(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"rms_norm_eps must be in \[1e-12, 1\], got"):
        dims("llama", rms_norm_eps=eps)
