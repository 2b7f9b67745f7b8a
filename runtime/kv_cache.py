"""The page pool: fixed pages of K/V, shared by target and drafter under one page id.

Page 0 is the blank page. It is never granted or written; unused entries of a page table point at
it, so that what a kernel gathers beyond a request's end is zeros and nobody's text.
"""

from __future__ import annotations

BLANK_PAGE = 0


class OutOfPages(RuntimeError):
    """The pool cannot grant what was asked; nothing was granted."""


class PagePool:
    """Which pages are free. `num_pages` counts the blank page too."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be >= 2 (page 0 is the blank page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, BLANK_PAGE, -1))  # the lowest id is granted first

    @property
    def capacity(self) -> int:
        """Pages that can be granted in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens: the one place that rounds."""
        return -(-tokens // self.page_size)

    def can_grow(self, pages: list[int], tokens: int) -> bool:
        """Whether `pages` could be made to hold `tokens` tokens now."""
        return self.pages_for(tokens) - len(pages) <= len(self._free)

    def grow(self, pages: list[int], tokens: int) -> bool:
        """Extend `pages` in place to hold `tokens` tokens; says whether pages were added.

        Raises `OutOfPages`, with `pages` unchanged, where too few are free.
        """
        missing = self.pages_for(tokens) - len(pages)
        if missing <= 0:
            return False
        if missing > len(self._free):
            raise OutOfPages(f"{missing} pages are needed, {len(self._free)} are free")
        pages += [self._free.pop() for _ in range(missing)]
        return True

    def release(self, pages: list[int]) -> None:
        """Give every page of `pages` back and empty it."""
        self._free += reversed(pages)
        pages.clear()
