"""The weights file: aligned, written once per name, referred to by what it really holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dspark_trt.build.weights import ALIGNMENT, WeightsFile


def test_each_tensor_lies_where_its_reference_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(0, 255, (7, 2), dtype=np.uint8),
        "c": rng.standard_normal((4, 6)).astype(np.float32).T,  # not contiguous
    }
    with WeightsFile(tmp_path / "w.bin") as weights:
        for name, array in arrays.items():
            assert weights.add(name, array) == name
    raw = (tmp_path / "w.bin").read_bytes()
    for name, array in arrays.items():
        tensor = weights.tensor(name)
        place = {e.key: e.value for e in tensor.external_data}
        offset, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "w.bin"
        assert offset % ALIGNMENT == 0
        found = np.frombuffer(raw[offset : offset + length], array.dtype).reshape(tensor.dims)
        np.testing.assert_array_equal(found, array)


def test_a_name_is_written_once(tmp_path: Path) -> None:
    with WeightsFile(tmp_path / "w.bin") as weights:
        weights.add("a", np.ones(3, np.float32))
        size = weights.bytes_written
        weights.add("a", np.zeros(30, np.float32))
        assert weights.bytes_written == size
        assert "a" in weights
        assert "b" not in weights
