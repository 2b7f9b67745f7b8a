"""Bounds of the numbers in a manifest that the runtime computes with. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

MAX_COUNT = 2**31 - 1  # of tokens, ids, requests: what an int32 of the graphs holds
MAX_PAGE_SIZE = 1024
MAX_BLOCK_SIZE = 64


class BoundError(ValueError):
    """A number is missing, no integer or out of bounds; the message names field, bound, value."""


def bounded(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int in `[low, high]`; bools are refused."""
    if type(value) is not int or not low <= value <= high:
        raise BoundError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    return value


def check_page_size(value: object) -> None:
    """Refuse a size of K/V pages, in tokens, that no build makes."""
    bounded("page_size", value, 1, MAX_PAGE_SIZE)


def check_dims(target: Mapping[str, object], drafter: Mapping[str, object] | None) -> None:
    """Check the dims of the model and of the drafter, as far as the runtime reads them."""
    vocab = _check_layers("target", target)
    ends = target.get("eos_token_ids")
    if not isinstance(ends, list):
        raise BoundError(f"target.eos_token_ids must be a list of token ids, got {ends!r}")
    for end in ends:
        bounded("target.eos_token_ids", end, 0, vocab - 1)
    if drafter is not None:
        drafts = _check_layers("drafter", drafter)
        if drafts != vocab:
            raise BoundError(f"drafter.vocab_size must be the target's ({vocab}), got {drafts}")
        bounded("drafter.block_size", drafter.get("block_size"), 1, MAX_BLOCK_SIZE)


def _check_layers(where: str, dims: Mapping[str, object]) -> int:
    """Check the layers of a model; its vocab_size."""
    bounded(f"{where}.num_layers", dims.get("num_layers"), 1, MAX_COUNT)
    layer = dims.get("layer")
    if not isinstance(layer, dict):
        raise BoundError(f"{where}.layer must be an object, got {layer!r}")
    for name in ("num_kv_heads", "head_dim"):
        bounded(f"{where}.layer.{name}", layer.get(name), 1, MAX_COUNT)
    return bounded(f"{where}.vocab_size", dims.get("vocab_size"), 1, MAX_COUNT)
