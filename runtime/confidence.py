"""From confidence logits to probabilities.

    c_k = sigmoid(conf_logits_k / sts_k)

c_k is the chance that draft k is accepted given that all before it were. What is not a number
counts as 0. Without a confidence head the logits are +inf, so c = 1.
"""

from __future__ import annotations

import numpy as np


def probabilities(conf_logits: np.ndarray, sts: np.ndarray) -> np.ndarray:
    """c [B, G] f64 of logits [B, G] and temperatures [G]."""
    with np.errstate(over="ignore", invalid="ignore"):
        c = 1.0 / (1.0 + np.exp(-(conf_logits.astype(np.float64) / sts)))
    return np.nan_to_num(c, nan=0.0)
