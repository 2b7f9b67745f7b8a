"""Small random models on disk: targets of Transformers' own classes and DSpark drafters.

Weights are drawn so that mistakes show: every norm weight differs from one, biases are not zero,
layers change the residual stream as much as the embedding does, attention is not uniform, and
logits have a standard deviation of about 4, so that top-2 gaps are far above rounding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_tokenizer import bos_eos_ids, save_tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

LOGIT_STD = 4.0
FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "mistral")  # llama3 = llama + its RoPE scaling
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Drafter sizes, none of them a tiny target's, so that a mix-up fails.
DRAFTER_HEADS, DRAFTER_KV_HEADS, DRAFTER_HEAD_DIM, DRAFTER_INTERMEDIATE = 6, 3, 20, 72
DRAFTER_ROPE_THETA, DRAFTER_EPS = 5000.0, 1e-5


def tiny_target(
    tmp_path: Path,
    family: str,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 256,
    tie: bool = False,
    dtype: str = "float32",
    shard_size: str | None = None,
    legacy_config: bool = False,
    add_bos: bool = False,
    seed: int = 0,
    name: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a random target with tokenizer into a new folder of `tmp_path` and return the folder.

    `family` is one of `FAMILIES`; `overrides` are fields of its configuration class (such as
    `attention_bias=True`, `sliding_window=8`, `eos_token_id=[1, 5]`). `shard_size` ("64KB") splits
    the weights; `legacy_config` writes config.json as Transformers 4 did (`rope_theta`,
    `rope_scaling`, `torch_dtype`).
    """
    bos, eos = bos_eos_ids(vocab)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tie,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    config = family_config(family, sizes | overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    randomize_target(model, seed=seed)
    folder = tmp_path / (name or f"{family}-v{vocab}-l{layers}-s{seed}")
    save_target(model, folder, dtype=dtype, shard_size=shard_size, add_bos=add_bos)
    if legacy_config:
        _rewrite_config_as_v4(folder)
    return folder


def family_config(family: str, sizes: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a family; `sizes` win over the family's own values here."""
    if family == "llama":
        return LlamaConfig(**({"rope_parameters": rope(10000.0)} | sizes))
    if family == "llama3":
        scaled = rope(500000.0, "llama3") | {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return LlamaConfig(**({"rope_parameters": scaled} | sizes))
    if family == "qwen2":
        return Qwen2Config(**({"rope_parameters": rope(100000.0)} | sizes))
    if family == "qwen3":
        return Qwen3Config(**({"rope_parameters": rope(1e6), "head_dim": 24} | sizes))
    if family == "mistral":
        return MistralConfig(**({"rope_parameters": rope(20000.0), "sliding_window": 16} | sizes))
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")


def rope(theta: float, rope_type: str = "default") -> dict[str, Any]:
    """`rope_parameters` of a Transformers configuration."""
    return {"rope_theta": theta, "rope_type": rope_type}


def randomize_target(model: PreTrainedModel, *, seed: int) -> None:
    """Draw every parameter of `model` in place, at scales that make each of them matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_draw(name, tuple(parameter.shape), generator))


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random float32 values for the parameter `name`, scaled by its role."""
    if name.endswith("norm.weight"):
        return 0.5 + torch.rand(shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * values
    fan_in = shape[-1]
    if "embed_tokens" in name or "lm_head" in name:  # hidden rows reach lm_head with RMS of about 1
        return LOGIT_STD / math.sqrt(fan_in) * values
    gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.2
    return gain / math.sqrt(fan_in) * values


def save_target(
    model: PreTrainedModel,
    folder: Path,
    *,
    dtype: str = "float32",
    shard_size: str | None = None,
    add_bos: bool = False,
) -> None:
    """Save model, generation config and a tokenizer of the model's vocabulary into `folder`."""
    model.to(DTYPES[dtype]).save_pretrained(folder, max_shard_size=shard_size or "1GB")
    save_tokenizer(folder, model.config.vocab_size, add_bos=add_bos)


def load_target(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    """The Transformers model of a target folder: the oracle, in `dtype`, eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="eager"
    )
    return model.eval()


def _rewrite_config_as_v4(folder: Path) -> None:
    """Rewrite config.json in place with the field names of Transformers 4."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def tiny_drafter(
    tmp_path: Path,
    target_dir: Path,
    *,
    head: str | None = "vanilla",
    rank: int = 8,
    block_size: int = 4,
    layers: int = 2,
    target_layer_ids: tuple[int, ...] | None = None,
    confidence: str | None = "markov",
    own_embed: bool | str = False,
    own_lm_head: bool | str = False,
    bare_markov_names: bool = False,
    dtype: str = "float32",
    seed: int = 1,
    name: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a random DSpark drafter for `target_dir` into a new folder of `tmp_path`; return it.

    `head`: vanilla, gated, rnn, or None (markov_rank 0). `confidence`: "markov" (on [h ; W1[x]]),
    "plain" (on h) or None; with `head=None` "markov" becomes "plain". `own_embed`, `own_lm_head`:
    False (absent from the file: the target's), True (other random weights) or "copy" (the
    target's weights, as published files have them). `target_layer_ids` defaults to -1 and up to two
    early layers. `bare_markov_names` drops `.weight` from markov_w1 and markov_w2. `overrides`
    replace fields of config.json.
    """
    target = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    config = drafter_config(
        target,
        head=head,
        rank=rank,
        block_size=block_size,
        layers=layers,
        target_layer_ids=target_layer_ids,
        confidence="plain" if confidence == "markov" and head is None else confidence,
        dtype=dtype,
    )
    config |= overrides
    weights = random_drafter_weights(config, seed=seed)
    for key, own in (("embed_tokens.weight", own_embed), ("lm_head.weight", own_lm_head)):
        if own == "copy":
            weights[key] = target_tensor(target_dir, key)
        elif not own:
            del weights[key]
    if bare_markov_names:
        weights = {_bare(key): value for key, value in weights.items()}
    folder = tmp_path / (name or f"drafter-{head}-b{block_size}-{confidence}-s{seed}")
    save_drafter(folder, config, weights, dtype=dtype)
    return folder


def drafter_config(
    target: dict[str, Any],
    *,
    head: str | None,
    rank: int,
    block_size: int,
    layers: int,
    target_layer_ids: tuple[int, ...] | None,
    confidence: str | None,
    dtype: str,
) -> dict[str, Any]:
    """config.json of a drafter, in DeepSpec's format, for the target whose config is given."""
    depth = target["num_hidden_layers"]
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "intermediate_size": DRAFTER_INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": DRAFTER_HEADS,
        "num_key_value_heads": DRAFTER_KV_HEADS,
        "head_dim": DRAFTER_HEAD_DIM,
        "rms_norm_eps": DRAFTER_EPS,
        "rope_theta": DRAFTER_ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": target["max_position_embeddings"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * layers,
        "torch_dtype": dtype,
        "bos_token_id": target["bos_token_id"],
        "eos_token_id": target["eos_token_id"],
        "block_size": block_size,
        "target_layer_ids": list(target_layer_ids or range(-1, min(depth - 1, 2))),
        "mask_token_id": target["vocab_size"] - 1,
        "num_anchors": 512,
        "num_target_layers": depth,
        "markov_rank": rank if head else 0,
        "enable_confidence_head": confidence is not None,
    }
    if head:
        config["markov_head_type"] = head
    if confidence:
        config["confidence_head_with_markov"] = confidence == "markov"
    return config


def drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of this config can have."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    vocab, rank = config["vocab_size"], config["markov_rank"]
    width, dim = config["head_dim"] * config["num_attention_heads"], config["head_dim"]
    kv_width = dim * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "norm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, hidden * len(config["target_layer_ids"])),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{part}.weight": shape for part, shape in layer.items()}
    if config["attention_bias"]:
        for i in range(config["num_hidden_layers"]):
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                key = f"layers.{i}.self_attn.{part}"
                shapes[f"{key}.bias"] = shapes[f"{key}.weight"][:1]
    return shapes | _head_shapes(config, hidden, vocab, rank)


def _head_shapes(
    config: dict[str, Any], hidden: int, vocab: int, rank: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (vocab, rank)
    if rank and config["markov_head_type"] == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if rank and config["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config["enable_confidence_head"]:
        extra = rank if config["confidence_head_with_markov"] else 0
        shapes["confidence_head.proj.weight"] = (1, hidden + extra)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def random_drafter_weights(config: dict[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights for `drafter_shapes(config)`; the head's bias has a spread of 2."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(drafter_shapes(config).items()):
        values = _draw(name, shape, generator)
        if name.endswith("markov_w1.weight"):
            values = values / values.std()
        elif name.endswith("markov_w2.weight"):
            values = 2.0 / math.sqrt(shape[1]) * values / values.std()
        weights[name] = values
    return weights


def save_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], *, dtype: str
) -> None:
    """Write config.json and model.safetensors into the new folder `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {key: value.to(DTYPES[dtype]).contiguous() for key, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def target_tensor(target_dir: Path, name: str) -> torch.Tensor:
    """The float32 embedding or lm_head of a target folder, by canonical name."""
    model = load_target(target_dir)
    module = model.get_input_embeddings() if "embed" in name else model.get_output_embeddings()
    return module.weight.detach().clone()


def _bare(name: str) -> str:
    return name.removesuffix(".weight") if "markov_head.markov_w" in name else name
