"""A run's state on disk, so that a run killed anywhere goes on from its last checkpoint.

`checkpoint/` holds the drafter, the optimizer, and where step, clock and data stand. Nothing else
decides what comes next: batches and anchors follow from (seed, epoch, document), and no layer draws
random numbers. The folder is replaced in one step, so it is whole at every moment.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_trt.runtime.directory_swap import staged_directory, sync_tree
from dspark_trt.tools.train.config import TrainError

FOLDER = "checkpoint"
STATE = "state.pt"


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    epoch: int = 0
    row: int = 0  # first row of the next step, in its epoch
    seconds: float = 0.0  # spent training so far


def save_checkpoint(
    output: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Replace the checkpoint of the run in `output`."""
    state = {
        "drafter": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
    }
    with staged_directory(output / FOLDER) as staged:
        torch.save(state, staged / STATE)
        sync_tree(staged)


def load_checkpoint(output: Path, device: torch.device) -> dict[str, Any]:
    """The state saved in `output`: `drafter`, `optimizer` and `progress`."""
    path = output / FOLDER / STATE
    if not path.is_file():
        raise TrainError(f"{output} holds no checkpoint ({FOLDER}/{STATE}): start a run first")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise TrainError(f"{path} cannot be read ({error}): the checkpoint is damaged") from None
    return dict(state)


def load_drafter(drafter: torch.nn.Module, state: dict[str, Any], where: Path) -> None:
    """Put saved weights into `drafter`, which must be of the same shape."""
    try:
        drafter.load_state_dict(state["drafter"])
    except (RuntimeError, KeyError) as error:
        raise TrainError(
            f"{where}: the checkpoint is of another drafter than its config.json says ({error})"
        ) from None
