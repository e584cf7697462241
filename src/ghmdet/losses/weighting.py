"""From gradient norms to a weighted sum: what every harmonized loss shares, with the table of weights still open."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ghmdet.losses import checks
from ghmdet.losses.density import cell_counts, cell_index, fine_cells, harmonizing_weights, look_up

__all__ = [
    "TableOf",
    "at_least_float32",
    "cells_of",
    "check_settings",
    "checked_norm",
    "counted_sum",
    "harmonized_sum",
    "norm_weights",
    "own_weights",
    "weighted_sum",
]

# What turns a call's counts into the table of weights 1 / GD: `harmonizing_weights`, or a module with its state.
TableOf = Callable[[Tensor], Tensor]


def own_weights(bins: int, density: str, normalizer: str, max_weight: float | None) -> tuple[TableOf, int]:
    """The weights from a call's own counts, and the number of cells to count in."""
    check_settings(bins, density, normalizer, max_weight)
    table_of = functools.partial(
        harmonizing_weights, bins=bins, density=density, normalizer=normalizer, max_weight=max_weight
    )
    return table_of, cells_of(bins, density)


def check_settings(bins: int, density: str, normalizer: str, max_weight: float | None) -> None:
    checks.check_integer_at_least("bins", bins, 1)
    checks.check_one_of("density", density, ("regions", "exact"))
    checks.check_one_of("normalizer", normalizer, ("regions", "occupied"))
    if density == "exact" and normalizer == "occupied":
        raise ValueError('normalizer="occupied" counts unit regions and needs density="regions", got density="exact"')
    if density == "exact" and bins > 10_000:
        raise ValueError(f'density="exact" takes at most 10000 bins, got {bins}; density="regions" takes any number')
    if max_weight is not None:
        checks.check_positive("max_weight", max_weight, or_infinite=True)


def cells_of(bins: int, density: str) -> int:
    """How many cells the gradient norms are counted in: the unit regions, or the fine histogram for ε = 1 / bins."""
    return bins if density == "regions" else fine_cells(1 / bins)[0]


def norm_weights(gradient_norm: Tensor, valid: Tensor | None, cells: int, table_of: TableOf) -> Tensor:
    """table(gᵢ) for each gradient norm, 0 where not valid: float32, or float64 for float64 norms."""
    checks.check_floating("gradient_norm", gradient_norm)
    norm, valid = checked_norm(gradient_norm, valid)
    weights = torch.where(norm.isnan(), torch.nan, _weights_at(norm, valid, cells, table_of))
    return weights if valid is None else weights.masked_fill(~valid, 0)


def harmonized_sum(
    loss: Tensor, gradient_norm: Tensor, valid: Tensor | None, weight: Tensor | None, cells: int, table_of: TableOf
) -> Tensor:
    """Σᵢ wᵢ Lᵢ · table(gᵢ) over the valid examples, for a loss per example in the shape of its gradient norm."""
    checks.check_floating("loss", loss)
    checks.check_floating("gradient_norm", gradient_norm)
    checks.check_same_shape("gradient_norm", gradient_norm, "the loss", loss)
    checks.check_valid_and_weight(valid, weight, loss, owner="the loss's")
    checks.check_devices(loss.device, gradient_norm=gradient_norm, valid=valid, weight=weight)
    weights = norm_weights(gradient_norm, valid, cells, table_of)
    if valid is not None:
        valid = valid.expand_as(loss)
    return weighted_sum(at_least_float32(loss), valid, weights, weight)


def counted_sum(
    loss: Tensor, norm: Tensor, valid: Tensor | None, weight: Tensor | None, cells: int, table_of: TableOf
) -> Tensor:
    """The same sum, for a loss and a norm that a formula of ours has made and needs no check."""
    if valid is not None:
        valid = valid.expand_as(norm)
    return weighted_sum(loss, valid, _weights_at(norm, valid, cells, table_of), weight)


def _weights_at(norm: Tensor, valid: Tensor | None, cells: int, table_of: TableOf) -> Tensor:
    """Counts the valid norms, has a table made of the counts, and reads it at each norm."""
    counts = cell_counts(cell_index(norm, cells), cells, valid)
    return look_up(table_of(counts), norm, cells)


def weighted_sum(loss: Tensor, valid: Tensor | None, *weights: Tensor | None) -> Tensor:
    """Σᵢ Lᵢ · wᵢ · … over the valid examples; what stands elsewhere is put out before it is multiplied."""
    if valid is not None:
        loss = torch.where(valid, loss, 0)
    for weight in weights:
        if weight is not None:
            loss = loss * (weight if valid is None else torch.where(valid, weight, 0)).to(loss.dtype)
    return loss.sum()


def checked_norm(g: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradient norms detached, float32 or float64, 0 where not valid; `valid` in their shape."""
    checks.check_valid_and_weight(valid, None, g, owner="the gradient norm's")
    checks.check_devices(g.device, valid=valid)
    norm = at_least_float32(g.detach())
    if valid is not None:
        valid = valid.expand_as(norm)
        norm = torch.where(valid, norm, 0)
    if checks.is_plain_cpu(g, valid):
        checks.check_range("the gradient norm", norm, valid)
    return norm, valid


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
