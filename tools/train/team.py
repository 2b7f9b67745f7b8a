"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dspark_trt.tools.train.config import require


@dataclass(frozen=True, slots=True)
class Team:
    """This process among its fellows."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module`, its gradients averaged over the processes."""
        if self.size == 1:
            return module
        cuda = self.device.type == "cuda"
        return DistributedDataParallel(module, device_ids=[self.device] if cuda else None)

    def sum(self, values: list[float]) -> list[float]:
        """Sums over the processes."""
        return self._reduced(values, dist.ReduceOp.SUM) if self.size > 1 else values

    def highest(self, value: float) -> float:
        """The highest of the processes' values, so that all decide alike."""
        return self._reduced([value], dist.ReduceOp.MAX)[0] if self.size > 1 else value

    def _reduced(self, values: list[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        tensor: Tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        return tensor.tolist()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


def join_team(device: str) -> Team:
    """The team that the environment (torchrun) describes; `device` is auto, cpu or cuda."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    require(
        device != "cuda" or torch.cuda.is_available(),
        "--device cuda: torch sees no NVIDIA GPU here: use --device cpu",
    )
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    chosen = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    return Team(rank, size, chosen)


def leave_team(team: Team) -> None:
    """End the process group, where there is one."""
    if team.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
