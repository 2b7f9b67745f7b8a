"""The reference drafter against Transformers' own Qwen3 layers and against hand-made sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import load_target, tiny_drafter, tiny_target
from reference.drafter import ReferenceDrafter
from transformers import DynamicCache, Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

torch.set_num_threads(1)
HISTORY = [7, 40, 200, 13, 99, 5, 61, 180, 22, 34]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "llama", layers=4)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Any:
    return load_target(target_dir)


@pytest.fixture
def make(tmp_path: Path, target_dir: Path, target: Any) -> Any:
    def build(**options: Any) -> ReferenceDrafter:
        return ReferenceDrafter(tiny_drafter(tmp_path, target_dir, **options), target)

    return build


def qwen3_backbone(drafter: ReferenceDrafter) -> Qwen3Model:
    """Transformers' Qwen3 with the drafter's layers, final norm and embeddings."""
    config = {k: v for k, v in drafter.config.items() if k not in ("architectures", "model_type")}
    model = Qwen3Model(Qwen3Config(**config, attn_implementation="eager")).eval()
    backbone = {k: v for k, v in drafter.weights.items() if k.startswith(("layers.", "norm."))}
    model.load_state_dict(backbone | {"embed_tokens.weight": drafter.embed})
    return model


@torch.no_grad()
def hidden_by_transformers(drafter: ReferenceDrafter, ids: list[int], size: int) -> torch.Tensor:
    """h_1 .. h_G from Transformers' layers, the injected K/V put into its cache."""
    model = qwen3_backbone(drafter)
    start = len(ids) - 1
    context = drafter.context(ids[:start])[None]
    cos, sin = model.rotary_emb(context, torch.arange(start)[None])
    cache = DynamicCache()
    for i, layer in enumerate(model.layers):
        attention, shape = layer.self_attn, (1, start, -1, drafter.config["head_dim"])
        keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
        values = attention.v_proj(context).view(shape).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
        cache.update(keys, values, i)
    block = [ids[-1]] + [drafter.config["mask_token_id"]] * (size - 1)
    output = model(
        input_ids=torch.tensor([block]),
        position_ids=torch.arange(start, start + size)[None],
        attention_mask={"full_attention": torch.zeros(1, 1, size, start + size)},
        past_key_values=cache,
    )
    return output.last_hidden_state[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("length", [2, 10, 120])
@pytest.mark.parametrize("ids", [(-1,), (0, 2), (-1, 0, 1, 2)])
def test_backbone_equals_transformers_layers(make: Any, length: int, ids: tuple[int, ...]) -> None:
    drafter = make(target_layer_ids=ids, layers=3, attention_bias=len(ids) > 1)
    history = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = hidden_by_transformers(drafter, history, 4)
    assert torch.allclose(drafter.block_hidden(history, 4), expected, atol=3e-5)


def test_layer_minus_one_is_the_embedding_and_layer_i_its_output(make: Any, target: Any) -> None:
    drafter = make(target_layer_ids=(-1, 1), layers=1)
    seen: list[torch.Tensor] = []
    hook = target.model.layers[1].register_forward_hook(lambda m, i, o: seen.append(o))
    context = drafter.context(HISTORY)
    hook.remove()
    output = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    embedded = target.model.embed_tokens.weight[HISTORY]
    feature = torch.cat([embedded, output.reshape(len(HISTORY), -1)], dim=-1)
    projected = feature @ drafter.weights["fc.weight"].T
    scale = torch.rsqrt((projected**2).mean(-1, keepdim=True) + drafter.config["rms_norm_eps"])
    expected = projected * scale * drafter.weights["hidden_norm.weight"]
    assert torch.allclose(context, expected, atol=1e-5)


def test_context_of_a_position_never_changes(make: Any) -> None:
    drafter = make()
    assert torch.allclose(drafter.context(HISTORY)[:6], drafter.context(HISTORY[:6]), atol=1e-5)


def test_context_is_strictly_before_the_anchor(make: Any, target: Any) -> None:
    """The target is never run on the anchor: its last known token only enters the block."""
    drafter = make()
    lengths: list[int] = []
    hook = target.register_forward_pre_hook(
        lambda m, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    drafter.draft(HISTORY)
    hook.remove()
    assert lengths == [len(HISTORY) - 1]


def test_block_is_bidirectional(make: Any) -> None:
    """Slot 1 sees the masks after it: a shorter block has another h_1."""
    drafter = make()
    long, short = drafter.block_hidden(HISTORY, 4)[0], drafter.block_hidden(HISTORY, 2)[0]
    assert (long - short).abs().max() > 1e-2


def test_block_of_one_and_empty_context_work(make: Any) -> None:
    block = make().draft([5], block_size=1)
    assert len(block.tokens) == 1 and block.logits.shape == (1, 256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vanilla_bias_depends_on_the_previous_token_alone(make: Any, dtype: str) -> None:
    drafter = make(head="vanilla", dtype=dtype)
    block = drafter.draft(HISTORY)
    w1 = drafter.weights["markov_head.markov_w1.weight"]
    w2 = drafter.weights["markov_head.markov_w2.weight"]
    previous = [HISTORY[-1]] + block.tokens[:-1]
    assert torch.allclose(block.logits - block.base_logits, w1[previous] @ w2.T, atol=1e-4)
    assert block.tokens == block.logits.argmax(-1).tolist()
    assert torch.allclose(block.base_logits, block.hidden @ drafter.lm_head.T, atol=1e-4)


def numpy_bias(drafter: ReferenceDrafter, previous: list[int], hidden: np.ndarray) -> np.ndarray:
    """bias of every slot of a gated or rnn head, in float64, by the formulas."""
    parts = {k: v.double().numpy() for k, v in drafter.weights.items() if "markov_head" in k}
    w1, w2 = (parts[f"markov_head.markov_{w}.weight"] for w in ("w1", "w2"))
    rank, rows = w1.shape[1], []
    state = np.zeros(rank)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    for token, h in zip(previous, hidden):
        e = w1[token]
        if drafter.config["markov_head_type"] == "gated":
            weight = parts["markov_head.gate_proj.weight"]
            z = weight[:, : len(h)] @ h + weight[:, len(h) :] @ e
            rows.append(w2 @ (sigmoid(z + parts["markov_head.gate_proj.bias"]) * e))
            continue
        weight, bias = (parts[f"markov_head.joint_proj.{p}"] for p in ("weight", "bias"))
        z = weight[:, :rank] @ state + weight[:, rank : 2 * rank] @ e + weight[:, 2 * rank :] @ h
        gate, candidate, out = (z + bias).reshape(3, rank)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        rows.append(w2 @ np.tanh(out))
    return np.array(rows)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_gated_and_rnn_heads_follow_the_formulas(make: Any, head: str) -> None:
    drafter = make(head=head, rank=6, block_size=5)
    block = drafter.draft(HISTORY)
    previous = [HISTORY[-1]] + block.tokens[:-1]
    expected = numpy_bias(drafter, previous, block.hidden.double().numpy())
    got = (block.logits - block.base_logits).double().numpy()
    assert np.abs(got - expected).max() < 1e-4
    assert np.abs(expected).std() > 0.3  # the head matters


def test_rank_zero_has_no_bias(make: Any) -> None:
    block = make(head=None, confidence=None).draft(HISTORY)
    assert torch.equal(block.logits, block.base_logits) and block.conf_logits is None


def test_draws_are_inverse_cdf_at_the_draft_temperature(make: Any) -> None:
    drafter, uniforms = make(head="rnn"), [0.1, 0.95, 0.5, 0.0]
    block = drafter.draft(HISTORY, temperature=2.0, uniforms=uniforms)
    for token, row, u in zip(block.tokens, block.logits, uniforms):
        mass = torch.softmax(row.double() / 2.0, -1).cumsum(-1)
        assert (mass[token - 1] if token else 0.0) <= u < mass[token]
    with pytest.raises(ValueError, match="uniforms"):
        drafter.draft(HISTORY, temperature=2.0)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_confidence_of_a_slot_ignores_its_own_token(make: Any, head: str) -> None:
    """Another x_2 leaves c_1 and c_2 alone and moves c_3."""
    drafter = make(head=head)
    one = drafter.draft(HISTORY, temperature=1.0, uniforms=[0.3, 0.01, 0.5, 0.5])
    two = drafter.draft(HISTORY, temperature=1.0, uniforms=[0.3, 0.99, 0.5, 0.5])
    assert one.tokens[0] == two.tokens[0] and one.tokens[1] != two.tokens[1]
    assert one.conf_logits is not None and two.conf_logits is not None
    change = (one.conf_logits - two.conf_logits).abs()
    assert change[:2].max() == 0 and change[2] > 1e-3


def test_plain_confidence_reads_the_hidden_state_alone(make: Any) -> None:
    drafter = make(confidence="plain")
    block = drafter.draft(HISTORY)
    weight = drafter.weights["confidence_head.proj.weight"][0]
    expected = block.hidden @ weight + drafter.weights["confidence_head.proj.bias"]
    assert torch.allclose(block.conf_logits, expected, atol=1e-5)


def test_own_and_shared_embeddings_and_head(make: Any, target: Any) -> None:
    shared, copied = make(name="a"), make(name="b", own_embed="copy", own_lm_head="copy")
    own = make(name="c", own_embed=True, own_lm_head=True)
    assert torch.equal(shared.lm_head, target.lm_head.weight)
    first, second = shared.draft(HISTORY), copied.draft(HISTORY)
    assert torch.allclose(first.logits, second.logits, atol=1e-5)
    assert not torch.equal(own.embed, shared.embed)
    assert (own.draft(HISTORY).logits - first.logits).abs().max() > 1e-2


def test_bare_names_of_the_markov_matrices_are_read(make: Any) -> None:
    with_suffix, bare = make(name="a"), make(name="b", bare_markov_names=True)
    assert torch.allclose(with_suffix.draft(HISTORY).logits, bare.draft(HISTORY).logits, atol=1e-5)


def test_scaled_rope_is_refused(make: Any, tmp_path: Path, target: Any, target_dir: Path) -> None:
    folder = tiny_drafter(tmp_path, target_dir)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="yarn"):
        ReferenceDrafter(folder, target).draft(HISTORY)
