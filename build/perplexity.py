"""What quantisation costs: perplexity of a target graph on a text.

exp(-mean log p(token | all before it)),  windows of WINDOW tokens, each from an empty cache
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import tokenizers

WINDOW = 256  # tokens
DEFAULT_TEXT = Path(__file__).with_name("perplexity_text.txt")
_DTYPES = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}


def text_ids(tokenizer_json: str, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def perplexity(graph: Path, ids: Sequence[int]) -> float:
    """Perplexity of `ids` under a target graph of the ONNX Runtime backend.

    NaN or infinite where a logit is, or where the loss is beyond what a float holds.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    windows = [w for w in windows if len(w) > 1]
    losses = [_losses(session, np.array(window, np.int32)) for window in windows]
    with np.errstate(over="ignore"):
        return float(np.exp(np.mean(np.concatenate(losses))))


def gives_finite_logits(graph: Path, ids: Sequence[int]) -> bool:
    """Whether a target graph computes finite logits for a short prompt.

    The weights stay mapped, since nothing is packed: this takes little memory and time.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], _prefill_feeds(session, np.array(ids, np.int32)))[0]
    return bool(np.isfinite(logits).all())


def _losses(session: ort.InferenceSession, ids: np.ndarray) -> np.ndarray:
    """-log p of ids[1:] given what comes before each, [n - 1]."""
    logits = session.run(["logits"], _prefill_feeds(session, ids))[0][:-1].astype(np.float64)
    if not np.isfinite(logits).all():
        return np.full(len(ids) - 1, np.nan)
    peak = logits.max(axis=1)
    norm = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    return norm - logits[np.arange(len(ids) - 1), ids[1:]]


def _prefill_feeds(session: ort.InferenceSession, ids: np.ndarray) -> dict[str, np.ndarray]:
    """One prompt as one chunk in slot 0 of an empty cache, every row's logits asked for."""
    n = len(ids)
    page_size = next(i.shape[1] for i in session.get_inputs() if i.name == "kv.0.k")
    pages = -(-n // page_size)
    sizes = {"N": n, "M": n, "R": 1, "C": 1, "S": 1, "P": pages, "max_pages": pages}
    feeds = {
        i.name: np.zeros([sizes.get(d, 0) if isinstance(d, str) else d for d in i.shape],
                         _DTYPES[i.type])
        for i in session.get_inputs()
    }  # fmt: skip
    feeds["tokens_in"] = ids
    feeds["chunk_lens"][:] = n
    feeds["chunk_rows"][:] = n - 1
    feeds["logit_rows"] = np.arange(n, dtype=np.int32)
    feeds["page_table"][0] = np.arange(pages)
    for name in ("top_p", "repetition_penalty"):
        feeds[name][:] = 1
    return feeds
