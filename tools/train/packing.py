"""Documents to rows, and anchors to documents: pure functions on lengths and counts."""

from __future__ import annotations

from collections.abc import Sequence

OPEN_ROWS = 16  # rows that a document is tried in


def pack(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Documents, by index and in `order`, packed into rows of at most `row_tokens`.

    Each goes into the fullest open row that holds it; longer ones are counted as cut to a row.
    """
    rows: list[list[int]] = []
    used: list[int] = []  # tokens of each row
    open_rows: list[int] = []
    for index in order:
        length = min(int(lengths[index]), row_tokens)
        fitting = [row for row in open_rows if used[row] + length <= row_tokens]
        if fitting:
            row = max(fitting, key=used.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            used.append(0)
            open_rows.append(row)
            if len(open_rows) > OPEN_ROWS:
                open_rows.remove(max(open_rows[:-1], key=used.__getitem__))
        rows[row].append(index)
        used[row] += length
    return rows


def fair_shares(counts: Sequence[int], capacity: int) -> list[int]:
    """`capacity` anchors over documents with `counts` candidates: max-min fair.

    Small documents get all of theirs, the others the same number each (one more for the first ones
    where it does not divide).
    """
    shares = [0] * len(counts)
    left, waiting = capacity, sorted(range(len(counts)), key=lambda i: (counts[i], i))
    while waiting:
        even = left // len(waiting)
        if counts[waiting[0]] > even:
            extra = left - even * len(waiting)
            for rank, i in enumerate(sorted(waiting)):
                shares[i] = min(even + (rank < extra), counts[i])
            break
        i = waiting.pop(0)
        shares[i] = counts[i]
        left -= counts[i]
    return shares
