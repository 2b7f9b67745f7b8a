"""Small GGUF files: tokenizers trained here, and tiny targets rewritten as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, CONTROL, USER_DEFINED, BYTE, UNKNOWN = 1, 3, 4, 6, 2
CORPUS = (
    "The river runs past the old mill, and under the stone bridge it's quiet.",
    "def fold(xs):\n    return [x ** 2 for x in xs if x > 10]\n\n\nprint(fold([1, 22, 333]))",
    "She'll say they've counted 1234567 boats; we're sure that I'd agree, don't you?",
    "Der Zug fährt um acht Uhr ab. Le café était fermé à midi. 東京は雨です。 Привет, мир!",
    '{"key": [true, false, null], "n": -1.5e10}\t\t<tag attr=\'x\'/>   \n  indented\n',
)
TEXTS = (
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n  \n",
    "\t\tx",
    "hello",
    " hello world",
    "hello   world  ",
    "HELLO'S we'LL I'd don't they've you're it's 'quoted'",
    "12345 1 22 333 4444 3.14159 1,000,000 x86_64 a1b2c3",
    "  12 x  3",
    "def f(x):\n    if x >= 10:\n        return x**2  # squared\n\n\nprint(f(12))\n",
    "naïve café déjà vu – “quotes” … ½ ² ①",
    "Здравствуй, мир! Γειά σου κόσμε",
    "東京は雨です。你好，世界！안녕하세요 สวัสดี مرحبا",
    "🙂🚀👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b\ufeff zero",
    "a\u00a0b\u2003c\u3000d\r\ne\rf\x0bg\x00h\x7f",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_start|>y <|endoftext|> <think> z</think><|im_end|>",
    "<s>text</s> <unk> <0x41> ▁under ▁▁",
    "https://example.org/a?b=c&d=e#f user@mail.com $x^2 \\alpha {}[]()",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)


def byte_level_metadata(
    pre: str, *, vocab: int = 420, specials: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>")
) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a byte-level BPE trained on `CORPUS`: specials, tokens, <think>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = (*specials, "<|im_end|>")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda t: model["vocab"][t]) + ["<think>"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    kinds = [CONTROL] * len(specials) + [NORMAL] * (len(tokens) - len(specials))
    kinds[-1] = USER_DEFINED
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": len(specials) - 1,
        "unknown_token_id": 0,
        "padding_token_id": len(specials) - 1,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """`tokenizer.ggml.*` of a SentencePiece BPE with byte fallback, scores in order of merging."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=lambda t: model["vocab"][t])
    single = [p for p in pieces if len(p) == 1]
    longer = [p for p in pieces if len(p) > 1]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *longer, *single, "<|im_end|>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(longer))]
    scores += [-1e6] * len(single) + [0.0]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    kinds += [NORMAL] * (len(longer) + len(single)) + [CONTROL]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "eot_token_id": len(tokens) - 1,
    }


def write_gguf(
    path: Path,
    architecture: str,
    *,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: dict[str, Any],
    extra: dict[str, Any] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF file. `config`: keys below `architecture`; `extra`: whole keys, which win."""
    writer = GGUFWriter(path, architecture)
    pairs: dict[str, Any] = {f"{architecture}.{key}": value for key, value in config.items()}
    pairs |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    pairs |= extra or {}
    for key, value in pairs.items():
        _add(writer, key, value)
    for name, values in tensors.items():
        kind = (kinds or {}).get(name, GGMLQuantizationType.F32)
        data = quantize(np.ascontiguousarray(values, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as GGUF's llama stores them: row i and row i + D/2 of a head side by side."""
    rows = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(values.shape)


def gguf_target(
    path: Path,
    architecture: str,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    more_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A model of Transformers (its config.json, canonical weights) written as a GGUF file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, values in weights.items():
        stem, leaf = name.rsplit(".", 1)
        layer, _, inner = stem.removeprefix("layers.").partition(".")
        stored = f"blk.{layer}.{NAMES[inner]}" if stem.startswith("layers.") else NAMES[stem]
        kind = stored.rsplit(".", 1)[-1]
        if architecture == "llama" and kind in heads:
            values = interleave(values, heads[kind])
        tensors[f"{stored}.{leaf}"] = values
    if tokenizer is None:
        tokenizer = byte_level_metadata("qwen2", vocab=config["vocab_size"])
    return write_gguf(
        path,
        architecture,
        config={
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "rope.freq_base": config["rope_parameters"]["rope_theta"],
            "vocab_size": config["vocab_size"],
        },
        tensors=tensors | (more_tensors or {}),
        tokenizer=tokenizer,
        extra={"general.name": "tiny"} | (extra or {}),
    )
