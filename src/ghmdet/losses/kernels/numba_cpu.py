"""Drives the fused passes over all examples with as many threads as torch has."""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghmdet.losses.kernels import blocks, passes
from ghmdet.losses.kernels.layout import BY_NOTHING, Examples, Spread
from ghmdet.losses.kernels.threads import over_stretches

__all__ = ["accumulate", "count"]

_STRETCH = 128 * 1024  # examples a thread takes at a time: enough to pay for the taking
_KINDS = {torch.float32: blocks.FLOAT32, torch.bfloat16: blocks.BFLOAT16, torch.float16: blocks.FLOAT16}
_LOSSES = {"binary": passes.BINARY, "asl1": passes.ASL1, "focal": passes.FOCAL}
_WORTH_KEEPING = 2**20  # bytes; the allocator hands smaller ones out again by itself
_kept: collections.deque[torch.UntypedStorage] = collections.deque(maxlen=1)
_keeping = threading.Lock()
Numbers = np.ndarray[Any, Any]
_NOTHING = np.zeros(0, np.uint8)
_NO_INDICES = np.zeros(0, np.int64)
_NO_WEIGHT = np.zeros(0, np.float32)


def count(examples: Examples, loss: str, parameter: float, cells: int) -> tuple[Tensor, bool]:
    """R, int64 (cells,), and whether all targets are in range: in [0, 1], or −1 or a class."""
    fixed = (*_arguments(examples), *examples.inputs.shape[1:], _LOSSES[loss], parameter, cells)
    histograms: list[Numbers] = []

    def own_histogram() -> Numbers:
        histograms.append(np.zeros((4 if cells <= 1024 else 1, cells), np.int64))
        return histograms[-1]

    def stretch(start: int, stop: int, histogram: Numbers) -> int:
        return int(passes.count(*fixed, start, stop, histogram))

    wrong = over_stretches(stretch, examples.inputs.numel(), own_histogram, _STRETCH)
    if examples.index_targets:
        wrong = [passes.outside_classes(examples.targets.view(-1).numpy(), examples.inputs.shape[1])]
    return torch.from_numpy(sum(h.sum(0) for h in histograms)), not any(wrong)


def accumulate(
    examples: Examples,
    loss: str,
    parameter: float,
    table: Tensor,
    cells: int,
    scale: Tensor | float,
    with_gradient: bool,
) -> tuple[float, Tensor | None]:
    """Σ wᵢ Lᵢ · table(gᵢ), summed in the same order for any number of threads, and its gradient times `scale`."""
    gradient = _empty_like(examples.inputs) if with_gradient else None
    into = _memory(gradient)[0] if gradient is not None else _memory(examples.inputs)[0][:0]
    fixed = (
        *_arguments(examples),
        *_spread(examples.weight, _NO_WEIGHT),
        *examples.inputs.shape[1:],
        _LOSSES[loss],
        parameter,
        cells,
        table.float().numpy(),
        float(scale),
    )

    def stretch(start: int, stop: int, _: None) -> float:
        return float(passes.accumulate(*fixed, start, stop, into))

    return sum(over_stretches(stretch, examples.inputs.numel(), lambda: None, _STRETCH)), gradient


def _arguments(examples: Examples) -> tuple[Any, ...]:
    inputs, kind = _memory(examples.inputs)
    if examples.index_targets:
        targets, target_kind, indices = _NOTHING, blocks.FLOAT32, examples.targets.view(-1).numpy()
    else:
        targets, target_kind, indices = *_memory(examples.targets), _NO_INDICES
    return inputs, kind, targets, target_kind, indices, *_spread(examples.valid, _NOTHING)


def _memory(tensor: Tensor) -> tuple[Numbers, int]:
    """A contiguous tensor's numbers in one dimension, and how to read them."""
    kind = _KINDS.get(tensor.dtype, blocks.FLOAT32)
    flat = tensor.view(-1)
    if kind != blocks.FLOAT32:
        flat = flat.view(torch.uint16)
    elif tensor.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    return flat.numpy(), kind


def _spread(spread: Spread | None, nothing: Numbers) -> tuple[Numbers, int]:
    return (nothing, BY_NOTHING) if spread is None else (_memory(spread.values)[0], spread.by)


def _empty_like(tensor: Tensor) -> Tensor:
    """An empty tensor, in the memory of an earlier one of its size if that is free again.

    38 MB of fresh memory cost 9,400 page faults when they are first written, more time than the loss itself. The memory
    of the last big gradient is therefore kept. It is free again when nobody but this function holds its storage.
    """
    size = tensor.numel() * tensor.element_size()
    if size < _WORTH_KEEPING or not hasattr(torch._C, "_storage_Use_Count"):
        return torch.empty_like(tensor)
    with _keeping:
        for storage in _kept:
            free = torch._C._storage_Use_Count(storage._cdata) == 1 and not storage.is_shared()
            if free and storage.nbytes() == size:
                return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
        empty = torch.empty_like(tensor)
        _kept.append(empty.untyped_storage())
        return empty
