"""PackVerify: the allocation against a sort, the packing against a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_harness import ancestors, run_op

from dspark_trt.plugins.pack_verify import pack_verify

SLOTS, MAX_PAGES = 9, 24
INF = np.inf


def allocation(
    conf: np.ndarray,  # [B, G] logits
    *,
    sts: np.ndarray,  # [G]
    caps: np.ndarray,  # [B]
    budget: int,
) -> list[int]:
    """Lengths [B]: sort all pairs by falling survival, then position, then request."""
    pool = []
    for r, row in enumerate(conf):
        survival = 0.0  # its logarithm
        for k, logit in enumerate(row, start=1):
            with np.errstate(invalid="ignore"):
                survival -= np.logaddexp(0.0, -(np.float64(logit) / sts[k - 1]))
            if k <= caps[r] and survival > -INF:  # false for NaN too
                pool.append((-survival, k, r))
    lengths = [0] * len(conf)
    for _, k, r in sorted(pool)[:budget]:
        assert lengths[r] == k - 1  # what is taken is a prefix
        lengths[r] = k
    return lengths


def packing(feeds: dict[str, np.ndarray], lengths: list[int], page_size: int) -> dict[str, Any]:
    """Every other output, sequence by sequence; padding rows after them."""
    rows = []
    cu, kv_lens = [0], []
    chunks = len(feeds["chunk_lens"])
    for r, slot in enumerate(feeds["slots"]):
        if r < chunks:
            tokens = feeds["tokens_in"][cu[-1] : cu[-1] + feeds["chunk_lens"][r]]
        else:
            drafts = feeds["draft_tokens"][r - chunks] if "draft_tokens" in feeds else []
            tokens = [feeds["last_token"][slot], *drafts[: lengths[r - chunks]]]
        for i, token in enumerate(tokens):
            position = feeds["kv_len"][slot] + i
            page = feeds["page_table"][slot, position // page_size]
            rows.append((token, position, page, position % page_size))
        cu.append(cu[-1] + len(tokens))
        kv_lens.append(feeds["kv_len"][slot] + len(tokens))
    rows += [(0, 0, -1, 0)] * (len(feeds["tokens_in"]) - len(rows))
    table = np.array(rows).reshape(-1, 4)
    columns = dict(zip(("tokens", "positions", "pages", "offsets"), table.T))
    return columns | {
        "lengths": lengths,
        "cu_seqlens": cu,
        "tables": feeds["page_table"][feeds["slots"]],
        "kv_lens": kv_lens,
    }


def make_feeds(
    chunk_lens: list[int],
    conf: np.ndarray | None,  # [B, G]; None = an engine without a drafter, `batch` requests
    *,
    budget: int = 0,
    caps: list[int] | None = None,
    batch: int = 0,
    padding: int = 0,
    page_size: int = 4,
    sts: np.ndarray | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    batch = batch if conf is None else len(conf)
    n = sum(chunk_lens) + batch + budget + padding
    longest = max([10, *chunk_lens])
    pages = rng.permutation(np.arange(1, SLOTS * MAX_PAGES + 1)).reshape(SLOTS, MAX_PAGES)
    feeds = {
        "tokens_in": np.full(n, -7, np.int32),  # what stands past the chunks is not read
        "slots": rng.permutation(SLOTS)[: len(chunk_lens) + batch],
        "chunk_lens": np.array(chunk_lens, np.int32),
        "last_token": rng.integers(0, 100, SLOTS),
        "kv_len": rng.integers(0, MAX_PAGES * page_size - longest, SLOTS),
        "page_table": pages,
    }
    feeds["tokens_in"][: sum(chunk_lens)] = rng.integers(0, 100, sum(chunk_lens))
    feeds = {name: array.astype(np.int32) for name, array in feeds.items()}
    if conf is None:
        return feeds
    g = conf.shape[1]
    return feeds | {
        "draft_tokens": rng.integers(0, 100, conf.shape).astype(np.int32),
        "conf_logits": conf.astype(np.float32),
        "sts": np.ones(g, np.float32) if sts is None else sts.astype(np.float32),
        "caps": np.full(batch, g, np.int32) if caps is None else np.array(caps, np.int32),
        "budget": np.array([budget], np.int64),
    }


def check(feeds: dict[str, np.ndarray], *, page_size: int = 4) -> list[int]:
    """Compare every output; gives the lengths."""
    block = feeds["conf_logits"].shape[1] if "conf_logits" in feeds else 0
    lengths = [0] * (len(feeds["slots"]) - len(feeds["chunk_lens"]))
    if block:
        lengths = allocation(
            feeds["conf_logits"],
            sts=feeds["sts"],
            caps=feeds["caps"],
            budget=int(feeds["budget"][0]),
        )
    function = pack_verify(page_size=page_size, block_size=block)
    results = run_op(function, feeds, page_size=page_size)
    for name, want in packing(feeds, lengths, page_size).items():
        assert np.array_equal(results[name], want), (name, results[name], want)
    if "requests" in results:
        owners = np.repeat(np.arange(len(feeds["slots"])), np.diff(results["cu_seqlens"]))
        assert np.array_equal(results["requests"][: len(owners)], owners)
        assert np.all(results["requests"][len(owners) :] == len(feeds["slots"]) - 1)
    return lengths


@pytest.mark.parametrize("chunk_lens", [[], [1], [7, 1, 4]])
@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("block", [0, 1, 5])
def test_rows_of_any_mix_of_chunks_and_drafts(
    chunk_lens: list[int], batch: int, block: int
) -> None:
    if not chunk_lens and not batch:
        return
    for seed, page_size in enumerate((1, 3, 4, 16)):
        rng = np.random.default_rng(seed)
        conf = rng.normal(size=(batch, block)) * 2 if block else None
        feeds = make_feeds(
            chunk_lens,
            conf,
            budget=int(rng.integers(0, batch * block + 1)),
            batch=batch,
            padding=seed % 3,
            page_size=page_size,
            caps=rng.integers(0, block + 1, batch).tolist(),
            sts=rng.uniform(0.3, 3, block),
            seed=seed,
        )
        check(feeds, page_size=page_size)


@pytest.mark.parametrize("budget", [0, 1, 7, 19, 20, 21, 1000])
def test_budget_of_none_some_all_and_more_than_there_are(budget: int) -> None:
    conf = np.random.default_rng(budget).normal(size=(4, 5)) * 3
    lengths = check(make_feeds([2], conf, budget=budget))
    assert sum(lengths) == min(budget, 20)


@pytest.mark.parametrize("offset", [0, 2, 3])
def test_a_block_may_start_or_end_at_a_page_border(offset: int) -> None:
    feeds = make_feeds([], np.full((3, 4), INF), budget=12, page_size=4)
    feeds["kv_len"][:] = [8 + offset] * SLOTS
    assert check(feeds) == [4, 4, 4]


@pytest.mark.parametrize("budget", range(17))
def test_ties_go_by_position_then_request(budget: int) -> None:
    """Certainty, one doubtful value, none and NaN: many equal survivals across positions."""
    rng = np.random.default_rng(budget)
    for seed in range(10):
        conf = rng.choice([INF, INF, 1.0, 1.0, -INF, np.nan], size=(4, 4))
        check(make_feeds([], conf, budget=budget, seed=seed))


def test_all_certain_all_hopeless_and_one_nan_give_the_same_lengths_every_time() -> None:
    sure, never = np.full((3, 4), INF), np.full((3, 4), -INF)
    one_nan = sure.copy()
    one_nan[1, 1] = np.nan
    for conf, budget, want in (
        (sure, 5, [2, 2, 1]),
        (sure, 12, [4, 4, 4]),
        (never, 5, [0, 0, 0]),
        (one_nan, 5, [2, 1, 2]),
        (one_nan, 12, [4, 1, 4]),
        (np.full((3, 4), np.nan), 12, [0, 0, 0]),
    ):
        feeds = make_feeds([], conf, budget=budget)
        function = pack_verify(page_size=4, block_size=4)
        for _ in range(100):
            lengths = run_op(function, feeds, threads=2, page_size=4)["lengths"]
            assert lengths.tolist() == want


@pytest.mark.parametrize("column", range(9))
def test_nan_counts_as_nothing_wherever_it_stands(column: int) -> None:
    conf = np.random.default_rng(column).normal(size=(3, 9)) + 4
    conf[:, column] = np.nan
    assert max(check(make_feeds([], conf, budget=27))) == column


def test_later_drafts_are_never_taken_before_earlier_ones() -> None:
    """Survival is the running product: (.9, .95, .4, .99, .99) at .5 keeps two."""
    c = np.array([[0.9, 0.95, 0.4, 0.99, 0.99], [0.6, 0.9, 0.9, 0.9, 0.9]])
    conf = np.log(c / (1 - c))
    assert check(make_feeds([], conf, budget=2)) == [2, 0]
    assert check(make_feeds([], conf, budget=5)) == [2, 3]
    assert check(make_feeds([], conf, budget=7)) == [2, 5]


def test_lengths_do_not_depend_on_tokens() -> None:
    """Neither on the drafts nor on anything else but confidences, caps and the budget."""
    function = pack_verify(page_size=4, block_size=5)
    used = ancestors(function, "lengths") & set(function.input)
    assert used == {"conf_logits", "sts", "caps", "budget"}
    conf = np.random.default_rng(3).normal(size=(4, 5))
    feeds = make_feeds([], conf, budget=9)
    before = run_op(function, feeds, page_size=4)["lengths"]
    feeds["draft_tokens"] = feeds["draft_tokens"][::-1].copy()
    feeds["last_token"] += 1
    assert np.array_equal(run_op(function, feeds, page_size=4)["lengths"], before)


def test_caps_bound_each_length_whatever_the_confidence() -> None:
    assert check(make_feeds([], np.full((4, 3), INF), budget=12, caps=[0, 3, 1, 2])) == [0, 3, 1, 2]


def test_survival_far_below_float_range_still_ranks() -> None:
    conf = np.array([[-80.0, -80.0], [-79.0, -100.0]])
    assert check(make_feeds([], conf, budget=1)) == [0, 1]
    assert check(make_feeds([], conf, budget=3)) == [2, 1]
