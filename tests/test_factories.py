"""The factories give models that Transformers loads and whose tokenizers work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from factories import FAMILIES, drafter_shapes, load_target, tiny_drafter, tiny_target
from safetensors.torch import load_file
from tiny_tokenizer import EOS, build_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_target_loads_and_has_spread_logits(tmp_path: Path, family: str) -> None:
    folder = tiny_target(tmp_path, family)
    model = load_target(folder)
    ids = torch.randint(4, 256, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids).logits[0]
    top = logits.topk(2).values
    assert 2.0 < logits.std() < 8.0
    assert ((top[:, 0] - top[:, 1]) > 1e-3).float().mean() > 0.97
    assert len(set(logits.argmax(-1).tolist())) > 20  # depends on what came before
    for name, value in model.named_parameters():
        assert value.std() > 0.05, name


@pytest.mark.parametrize("family", FAMILIES)
def test_distant_tokens_change_the_logits(tmp_path: Path, family: str) -> None:
    """Attention matters: another first token moves the last row (mistral: inside the window)."""
    model = load_target(tiny_target(tmp_path, family))
    ids = torch.arange(10, 22)[None]
    other = ids.clone()
    other[0, 0] = 99
    with torch.no_grad():
        change = (model(ids).logits[0, -1] - model(other).logits[0, -1]).abs().max()
    assert change > 0.05


def test_tied_sharded_bf16_legacy_options(tmp_path: Path) -> None:
    folder = tiny_target(
        tmp_path, "llama3", tie=True, dtype="bfloat16", shard_size="40KB", legacy_config=True
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["rope_scaling"]["rope_type"] == "llama3"
    names: set[str] = set()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        tensors = load_file(shard)
        names |= set(tensors)
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert "lm_head.weight" not in names
    model = load_target(folder)
    assert model.config.rope_parameters["factor"] == 4.0
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_qwen2_has_biases_and_llama_can(tmp_path: Path) -> None:
    qwen2 = load_target(tiny_target(tmp_path, "qwen2"))
    assert qwen2.model.layers[0].self_attn.k_proj.bias.std() > 0.05
    llama = load_target(tiny_target(tmp_path, "llama", attention_bias=True, mlp_bias=True))
    assert llama.model.layers[1].mlp.down_proj.bias.std() > 0.05
    assert llama.model.layers[1].self_attn.o_proj.bias.std() > 0.05


@pytest.mark.parametrize("vocab", [3, 4, 64, 256, 300, 1000])
def test_tokenizer_has_exactly_the_vocabulary_asked_for(vocab: int) -> None:
    tokenizer = build_tokenizer(vocab)
    assert tokenizer.get_vocab_size() == vocab
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))
    text = "Grüße, 東京 🙂\tend" if vocab >= 300 else "the rain" if vocab >= 64 else "e"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(EOS) in (0, 1)


def test_saved_tokenizer_works_in_transformers(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama", vocab=320, add_bos=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The river runs."
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|bos|><|user|>Hi.<|eos|><|assistant|>"


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("confidence", ["markov", "plain", None])
def test_drafter_file_holds_what_its_config_says(
    tmp_path: Path, head: str | None, confidence: str | None
) -> None:
    target = tiny_target(tmp_path, "llama")
    folder = tiny_drafter(tmp_path, target, head=head, confidence=confidence)
    config = json.loads((folder / "config.json").read_text())
    shapes = drafter_shapes(config)
    tensors = load_file(folder / "model.safetensors")
    held = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert held == {k: v for k, v in shapes.items() if k[:7] not in ("embed_t", "lm_head")}
    assert config["target_layer_ids"] == [-1, 0]
    assert config["num_attention_heads"] * config["head_dim"] != config["hidden_size"]


def test_drafter_options(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "qwen3", layers=4)
    folder = tiny_drafter(
        tmp_path, target, own_embed="copy", own_lm_head=True, bare_markov_names=True,
        target_layer_ids=(0, 2), dtype="float16", mask_token_id=7,
    )  # fmt: skip
    model = load_target(target)
    tensors = load_file(folder / "model.safetensors")
    embed, lm_head = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    assert "markov_head.markov_w1" in tensors
    assert tensors["fc.weight"].shape == (64, 128)
    assert embed.dtype == torch.float16
    assert torch.equal(embed, model.model.embed_tokens.weight.half())
    assert not torch.equal(lm_head, model.lm_head.weight.half())
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == 7
