"""The decode kernel under Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CODE = """
import torch
from dspark_trt.tools.train.generator import sdpa_decode
from dspark_trt.tools.train.triton_decode import decode_attention

torch.manual_seed(0)
cases = ((9, 3, 64, 130, 0), (4, 2, 20, 70, 0), (4, 4, 64, 130, 30))
for heads, kv_heads, dim, tokens, window in cases:
    q = torch.randn(3, heads, dim)
    k, v = torch.randn(3, tokens, kv_heads, dim), torch.randn(3, tokens, kv_heads, dim)
    lengths = torch.tensor([1, tokens, 65])
    expected = sdpa_decode(q, k, v, lengths, window)
    found = decode_attention(q, k, v, lengths, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_computes_what_plain_torch_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
