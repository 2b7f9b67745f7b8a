"""RaggedPagedAttention against one softmax at a time, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from op_harness import run_op

from dspark_trt.plugins.ragged_paged_attention import AttentionShape, ragged_paged_attention

DIM, SPARE_PAGES = 8, 3
TOLERANCE = {"float32": 2e-6}


def make_feeds(
    shape: AttentionShape,
    lens: list[int],  # rows of each request
    contexts: list[int],  # keys in the pages; rows of the step are among them unless block
    *,
    padding: int = 0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Pages dealt at random; what nobody may read is NaN in q, block rows, keys, large in values.

    Values are finite in the pages, whatever was computed: PagedKvWrite sees to it.
    """
    rng = np.random.default_rng(seed)
    size, n = shape.page_size, sum(lens) + padding
    counts = [max(1, -(-c // size)) for c in contexts]
    width = max(counts) + 1
    ids = iter(rng.permutation(np.arange(1, sum(counts) + SPARE_PAGES)))
    table = np.zeros((len(lens), width), np.int32)
    dims = (sum(counts) + SPARE_PAGES, size, shape.num_kv_heads, shape.head_dim)
    unread = {"k_pages": np.nan, "v_pages": 50.0}
    pages = {name: np.full(dims, value, np.float32) for name, value in unread.items()}
    for array in pages.values():
        array[0] = 0.0
    for r, count in enumerate(counts):
        table[r, :count] = [next(ids) for _ in range(count)]
        for position in range(contexts[r]):
            page, offset = table[r, position // size], position % size
            for array in pages.values():
                array[page, offset] = rng.normal(size=dims[2:])

    def rows(heads: int) -> np.ndarray:
        array = rng.normal(size=(n, heads, shape.head_dim)).astype(np.float32)
        array[sum(lens) :] = np.nan
        return array

    owners = np.repeat(np.arange(len(lens)), lens)
    feeds = pages | {
        "q": rows(shape.num_heads) * np.float32(2),
        "page_table": table,
        "cu_seqlens": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        "kv_lens": np.array(contexts, np.int32),
        "requests": np.append(owners, [len(lens) - 1] * padding).astype(np.int32),
    }
    if shape.block:
        feeds |= {"block_k": rows(shape.num_kv_heads), "block_v": rows(shape.num_kv_heads)}
    return feeds


def expected(shape: AttentionShape, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """[real rows, H, D], a row and a head at a time."""
    cu, size = feeds["cu_seqlens"], shape.page_size
    out = np.zeros((cu[-1], shape.num_heads, shape.head_dim))
    for r in range(len(cu) - 1):
        lens, total = int(cu[r + 1] - cu[r]), int(feeds["kv_lens"][r])
        for i in range(lens):
            n = cu[r] + i
            if shape.block:
                seen = range(total)
            else:
                position = total - lens + i
                first = max(0, position - shape.window + 1) if shape.window else 0
                seen = range(first, position + 1)
            places = [(feeds["page_table"][r, t // size], t % size) for t in seen]
            for h in range(shape.num_heads):
                kv = h // shape.group
                keys = [feeds["k_pages"][p, o, kv] for p, o in places]
                values = [feeds["v_pages"][p, o, kv] for p, o in places]
                if shape.block:
                    keys += list(feeds["block_k"][cu[r] : cu[r + 1], kv])
                    values += list(feeds["block_v"][cu[r] : cu[r + 1], kv])
                scores = np.array(keys, np.float64) @ feeds["q"][n, h] / np.sqrt(shape.head_dim)
                law = np.exp(scores - scores.max())
                out[n, h] = law / law.sum() @ np.array(values, np.float64)
    return out


def check(
    shape: AttentionShape, lens: list[int], contexts: list[int], *, padding: int = 0, seed: int = 0
) -> None:
    feeds = make_feeds(shape, lens, contexts, padding=padding, seed=seed)
    out = run_op(
        ragged_paged_attention(shape),
        feeds,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        block=int(shape.block),
    )["out"]
    assert out.shape == feeds["q"].shape
    want = expected(shape, feeds)
    assert np.isfinite(out[: len(want)]).all()
    assert np.abs(out[: len(want)] - want).max() < TOLERANCE["float32"]


def shape_of(group: int = 2, kv_heads: int = 2, page_size: int = 4, **others) -> AttentionShape:
    return AttentionShape(
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        page_size=page_size,
        **others,
    )


MIXES = {
    "one row": ([1], [1]),
    "one decoding request": ([1], [9]),
    "a whole prompt": ([7], [7]),
    "a later chunk": ([5], [12]),
    "chunk and decode": ([6, 1, 3], [6, 10, 17]),
    "unequal drafts": ([1, 5, 2, 4], [1, 8, 30, 4]),
    "ends at page borders": ([4, 1, 4], [4, 8, 16]),
    "starts at page borders": ([1, 2], [5, 10]),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_see_their_own_request_up_to_themselves(mix: str, padding: int) -> None:
    for seed in range(3):
        check(shape_of(), *MIXES[mix], padding=padding, seed=seed)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("block", [False, True])
def test_query_heads_share_kv_heads_in_groups(group: int, kv_heads: int, block: bool) -> None:
    shape = shape_of(group, kv_heads, block=block)
    check(shape, [3, 3, 3], [3, 9, 14], seed=group)


@pytest.mark.parametrize("page_size", [1, 3, 16, 32])
def test_any_page_size(page_size: int) -> None:
    for mix in ("chunk and decode", "unequal drafts"):
        check(shape_of(page_size=page_size), *MIXES[mix], padding=1)


@pytest.mark.parametrize("window", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("mix", MIXES)
def test_a_sliding_window_hides_older_positions(window: int, mix: str) -> None:
    check(shape_of(window=window), *MIXES[mix], padding=2)


@pytest.mark.parametrize("block", [1, 2, 5, 9])
@pytest.mark.parametrize("contexts", [[1], [4, 1, 13], [8, 16, 3, 31]])
def test_a_block_sees_the_context_and_itself_both_ways(block: int, contexts: list[int]) -> None:
    for seed in range(3):
        check(shape_of(block=True), [block] * len(contexts), contexts, seed=seed)


@pytest.mark.parametrize("lens", [[3, 3], [1, 4, 2]])
def test_padding_rows_of_a_block_reach_nobody(lens: list[int]) -> None:
    contexts = [5, 9, 2][: len(lens)]
    check(shape_of(block=True), lens, contexts, padding=3)


def test_a_block_without_context_sees_itself_alone() -> None:
    check(shape_of(block=True), [4, 4], [0, 6])


def test_rows_do_not_depend_on_who_shares_the_batch() -> None:
    shape = shape_of()
    feeds = make_feeds(shape, [3, 2, 4], [8, 2, 21])
    attributes = {"scale": DIM**-0.5, "window": 0, "block": 0}
    function = ragged_paged_attention(shape)
    together = run_op(function, feeds, **attributes)["out"]
    for r, rows in enumerate(np.split(np.arange(9), [3, 5])):
        alone = feeds | {
            "q": feeds["q"][rows],
            "page_table": feeds["page_table"][r : r + 1],
            "cu_seqlens": np.array([0, len(rows)], np.int32),
            "kv_lens": feeds["kv_lens"][r : r + 1],
            "requests": np.zeros(len(rows), np.int32),
        }
        out = run_op(function, alone, **attributes)["out"]
        assert np.abs(out - together[rows]).max() < TOLERANCE["float32"]
