"""PagedKvWrite against a loop."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from op_harness import op_session, run_op

from dspark_trt.plugins.paged_kv_write import paged_kv_write

PAGES, PAGE_SIZE, HEADS, DIM = 7, 4, 2, 3


def feeds(rows: int, *, padding: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """`rows` rows into places all different, `padding` rows of NaN mixed in at random."""
    rng = np.random.default_rng(seed)
    total = rows + padding
    places = rng.choice(PAGES * PAGE_SIZE, size=total, replace=False)
    pages, offsets = (a.astype(np.int32) for a in np.divmod(places, PAGE_SIZE))
    arrays = {
        name: rng.normal(size=(PAGES, PAGE_SIZE, HEADS, DIM)).astype(np.float32)
        for name in ("k_pages", "v_pages")
    }
    arrays |= {n: rng.normal(size=(total, HEADS, DIM)).astype(np.float32) for n in ("k", "v")}
    padded = rng.choice(total, size=padding, replace=False)
    pages[padded] = -1
    arrays["k"][padded] = arrays["v"][padded] = np.nan
    return arrays | {"pages": pages, "offsets": offsets}


def expected(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {part: arrays[f"{part}_pages"].copy() for part in "kv"}
    for n, (page, offset) in enumerate(zip(arrays["pages"], arrays["offsets"])):
        if page >= 0:
            for part in "kv":
                out[part][page, offset] = arrays[part][n]
    return {f"{part}_pages_out": array for part, array in out.items()}


@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (9, 0), (5, 3), (28, 0), (0, 4), (0, 0)])
def test_rows_go_to_their_page_and_offset_and_padding_writes_nothing(
    rows: int, padding: int
) -> None:
    for seed in range(5):
        arrays = feeds(rows, padding=padding, seed=seed)
        results = run_op(paged_kv_write(), arrays)
        for name, want in expected(arrays).items():
            assert np.array_equal(results[name], want)


def test_pages_that_are_not_named_keep_what_they_hold_even_nan() -> None:
    arrays = feeds(3, padding=2)
    touched = set(zip(arrays["pages"].tolist(), arrays["offsets"].tolist()))
    for page in range(PAGES):
        for offset in range(PAGE_SIZE):
            if (page, offset) not in touched:
                arrays["k_pages"][page, offset] = np.nan
    result = run_op(paged_kv_write(), arrays)["k_pages_out"]
    assert np.array_equal(result, expected(arrays)["k_pages_out"], equal_nan=True)
    assert np.isnan(result).sum() == (PAGES * PAGE_SIZE - 3) * HEADS * DIM


def test_bound_to_one_buffer_the_pages_are_written_where_they_lie() -> None:
    arrays = feeds(6, padding=1)
    want = expected(arrays)
    binding = op_session(paged_kv_write(), arrays).io_binding()
    buffers = {n: ort.OrtValue.ortvalue_from_numpy(arrays[n]) for n in ("k_pages", "v_pages")}
    for name, array in arrays.items():
        if name in buffers:
            binding.bind_ortvalue_input(name, buffers[name])
            binding.bind_ortvalue_output(f"{name}_out", buffers[name])
        else:
            binding.bind_cpu_input(name, array)
    op_session(paged_kv_write(), arrays).run_with_iobinding(binding)
    for name in buffers:
        assert np.array_equal(arrays[name], want[f"{name}_out"])
