"""A target that is nearly a Markov chain, and a drafter whose head knows that chain roughly.

Random drafters are never accepted, so they leave half of the verification untested. Here drafts
are accepted often but not always, at temperature 0 and 1 alike.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from factories import (
    drafter_config,
    family_config,
    load_target,
    random_drafter_weights,
    randomize_target,
    save_drafter,
    save_target,
)
from tiny_tokenizer import bos_eos_ids
from transformers import AutoModelForCausalLM, PreTrainedModel

ATTENTION_SCALE = 0.08  # how far the target leaves the chain
HEAD_NOISE = 0.2  # error of the head's copy, in standard deviations of the chain's logits
BASE_SCALE = 0.1  # size of the drafter's own (meaningless) logits beside the chain's


def markov_pair(
    tmp_path: Path,
    vocab: int = 64,
    *,
    family: str = "llama",
    head: str = "vanilla",
    block_size: int = 4,
    layers: int = 2,
    hidden: int = 64,
    dtype: str = "float32",
    noise: float = HEAD_NOISE,
    seed: int = 13,
) -> tuple[Path, Path]:
    """Write a target and a drafter that is accepted often; return (target_dir, drafter_dir).

    The target: `o_proj` and `down_proj` are scaled down, so its last hidden state is close to the
    embedding of the last token and `logits = lm_head(norm(.))` are close to a random `[V, V]` chain
    `C[last, next]`; attention still moves them, so that greedy text is no short cycle. BOS and EOS
    have zero rows in `lm_head` (logit 0, far below the maximum).

    The drafter: `C` is read off the target one token at a time, noise of `noise` standard
    deviations is added and the sum is factored as `W1 W2^T` of full rank `min(V, 512)`; base logits
    are scaled down through `norm.weight`. `head="gated"` opens its gates (weight 0, bias 20).
    A draft is accepted, given that those before it were, in 35 to 85 % of the cases at temperature
    0 and at 1 (the default seed: 66 % and 63 %); more noise lowers that.
    """
    model = _chain_like_target(family, vocab, layers=layers, hidden=hidden, seed=seed)
    target_dir = tmp_path / f"markov-{family}-target"
    save_target(model, target_dir, dtype=dtype)
    target = load_target(target_dir)
    rank = min(vocab, 512)
    config = drafter_config(
        json.loads((target_dir / "config.json").read_text(encoding="utf-8")),
        head=head,
        rank=rank,
        block_size=block_size,
        layers=layers,
        target_layer_ids=None,
        confidence="markov",
        dtype=dtype,
    )
    weights = random_drafter_weights(config, seed=seed + 1)
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    weights["norm.weight"] *= BASE_SCALE
    w1, w2 = _factors(chain_logits(target), rank, noise=noise, seed=seed + 2)
    weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"] = w1, w2
    if head == "gated":
        weights["markov_head.gate_proj.weight"].zero_()
        weights["markov_head.gate_proj.bias"].fill_(20.0)
    drafter_dir = tmp_path / f"markov-{family}-drafter"
    save_drafter(drafter_dir, config, weights, dtype=dtype)
    return target_dir, drafter_dir


def _chain_like_target(
    family: str, vocab: int, *, layers: int, hidden: int, seed: int
) -> PreTrainedModel:
    bos, eos = bos_eos_ids(vocab)
    config = family_config(
        family,
        {
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden // 2,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": vocab,
            "tie_word_embeddings": False,
            "max_position_embeddings": 512,
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
    )
    model = AutoModelForCausalLM.from_config(config).float()
    randomize_target(model, seed=seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= ATTENTION_SCALE
            layer.mlp.down_proj.weight *= ATTENTION_SCALE
        model.lm_head.weight[[bos, eos]] = 0.0
    return model


@torch.no_grad()
def chain_logits(target: PreTrainedModel) -> torch.Tensor:
    """Logits of the next token after each single token: [V, V]."""
    every_token = torch.arange(target.config.vocab_size)[:, None]
    return target(input_ids=every_token).logits[:, 0].float()


def _factors(
    chain: torch.Tensor, rank: int, *, noise: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """W1 [V, r], W2 [V, r] with W1 W2^T = chain + noise."""
    generator = torch.Generator().manual_seed(seed)
    copy = chain + noise * chain.std() * torch.randn(chain.shape, generator=generator)
    u, s, vt = torch.linalg.svd(copy)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).contiguous(), (vt[:rank].T * root).contiguous()
