"""The fused passes in plain torch, a block of examples at a time, for where numba is not installed.

The same numbers as `numba_cpu`, from the same description of the examples. A block's temporaries stay in cache and
are small enough for the allocator to hand out again, so that no page of memory is touched for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ghmdet.losses.density import cell_counts, cell_index, look_up
from ghmdet.losses.kernels.layout import Examples, Spread

__all__ = ["accumulate", "count"]

_BLOCK = 64 * 1024

Slices = tuple[slice, slice, slice]


def count(examples: Examples, loss: str, parameter: float, cells: int) -> tuple[Tensor, bool]:
    """R, int64 (cells,), and whether all targets are in range: in [0, 1], or −1 or a class."""
    counts = torch.zeros(cells, dtype=torch.int64)
    in_range = True
    if examples.index_targets:
        in_range = not bool(((examples.targets < -1) | (examples.targets >= examples.inputs.shape[1])).any())
    for place in _blocks(examples):
        x, t, valid = _load(examples, place)
        if loss == "binary" and not examples.index_targets:
            in_range = in_range and not bool(((t < 0) | (t > 1)).any())
        norm = (_probability_error(x, t) if loss == "binary" else _asl1(x - t, parameter)[0]).abs_()
        counts += cell_counts(cell_index(norm, cells), cells, valid)
    return counts, in_range


def accumulate(
    examples: Examples,
    loss: str,
    parameter: float,
    table: Tensor,
    cells: int,
    scale: Tensor | float,
    with_gradient: bool,
) -> tuple[float, Tensor | None]:
    """Σ wᵢ Lᵢ · table(gᵢ), and its gradient times `scale`."""
    total = 0.0
    gradients = torch.empty_like(examples.inputs) if with_gradient else None
    table = table.to(torch.float32)
    for place in _blocks(examples):
        x, t, valid = _load(examples, place)
        if loss == "binary":
            gradient, losses = _binary(x, t)
        elif loss == "focal":
            gradient, losses = _focal(x, t, parameter)
        else:
            gradient, losses = _asl1(x - t, parameter)
        weights = look_up(table, gradient.abs(), cells)
        if examples.weight is not None:
            weights = weights * _part(examples.weight, place)
        if valid is not None:
            weights = torch.where(valid, weights, 0)
        total += float((weights * losses).sum(dtype=torch.float64))
        if gradients is not None:
            gradients[place] = weights.mul_(gradient).mul_(float(scale))
    return total, gradients


def _blocks(examples: Examples) -> Iterator[Slices]:
    """Blocks of (outer, classes, inner), a few whole rows or a part of one."""
    outer, classes, inner = examples.inputs.shape
    if not classes:
        return
    width = min(inner, max(1, _BLOCK // max(classes, 1)))
    height = max(1, _BLOCK // max(classes * width, 1))
    for i in range(0, outer, height):
        for j in range(0, inner, max(width, 1)):
            yield slice(i, i + height), slice(None), slice(j, j + width)


def _part(spread: Spread, place: Slices) -> Tensor:
    everything = slice(None)
    picks = (everything if size == 1 else part for size, part in zip(spread.values.shape, place))
    return spread.values[tuple(picks)]


def _load(examples: Examples, place: Slices) -> tuple[Tensor, Tensor, Tensor | None]:
    x = examples.inputs[place].float()
    if examples.index_targets:
        index = examples.targets[place[0], place[2]].unsqueeze(1)
        known = (index >= 0) & (index < x.shape[1])
        t = torch.zeros_like(x).scatter_(1, torch.where(known, index, 0), known.float())
    else:
        t = examples.targets[place].float()
    if examples.valid is None:
        return x, t, None
    valid = _part(examples.valid, place).expand_as(x)
    return torch.where(valid, x, 0), torch.where(valid, t, 0), valid


def _probability_error(x: Tensor, t: Tensor) -> Tensor:
    """p − t without the rounding of 1 − p: p(1 − t) − (1 − p)t."""
    return (x.sigmoid() * (1 - t)).sub_((-x).sigmoid_().mul_(t))


def _binary(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient p − t and cross-entropy."""
    losses = x * 0  # NaN for an infinite logit
    losses.addcmul_(t, F.logsigmoid(x), value=-1).addcmul_(1 - t, F.logsigmoid(-x), value=-1)
    return _probability_error(x, t), losses


def _focal(x: Tensor, t: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Focal loss of γ = 2, αₜ g² CE with g = |p − t|, and its gradient ± αₜ g² (g + 2(1 − g) CE)."""
    error, losses = _binary(x, t)
    g = error.abs()
    factor = (1 - alpha + (2 * alpha - 1) * t).mul_(g).mul_(g)
    return factor * torch.copysign(g + 2 * (1 - g) * losses, error), factor * losses


def _asl1(d: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """The gradient d / √(d² + μ²) and the loss d² / (√(d² + μ²) + μ)."""
    square = d.square()
    root = (square + mu * mu).sqrt_()
    return d / root, square / (root + mu)
