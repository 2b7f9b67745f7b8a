"""How wide each matrix must be: quantise, measure perplexity, widen the worst until it is enough.

The matrices whose rounding error is largest relative to their size go to 8 bits first: 1, 2, 4, ...
of them, until the perplexity of the quantised graph is within MAX_LOSS of float32's.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark_trt.build.perplexity import perplexity
from dspark_trt.build.quantize import BITS, Quantizer
from dspark_trt.build.source import CheckpointError

logger = logging.getLogger(__name__)

MAX_LOSS = 0.05  # of float32's perplexity
TARGET_GRAPH = "target.onnx"

Write = Callable[[Path, Quantizer], None]  # the engine's graphs and weights into a folder


def write_quantized(
    folder: Path, quantize: str, ids: Sequence[int], write: Write, say: Callable[[str], None]
) -> dict[str, float]:
    """Write the graphs into `folder`, quantised; gives what was measured.

    ids: a text to measure on. The float32 graphs stand in a subfolder for the time of their
    measurement. `say` is told each step.
    """
    reference = _measured(folder / "float32", Quantizer(), ids, write)
    shutil.rmtree(folder / "float32")
    if not math.isfinite(reference):
        raise CheckpointError(
            f"the model gives non-finite logits: its perplexity in float32 is {reference}, so what "
            "quantisation costs cannot be measured. The checkpoint is damaged, or its config "
            "(rope, rms_norm_eps) is not the one it was trained with"
        )
    say(f"perplexity in float32: {reference:.3f}")
    bits = BITS[quantize]
    wide: list[str] = []
    while True:
        quantizer = Quantizer(bits, dict.fromkeys(wide, 8))
        found = _measured(folder, quantizer, ids, write)
        loss = found / reference - 1 if math.isfinite(found) else math.inf
        say(f"perplexity in {quantize}, {len(wide)} matrices in 8 bits: {found:.3f} ({loss:+.1%})")
        worst = quantizer.worst()
        if loss <= MAX_LOSS or bits == 8 or len(wide) == len(worst):
            break
        wide = worst[: 2 * len(wide) or 1]
        say(f"more than {MAX_LOSS:.0%}: widening the worst {len(wide)} to 8 bits")
    if not math.isfinite(found):
        raise CheckpointError(
            f"the model gives non-finite logits in {quantize}, perplexity {found} (in float32 "
            f"{reference:.3f}): build without --quantize"
        )
    if loss > MAX_LOSS:
        logger.warning("%s costs %.1f %% of perplexity on this model", quantize, 100 * loss)
    return {
        "perplexity_float32": reference,
        f"perplexity_{quantize}": found,
        "perplexity_tokens": float(len(ids)),
        "matrices_in_8_bits": float(len(wide) if bits == 4 else len(worst)),
    }


def _measured(folder: Path, quantizer: Quantizer, ids: Sequence[int], write: Write) -> float:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.is_file():
            old.unlink()
    write(folder, quantizer)
    return perplexity(folder / TARGET_GRAPH, ids)
