"""DSpark drafters: every head and dtype loads, everything inconsistent is refused by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_edits import copied, edit_json, edit_tensors
from factories import tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

from dspark_trt.build.checkpoint import (
    CheckpointError,
    open_drafter,
    open_target,
    share_with_target,
)
from dspark_trt.build.config import ConfigError, TargetDims
from dspark_trt.build.drafter_checkpoint import drafter_dims, write_compact
from dspark_trt.build.tensor_names import drafter_shapes

HEADS = ("vanilla", "gated", "rnn", None)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("t"), "llama", layers=4)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> TargetDims:
    return open_target(target_dir).dims


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """A vanilla drafter with the Markov feature in its confidence head."""
    return tiny_drafter(tmp_path_factory.mktemp("d"), target_dir)


def canonical(name: str) -> str:
    return f"{name}.weight" if name.endswith(("markov_w1", "markov_w2")) else name


@pytest.mark.parametrize("confidence", ["markov", "plain", None])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_loads(
    tmp_path: Path, target_dir: Path, target: TargetDims, head: str | None, confidence: str | None
) -> None:
    own = confidence != "plain"
    folder = tiny_drafter(
        tmp_path,
        target_dir,
        head=head,
        confidence=confidence,
        own_embed=own,
        own_lm_head=own,
        bare_markov_names=own,
        dtype="bfloat16" if own else "float16",
    )
    drafter = open_drafter(folder, target)
    dims = drafter.dims
    assert dims.markov_rank == (8 if head else 0)
    assert dims.markov_head_type == (head or "vanilla")
    assert dims.confidence_head is (confidence is not None)
    assert dims.confidence_head_with_markov is (confidence == "markov" and head is not None)
    assert dims.own_embed_tokens is dims.own_lm_head is own
    assert (dims.block_size, dims.target_layer_ids, dims.mask_token_id) == (4, (-1, 0, 1), 255)
    assert (dims.num_layers, dims.layer.head_dim, dims.layer.qk_norm) == (2, 20, True)
    assert (dims.layer.rope.theta, dims.layer.rms_norm_eps) == (5000.0, 1e-5)
    assert drafter.weight_dtype == ("bfloat16" if own else "float16")
    stored = load_file(folder / "model.safetensors")
    assert drafter.weights.names() == sorted(map(canonical, stored))
    for name, values in stored.items():
        read = drafter.weights.tensor(canonical(name))
        np.testing.assert_array_equal(read, values.float().numpy(), err_msg=name)


PUBLISHED = {  # hidden, intermediate, heads, target layers, target_layer_ids
    "4b": (2560, 9728, 32, 36, [1, 9, 17, 25, 33]),
    "8b": (4096, 12288, 32, 36, [1, 9, 17, 25, 33]),
    "14b": (5120, 17408, 40, 40, [1, 10, 19, 28, 37]),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_config_of_the_shape_deepspec_saves(size: str) -> None:
    """A Qwen3 config, deep-copied from the target's, with the method's fields set on it."""
    hidden, intermediate, heads, layers, ids = PUBLISHED[size]
    config: dict[str, object] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 7,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": ["full_attention"] * 5,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 151669,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_anchors": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": ids,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    dims = drafter_dims(Path("config.json"), config)
    assert (dims.block_size, dims.num_layers, dims.markov_rank) == (7, 5, 256)
    assert dims.target_layer_ids == tuple(ids)
    shapes = drafter_shapes(dims)
    assert shapes["fc.weight"] == (hidden, 5 * hidden)
    assert shapes["layers.4.self_attn.q_proj.weight"] == (heads * 128, hidden)
    assert shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, hidden + 256)


def test_compact_file_keeps_every_weight_within_half_a_step(
    plain: Path, target: TargetDims, tmp_path: Path
) -> None:
    folder = copied(plain, tmp_path)
    before = open_drafter(plain, target)
    tensors = {name: before.weights.tensor(name) for name in before.weights.names()}
    tensors["layers.0.mlp.up_proj.weight"][3] = 0.0
    with np.errstate(all="raise", under="ignore"):
        write_compact(folder / "model.safetensors", tensors)
    after = open_drafter(folder, target)
    assert after.weight_dtype == "int8"
    assert after.dims == before.dims
    assert after.weights.names() == before.weights.names()
    for name, values in tensors.items():
        read = after.weights.tensor(name)
        assert read.dtype == np.float32 and read.shape == after.weights.shape(name)
        step = np.abs(values).max(axis=-1, keepdims=True) / 127 if values.ndim == 2 else 0.0
        assert np.all(np.abs(read - values) <= step / 2 + 1e-6), name
    assert not after.weights.tensor("layers.0.mlp.up_proj.weight")[3].any()


def test_compact_file_without_a_scale_is_refused(
    plain: Path, target: TargetDims, tmp_path: Path
) -> None:
    folder = copied(plain, tmp_path)
    before = open_drafter(plain, target)
    path = folder / "model.safetensors"
    write_compact(path, {n: before.weights.tensor(n) for n in before.weights.names()})
    compact = {"format": "dspark-int8"}
    edit_tensors(path, lambda t: t.pop("fc.weight.scale"), metadata=compact)
    with pytest.raises(CheckpointError, match=r"fc\.weight\.scale .*is missing"):
        open_drafter(folder, target)
    edit_tensors(path, lambda t: t.update({"fc.weight.scale": torch.ones(3)}), metadata=compact)
    with pytest.raises(CheckpointError, match=r"fc\.weight\.scale .*is missing"):
        open_drafter(folder, target)


def test_int8_without_our_format_is_refused(
    plain: Path, target: TargetDims, tmp_path: Path
) -> None:
    folder = copied(plain, tmp_path)

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)

    edit_tensors(folder / "model.safetensors", narrow)
    with pytest.raises(CheckpointError, match=r"fc\.weight has dtype I8"):
        open_drafter(folder, target)


def test_nan_in_a_scale_is_named(plain: Path, target: TargetDims, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    before = open_drafter(plain, target)
    path = folder / "model.safetensors"
    write_compact(path, {n: before.weights.tensor(n) for n in before.weights.names()})

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["fc.weight.scale"][1] = float("nan")

    edit_tensors(path, spoil, metadata={"format": "dspark-int8"})
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        open_drafter(folder, target).weights.tensor("fc.weight")


def test_shards_load(plain: Path, target: TargetDims, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        shard = f"model-{i}.safetensors"
        save_file({n: tensors[n] for n in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert open_drafter(folder, target).weights.names() == sorted(tensors)


@pytest.mark.parametrize("section", ["dspark_config", "dflash_config"])
def test_method_fields_may_be_nested(
    plain: Path, target: TargetDims, tmp_path: Path, section: str
) -> None:
    folder = copied(plain, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    fields = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    nested = {name: config[name] for name in fields}
    edit_json(
        folder / "config.json",
        architectures=["DSparkDraftModel"],
        **{section: nested},
        **dict.fromkeys(fields, ...),
    )
    assert open_drafter(folder, target).dims == open_drafter(plain, target).dims
    edit_json(folder / "config.json", mask_token_id=7)
    with pytest.raises(ConfigError, match=rf"mask_token_id is 7 at the top and 255 in {section}"):
        open_drafter(folder, target)


def test_depth_is_block_size_alone(plain: Path, target: TargetDims, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    edit_json(folder / "config.json", num_nextn_predict_layers=3, block_size=5)
    assert open_drafter(folder, target).dims.block_size == 5
    edit_json(folder / "config.json", block_size=...)
    with pytest.raises(ConfigError, match="block_size is missing"):
        open_drafter(folder, target)


def test_own_copies_of_the_target_are_shared(tmp_path: Path, target_dir: Path) -> None:
    target = open_target(target_dir)
    for (embed, head), name in zip(itertools.product(("copy", True), repeat=2), "abcd"):
        folder = tiny_drafter(tmp_path, target_dir, own_embed=embed, own_lm_head=head, name=name)
        drafter = open_drafter(folder, target.dims)
        shared = share_with_target(drafter, target.weights).dims
        assert shared.own_embed_tokens is (embed is True)
        assert shared.own_lm_head is (head is True)


def test_a_tied_target_shares_its_embedding_as_head(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama", tie=True)
    target = open_target(folder)
    drafter = open_drafter(
        tiny_drafter(tmp_path, folder, own_embed="copy", own_lm_head="copy"), target.dims
    )
    shared = share_with_target(drafter, target.weights).dims
    assert not shared.own_embed_tokens and not shared.own_lm_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": ...}, "mask_token_id is missing"),
        ({"mask_token_id": 256}, r"mask_token_id must be an integer in \[0, 255\], got 256"),
        ({"mask_token_id": -1}, r"mask_token_id must be an integer in \[0, 255\], got -1"),
        ({"vocab_size": 200, "mask_token_id": 3}, "vocab_size is 200, the target's is 256"),
        ({"draft_vocab_size": 128}, "draft_vocab_size 128 differs from vocab_size 256"),
        ({"hidden_size": 32}, "hidden_size is 32, the target's is 64"),
        ({"num_target_layers": 6}, "num_target_layers is 6, the target's is 4"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids must be -1 or in .*got 3"),
        ({"target_layer_ids": [1, 0]}, "must be strictly increasing"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": "all"}, "target_layer_ids must be a list of integers"),
        ({"block_size": 65}, r"block_size must be in \[1, 64\], got 65"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs markov_rank > 0"),
        ({"markov_rank": -1}, "markov_rank must be an integer"),
        ({"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn"),
        ({"markov_head_type": ...}, "markov_head_type is missing"),
        ({"confidence_head_with_markov": ...}, "confidence_head_with_markov is missing"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel: .*Gemma family are not"),
        ({"model_type": "gemma4_text"}, "gemma4_text: .*Gemma family are not supported"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "'Qwen3Eagle3Model' is not supported"),
        ({"model_type": "llama"}, "model_type must be 'qwen3'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be 2 times"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not"),
    ],
)
def test_config_faults_are_named(
    plain: Path, target: TargetDims, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copied(plain, tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        open_drafter(folder, target)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1, "layer_types": ...}, "11 tensors are unknown: layers.1"),
        ({"num_hidden_layers": 3, "layer_types": ...}, "11 tensors are missing: layers.2"),
        ({"markov_rank": 4}, r"markov_w1.weight has shape \[256, 8\], .* \[256, 4\]"),
        (
            {"markov_rank": 0, "confidence_head_with_markov": False},
            "tensors are unknown: markov_head.markov_w1.weight",
        ),
        ({"enable_confidence_head": False}, "2 tensors are unknown: confidence_head.proj.bias"),
        ({"markov_head_type": "gated"}, "2 tensors are missing: markov_head.gate_proj.bias"),
        ({"markov_head_type": "rnn"}, "2 tensors are missing: markov_head.joint_proj.bias"),
        ({"attention_bias": True}, "8 tensors are missing: layers.0.self_attn.k_proj.bias"),
        ({"target_layer_ids": [0, 1]}, r"fc.weight has shape \[64, 192\], .* \[64, 128\]"),
    ],
)
def test_weights_are_held_to_the_config(
    plain: Path, target: TargetDims, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copied(plain, tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_drafter(folder, target)


@pytest.mark.parametrize("name", ["markov_head.markov_w2.weight", "confidence_head.proj.weight"])
def test_a_declared_head_without_weights_is_refused(
    plain: Path, target: TargetDims, tmp_path: Path, name: str
) -> None:
    folder = copied(plain, tmp_path)
    edit_tensors(folder / "model.safetensors", lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        open_drafter(folder, target)


def test_an_extra_tensor_is_refused(plain: Path, target: TargetDims, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    edit_tensors(folder / "model.safetensors", lambda t: t.update({"d2t": torch.zeros(256, 64)}))
    with pytest.raises(CheckpointError, match=r"tensor d2t is unknown \(shape \[256, 64\]\)"):
        open_drafter(folder, target)


def test_a_folder_without_config_is_a_clear_error(tmp_path: Path, target: TargetDims) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; expected a DSpark drafter"):
        open_drafter(tmp_path, target)
