"""The supported model families: one table of differences, and dimensions from a config.json.

A key that config.json leaves out has the default of the family's configuration class in
Transformers, since that is what the checkpoint's authors ran.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_trt.build.config import ConfigError, LayerDims, Rope, TargetDims, require
from dspark_trt.build.json_file import Fields

DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one family apart; the fields without comment are defaults of absent keys."""

    name: str
    architecture: str
    kv_heads: int | None  # None: as many as query heads
    max_position: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qk_norm: bool = False  # always, whatever the config says
    qkv_bias: bool = False  # always, whatever the config says
    attention_bias_key: bool = False  # the config's attention_bias covers q, k, v and o
    mlp_bias_key: bool = False  # the config has mlp_bias
    windows: str = "none"  # none | all (sliding_window) | layers (use_sliding_window, layer_types)
    sliding_window: int = 4096


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            kv_heads=None,
            max_position=2048,
            attention_bias_key=True,
            mlp_bias_key=True,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            kv_heads=8,
            max_position=131072,
            windows="all",
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            kv_heads=32,
            max_position=32768,
            qkv_bias=True,
            windows="layers",
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            kv_heads=32,
            max_position=32768,
            head_dim=128,
            qk_norm=True,
            attention_bias_key=True,
            windows="layers",
        ),
    )
}
QWEN3 = FAMILIES["Qwen3ForCausalLM"]


def family_of(config: Fields) -> Family:
    """The family named by `architectures`, or by `model_type` where that is absent."""
    supported = f"supported architectures are {', '.join(FAMILIES)}"
    listed = config.get("architectures")
    if listed:
        first = listed[0] if isinstance(listed, list) else listed
        if not isinstance(first, str) or first not in FAMILIES:
            raise ConfigError(
                f"{config.where}: architecture {first!r} is not supported; {supported}"
            )
        return FAMILIES[first]
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if family.name == model_type:
            return family
    raise ConfigError(
        f"{config.where}: architectures is missing and model_type {model_type!r} is not supported; "
        f"{supported}"
    )


def rope_of(config: Fields) -> Rope:
    """Rotary parameters; as in Transformers, `rope_scaling` replaces `rope_parameters` as a whole.

    What the section that counts lacks comes from the config itself, not from the other section.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.section(name)
    theta = scaling.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    for fields in (config, scaling):
        fields.expect("partial_rotary_factor", 1.0, 1)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    nested = [key for key, value in scaling.values.items() if isinstance(value, dict)]
    require(
        not nested,
        f"{scaling.where}: RoPE parameters by layer type ({', '.join(nested)}) are not supported",
    )
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, linear_factor=scaling.number("factor"))
    if kind == "llama3":
        original = scaling if scaling.has("original_max_position_embeddings") else config
        return Rope(
            theta,
            llama3=(
                scaling.number("factor"),
                scaling.number("low_freq_factor"),
                scaling.number("high_freq_factor"),
                original.integer("original_max_position_embeddings"),
            ),
        )
    raise ConfigError(
        f"{scaling.where}: rope_type {kind!r} is not supported; supported are "
        f"{', '.join(ROPE_TYPES)}"
    )


def layer_dims(config: Fields, family: Family) -> LayerDims:
    """The dimensions of one decoder layer."""
    config.expect("hidden_act", "silu")
    require(
        not config.has("quantization_config"),
        f"{config.where}: quantization_config is set: quantised checkpoints of this format are not "
        "supported, give the original one (dspark build --quantize makes it small)",
    )
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = family.head_dim
    if head_dim is None and not config.has("head_dim"):
        require(
            hidden % heads == 0,
            f"{config.where}: hidden_size ({hidden}) must be a multiple of num_attention_heads "
            f"({heads}) where head_dim is absent",
        )
    attention_bias = family.attention_bias_key and config.boolean("attention_bias", False)
    return LayerDims(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", _kv_heads(config, family, heads)),
        head_dim=config.integer("head_dim", head_dim or hidden // heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_of(config),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias_key and config.boolean("mlp_bias", False),
    )


def _kv_heads(config: Fields, family: Family, heads: int) -> int:
    """Key/value heads of a config without the key, or with null (as many as query heads)."""
    explicit_null = "num_key_value_heads" in config.values
    return heads if explicit_null or family.kv_heads is None else family.kv_heads


def sliding_windows(config: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Window of each layer in tokens, the query's own position included; 0 = full attention."""
    full = (0,) * layers
    if family.windows == "none":
        return full
    if family.windows == "all":
        if "sliding_window" in config.values and not config.has("sliding_window"):
            return full
        return (config.integer("sliding_window", family.sliding_window),) * layers
    if not config.boolean("use_sliding_window", False):
        return full
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return full
    window = config.integer("sliding_window", family.sliding_window)
    types = config.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, low=0)
        return tuple(window if i >= first else 0 for i in range(layers))
    known = {"full_attention": 0, "sliding_attention": window}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not set(map(str, types)) <= set(known)
    ):
        raise config.fail("layer_types", f"{layers} entries out of {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def target_dims(
    config: Fields, family: Family, *, eos_token_ids: tuple[int, ...] = ()
) -> TargetDims:
    """The dimensions of a target model from its config.json."""
    layers = config.integer("num_hidden_layers", high=4096)
    return TargetDims(
        family=family.name,
        layer=layer_dims(config, family),
        num_layers=layers,
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings", family.max_position, high=1 << 31),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        sliding_windows=sliding_windows(config, family, layers),
        eos_token_ids=eos_token_ids,
    )
