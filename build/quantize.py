"""Weight-only quantisation for ONNX Runtime: `MatMulNBits`, blocks of 32 along the inputs.

    w[o, i] ~ (q[o, i] - zero_point[o, block]) * scale[o, block] + shift[o, block]

q has 4 or 8 bits, zero points are packed integers (float ones fall on a slow path), activations are
rounded to int8 per block (accuracy level 4). The rounding itself is ONNX Runtime's own quantiser.

`shift` is left out (0) unless it more than halves the error. It does for weights that come from
4-bit blocks with a minimum of their own, a GGUF's Q4_1: they lie on a grid of 16 levels, but on no
multiple of its step, and with the shift they are kept nearly as they are. Shifts are stored as
further inputs of the matrix, which the sums of x over each block feed:

    [w - shift | shift] . [x ; sums of x]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dspark_trt.build.graph import ModelWriter

BLOCK = 32
ACCURACY_LEVEL = 4
BITS = {"none": 0, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Bits of each weight matrix: `bits`, but where `wider` names another width (0 = float32)."""

    bits: int = 0
    wider: Mapping[str, int] = field(default_factory=dict)
    # Error of each matrix, relative to its root mean square; filled in as they are written.
    errors: dict[str, float] = field(default_factory=dict)

    def worst(self) -> list[str]:
        """The target's matrices, largest error first; those in 8 bits stay in front."""
        mine = [name for name in self.errors if not name.startswith("draft.")]
        return sorted(mine, key=lambda name: (name not in self.wider, -self.errors[name], name))

    def bits_of(self, weight: str) -> int:
        return self.wider.get(weight, self.bits)

    def matmul(
        self,
        g: ModelWriter,
        x: str,
        weight: str,
        *,
        shape: tuple[int, int],
        load: Callable[[], np.ndarray],
        bias: str = "",
    ) -> str:
        """x [N, in] times the weight [out, in] -> [N, out].

        `load` gives the float32 weight; it is called only where the weights file lacks `weight`.
        """
        bits = self.bits_of(weight)
        if not bits:
            if weight not in g.weights:
                g.weights.add(weight, load())
            return g.Gemm(x, g.weight(weight), *([bias] if bias else []), transB=1)
        parts = [f"{weight}.int{bits}", f"{weight}.scale", f"{weight}.zero_point"]
        if parts[0] not in g.weights:
            matrix = load()
            blocks = quantize_blocks(matrix, bits)
            self.errors[weight] = relative_error(matrix, blocks)
            for name, array in zip(parts, blocks.arrays, strict=True):
                g.weights.add(name, array)
        out, inputs = shape
        if g.weights.tensor(parts[0]).dims[1] > -(-inputs // BLOCK):  # with shifts
            sums = g.ReduceSum(g.Reshape(x, [-1, inputs // BLOCK, BLOCK]), [2], keepdims=0)
            x = g.Concat(x, sums, axis=1)
            inputs += inputs // BLOCK
        return g.op(
            "MatMulNBits",
            [x, *(g.weight(p) for p in parts), *(["", bias] if bias else [])],
            domain="com.microsoft",
            K=inputs,
            N=out,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=ACCURACY_LEVEL,
        )[0]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix [out, in]."""

    packed: np.ndarray  # [out, blocks, BLOCK * bits / 8] uint8
    scale: np.ndarray  # [out, blocks] f32
    zero_point: np.ndarray  # [out, ...] uint8, packed
    inputs: int  # in, without the inputs that carry shifts
    shifted: bool

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is stored."""
        return self.packed, self.scale, self.zero_point

    def rows(self, rows: slice) -> Blocks:
        """Some of the outputs."""
        packed, scale, zero_point = (array[rows] for array in self.arrays)
        return Blocks(packed, scale, zero_point, self.inputs, self.shifted)


def quantize_blocks(weight: np.ndarray, bits: int) -> Blocks:
    """The blocks of a weight [out, in]."""
    inputs = weight.shape[1]
    plain = Blocks(*_rounded(weight, bits), inputs, shifted=False)
    if bits != 4 or inputs % BLOCK:
        return plain
    shift = block_shift(weight)
    wide = np.concatenate([weight - np.repeat(shift, BLOCK, axis=1), shift], axis=1)
    shifted = Blocks(*_rounded(wide, bits), inputs, shifted=True)
    better = relative_error(weight, shifted) < 0.5 * relative_error(weight, plain)
    return shifted if better else plain


def block_shift(weight: np.ndarray) -> np.ndarray:
    """What to take off each block [out, blocks], so that its least value is on its integer grid."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    step = (high - low) / np.float32(15)
    zero = np.where(step > 0, np.clip(np.round(-low / np.where(step > 0, step, 1)), 0, 15), 0)
    return (low + zero * step).astype(np.float32)


def dequantize(blocks: Blocks) -> np.ndarray:
    """The weight [out, in] that `blocks` stand for, f32."""
    one_byte = blocks.packed.shape[2] == BLOCK

    def values(packed: np.ndarray, count: int) -> np.ndarray:
        flat = packed.reshape(len(packed), -1)
        if one_byte:
            return flat[:, :count].astype(np.float32)
        pairs = np.stack([flat & 15, flat >> 4], axis=2).reshape(len(flat), -1)
        return pairs[:, :count].astype(np.float32)

    out, count = blocks.scale.shape
    q = values(blocks.packed, count * BLOCK).reshape(out, count, BLOCK)
    wide = (q - values(blocks.zero_point, count)[:, :, None]) * blocks.scale[:, :, None]
    wide = wide.reshape(out, -1)
    weight = wide[:, : blocks.inputs]
    if blocks.shifted:
        shift = wide[:, blocks.inputs : blocks.inputs + blocks.inputs // BLOCK]
        weight = weight + np.repeat(shift, BLOCK, axis=1)
    return weight


def relative_error(weight: np.ndarray, blocks: Blocks) -> float:
    """Root mean square of what rounding changed, relative to the weight's; on a sample of rows."""
    rows = slice(None, None, max(len(weight) // 512, 1))
    change = dequantize(blocks.rows(rows)) - weight[rows]
    size = np.sqrt(np.mean(weight[rows] ** 2))
    return float(np.sqrt(np.mean(change**2)) / size) if size > 0 else 0.0


def _rounded(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """packed, scale and zero_point from ONNX Runtime's quantiser."""
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    config = DefaultWeightOnlyQuantConfig(
        block_size=BLOCK, is_symmetric=False, accuracy_level=ACCURACY_LEVEL, bits=bits
    )
    packed, scale, zero_point = DefaultWeightOnlyQuantizer(config).qbits_block_quant(
        np.ascontiguousarray(weight.T)
    )
    out = len(weight)
    return packed, scale.reshape(out, -1), zero_point.reshape(out, -1)
