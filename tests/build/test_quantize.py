"""Weight-only blocks: what they stand for, which shift they need, and the product they give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from dspark_trt.build.graph import ModelWriter
from dspark_trt.build.quantize import (
    BLOCK,
    Blocks,
    Quantizer,
    block_shift,
    dequantize,
    quantize_blocks,
    relative_error,
)
from dspark_trt.build.weights import WeightsFile


def q4_1_weight(rng: np.random.Generator, out: int, blocks: int) -> np.ndarray:
    """Values on a grid of 16 levels per block, its ends taken, with a minimum of its own."""
    q = rng.integers(0, 16, (out, blocks, BLOCK))
    q[:, :, 0], q[:, :, 1] = 0, 15
    step = rng.uniform(0.01, 0.1, (out, blocks, 1))
    low = -rng.uniform(0.2, 0.8, (out, blocks, 1)) * 15 * step
    return (low + q * step).reshape(out, -1).astype(np.float32)


def cut(blocks: Blocks) -> Blocks:
    """The same blocks, of one input less."""
    return Blocks(*blocks.arrays, blocks.inputs - 1, shifted=False)


def test_four_bit_blocks_of_a_gguf_are_kept_as_they_are() -> None:
    weight = q4_1_weight(np.random.default_rng(0), 24, 5)
    blocks = quantize_blocks(weight, 4)
    assert blocks.shifted
    plain = quantize_blocks(np.pad(weight, ((0, 0), (0, 1))), 4)  # a cut block: no shift
    assert relative_error(weight, blocks) < 0.15 * relative_error(weight, cut(plain))
    np.testing.assert_allclose(dequantize(blocks), weight, atol=0.005)


def test_the_shift_is_left_out_where_it_does_not_help() -> None:
    weight = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    blocks = quantize_blocks(weight, 4)
    assert not blocks.shifted
    assert 0.02 < relative_error(weight, blocks) < 0.12


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.12), (8, 0.008)])
def test_error_falls_with_the_width(bits: int, bound: float) -> None:
    weight = np.random.default_rng(2).standard_normal((40, 70)).astype(np.float32)  # a cut block
    assert relative_error(weight, quantize_blocks(weight, bits)) < bound


def test_constant_blocks_have_no_error() -> None:
    weight = np.repeat(np.array([[0.0, 0.25, -3.0]], np.float32), BLOCK, axis=1)
    blocks = quantize_blocks(weight, 4)
    np.testing.assert_allclose(dequantize(blocks), weight, atol=1e-6)


def test_shift_puts_each_block_on_its_grid() -> None:
    weight = q4_1_weight(np.random.default_rng(3), 8, 2)
    moved = weight - np.repeat(block_shift(weight), BLOCK, axis=1)
    blocks = moved.reshape(8, 2, BLOCK)
    step = (blocks.max(axis=2) - blocks.min(axis=2)) / 15
    multiple = blocks.min(axis=2) / step
    np.testing.assert_allclose(multiple, np.round(multiple), atol=1e-4)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("grid", [True, False])
def test_product_is_that_of_the_dequantised_weight(tmp_path: Path, bits: int, grid: bool) -> None:
    rng = np.random.default_rng(4)
    weight = q4_1_weight(rng, 48, 3)
    if not grid:
        weight = rng.standard_normal(weight.shape).astype(np.float32)
    bias = rng.standard_normal(48).astype(np.float32)
    with WeightsFile(tmp_path / "weights.bin") as weights:
        g = ModelWriter(weights)
        x = g.input("x", ["N", 96], TensorProto.FLOAT)
        y = Quantizer(bits).matmul(
            g, x, "w", shape=(48, 96), load=lambda: weight, bias=g.weight("b", bias)
        )
        g.output(y, "y", ["N", 48], TensorProto.FLOAT)
    g.save(tmp_path / "m.onnx", "m")
    session = ort.InferenceSession(tmp_path / "m.onnx")
    x_value = rng.standard_normal((5, 96)).astype(np.float32)
    found = session.run(None, {"x": x_value})[0]
    kept = dequantize(quantize_blocks(weight, bits)) if bits else weight
    expected = x_value @ kept.T + bias
    # Activations are rounded to int8 per block: about 1 % of a product of this size.
    bound = 0.02 * np.abs(expected).max() if bits else 1e-5
    np.testing.assert_allclose(found, expected, atol=bound)


def test_the_widest_errors_come_first_and_drafters_are_left_out() -> None:
    quantizer = Quantizer(4, {"b": 8}, {"a": 0.1, "b": 0.01, "c": 0.2, "draft.x": 0.5})
    assert quantizer.worst() == ["b", "c", "a"]
    assert quantizer.bits_of("b") == 8
    assert quantizer.bits_of("a") == 4
