"""RoPE's angles; the fragments as a whole are compared with Transformers in test_graph_parity."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.build.config import Rope
from dspark_trt.build.layers import inverse_frequencies


def test_unscaled_frequencies_are_powers_of_theta() -> None:
    inv = inverse_frequencies(Rope(10000.0), 8)
    np.testing.assert_allclose(inv, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies(Rope(10000.0), 8)
    scaled = inverse_frequencies(Rope(10000.0, linear_factor=4.0), 8)
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_is_that_of_transformers(head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072,
    )
    expected = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    found = inverse_frequencies(Rope(500000.0, (32.0, 1.0, 4.0, 8192)), head_dim)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
