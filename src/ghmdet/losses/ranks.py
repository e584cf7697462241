"""Counts over a process group. One small all-reduce, or nothing where there is no group."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

__all__ = ["Sync", "check_sync", "number_of_ranks", "sum_over_ranks"]

# True: the default process group where there is one; False: this process alone; or a group.
Sync: TypeAlias = "bool | dist.ProcessGroup"


def check_sync(sync: Any) -> None:
    if not (isinstance(sync, bool) or (dist.is_available() and isinstance(sync, dist.ProcessGroup))):
        raise TypeError(f"sync must be True, False or a process group, got {sync!r}")


def number_of_ranks(sync: Sync) -> int:
    """W, how many processes share a batch."""
    if sync is False or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(_group(sync))


def sum_over_ranks(counts: Tensor, sync: Sync) -> Tensor:
    """The counts of all ranks, in place."""
    if number_of_ranks(sync) > 1:
        dist.all_reduce(counts, group=_group(sync))
    return counts


def _group(sync: Sync) -> dist.ProcessGroup | None:
    return None if isinstance(sync, bool) else sync
