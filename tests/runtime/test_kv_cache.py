"""The page pool: nothing is granted twice, nothing is lost, the blank page stays blank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.kv_cache import BLANK_PAGE, OutOfPages, PagePool


@pytest.mark.parametrize(
    "tokens, pages",
    [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)],
)
def test_pages_round_up(tokens: int, pages: int) -> None:
    assert PagePool(9, 16).pages_for(tokens) == pages


def test_growing_grants_only_what_is_missing() -> None:
    pool, pages = PagePool(5, 16), []
    assert pool.grow(pages, 17) is True
    assert pages == [1, 2]
    assert pool.grow(pages, 32) is False
    assert pool.grow(pages, 3) is False  # never shrinks
    assert pool.grow(pages, 33) is True
    assert (pages, pool.num_free) == ([1, 2, 3], 1)


def test_a_pool_that_is_short_grants_nothing() -> None:
    pool, pages, others = PagePool(4, 8), [], []
    pool.grow(others, 16)
    assert pool.can_grow(pages, 8) and not pool.can_grow(pages, 9)
    with pytest.raises(OutOfPages, match="2 pages are needed, 1 are free"):
        pool.grow(pages, 9)
    assert (pages, pool.num_free) == ([], 1)


def test_released_pages_can_be_granted_again() -> None:
    pool, pages = PagePool(4, 8), []
    pool.grow(pages, 24)
    pool.release(pages)
    assert (pages, pool.num_free) == ([], 3)
    pool.release(pages)  # nothing left to give back
    assert pool.num_free == 3
    again: list[int] = []
    pool.grow(again, 24)
    assert sorted(again) == [1, 2, 3]


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_needs_a_page_beside_the_blank_one(num_pages: int) -> None:
    with pytest.raises(ValueError, match="num_pages must be >= 2"):
        PagePool(num_pages, 16)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 90)), max_size=60),
    st.sampled_from([1, 7, 16]),
)
@settings(max_examples=100, deadline=None)
def test_free_and_used_are_always_all(moves: list[tuple[int, int]], page_size: int) -> None:
    """Whatever is granted and given back (-1): no page twice, none lost, never the blank one."""
    pool = PagePool(13, page_size)
    owners: list[list[int]] = [[], [], [], []]
    for owner, tokens in moves:
        if tokens < 0:
            pool.release(owners[owner])
        elif pool.can_grow(owners[owner], tokens):
            pool.grow(owners[owner], tokens)
            assert len(owners[owner]) >= pool.pages_for(tokens)
        used = [page for pages in owners for page in pages]
        assert len(set(used)) == len(used)
        assert BLANK_PAGE not in used
        assert pool.num_free + len(used) == pool.capacity == 12
