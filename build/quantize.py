"""Weight-only quantisation for ONNX Runtime: `MatMulNBits`, blocks of 32 along the inputs.

    w[o, i] ~ (q[o, i] - zero_point[o, block]) * scale[o, block],   q of 4 or 8 bits

Zero points are packed integers (float ones fall on a slow path) and activations are rounded to
int8 per block (accuracy level 4). The rounding itself is ONNX Runtime's own quantiser.
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
            for name, array in zip(parts, quantize_blocks(load(), bits), strict=True):
                g.weights.add(name, array)
        return g.op(
            "MatMulNBits",
            [x, *(g.weight(p) for p in parts), *(["", bias] if bias else [])],
            domain="com.microsoft",
            K=shape[1],
            N=shape[0],
            bits=bits,
            block_size=BLOCK,
            accuracy_level=ACCURACY_LEVEL,
        )[0]


def quantize_blocks(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed q [out, blocks, BLOCK * bits / 8], scale [out, blocks] f32, packed zero points."""
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
    return packed, scale, zero_point
