"""How many examples have a gradient norm near g, per length: the gradient density GD(g) of the paper.

Three ways to it, from the definition to the fast:

- `gradient_density_sorted`: equations 4 to 6 as they stand, by sorting, O(N log N).
- the fine histogram: the same windows, their counts read from a histogram of narrow cells and its prefix sums, O(N).
- the unit regions: equation 9, the paper's own approximation, O(N).

The last two share one form: count examples into equal cells of [0, 1] (`cell_counts`), turn the counts into a
table of weights 1 / GD (`harmonizing_weights`), and read it at each g (`look_up`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "cell_counts",
    "cell_index",
    "fine_cells",
    "gradient_density_sorted",
    "harmonizing_weights",
    "look_up",
    "window_counts",
    "window_lengths",
]

# The fine histogram has at least this many cells. What errs are the examples within a cell of a window's end, and they
# err most where a window holds few. From 1e5 examples that leave no window nearly empty the loss is within 2e-4; where
# a thin tail leaves windows with one or two examples, one seed in twenty passes 1e-3 (with 8,192 cells one in five).
_FINE_CELLS = 65_536
_LEAST_CELLS_PER_HALF_WINDOW = 64


def fine_cells(epsilon: float) -> tuple[int, float]:
    """The fine histogram for windows of length ε: how many cells cover [0, 1], and cells per unit of g.

    A cell is ε / 2h wide, so that the ends of a window around a cell's edge fall on edges.
    """
    scale = 2 * _half_window(epsilon) / epsilon
    return max(1, math.ceil(scale * (1 - 1e-12))), scale


def _half_window(epsilon: float) -> int:
    """h, the cells in half a window."""
    return max(_LEAST_CELLS_PER_HALF_WINDOW, math.ceil(_FINE_CELLS * epsilon / 2))


def cell_index(g: Tensor, cells: int, scale: float | None = None) -> Tensor:
    """The cell min(⌊g · scale⌋, cells − 1) of each g, as int64; NaN goes to the last cell. `scale` is `cells` where
    the cells fill [0, 1] exactly, as unit regions do."""
    position = g * (cells if scale is None else scale)
    # the comparison is false for NaN, whose conversion to an integer would be anything
    return torch.where(position < cells - 1, position, cells - 1).clamp_(min=0).long()


def cell_counts(index: Tensor, cells: int, valid: Tensor | None = None) -> Tensor:
    """R_j, the number of valid examples in each cell: int64 (cells,), exact for any number of examples."""
    one = torch.ones((), dtype=torch.int64, device=index.device) if valid is None else valid.long()
    counts = torch.zeros(cells, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, index.reshape(-1), one.expand_as(index).reshape(-1))


def harmonizing_weights(
    counts: Tensor,
    smoothed: Tensor | None = None,
    *,
    least_stored: float = 0.0,
    bins: int,
    density: str,
    normalizer: str,
    max_weight: float | None,
    ranks: int = 1,
) -> Tensor:
    """1 / GD as a table for `look_up`: one entry a unit region, or one an edge of the fine histogram; float64.

    Args:
        counts: R, this call's valid examples in each cell, over all ranks.
        smoothed: S, the moving average of R; None for no average.
        least_stored: where S holds less, R stands for it.
        max_weight: the largest β = N / GD allowed, N being `counts.sum()`.
        ranks: W, what a share of the loss is multiplied by so that the mean over ranks is the loss.
    """
    near = _near(counts.double() if smoothed is None else smoothed, bins, density)
    if smoothed is not None and least_stored > 0:
        near = torch.where(near >= least_stored, near, _near(counts.double(), bins, density))
    if density == "exact":
        gd = near / window_lengths(counts.numel(), 1 / bins, counts.device)
    elif normalizer == "regions":
        gd = near * bins  # R_j · M, equation 9
    else:
        gd = near * (counts > 0).sum()  # the authors' released code
    if max_weight is not None:
        gd = torch.maximum(gd, counts.sum() / max_weight)  # β = N / GD ≤ max_weight
    return torch.where(gd > 0, ranks / gd, 0)


def _near(held: Tensor, bins: int, density: str) -> Tensor:
    """The number of examples near each entry of the table: in its unit region, or in the window around its edge."""
    return window_counts(held, 1 / bins) if density == "exact" else held


def window_counts(counts: Tensor, epsilon: float) -> Tensor:
    """Σ δ_ε(g_k, g) at the edges of the fine cells (equation 5): (cells + 1,).

    At the edge k · ε/2h the window [g − ε/2, g + ε/2) covers whole cells, so that its count is a difference of
    prefix sums.
    """
    half, cells = _half_window(epsilon), counts.numel()
    below = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # examples below each edge
    edge = torch.arange(cells + 1, device=counts.device)
    return below[(edge + half).clamp(max=cells)] - below[(edge - half).clamp(min=0)]


def window_lengths(cells: int, epsilon: float, device: torch.device) -> Tensor:
    """l_ε(g) = min(g + ε/2, 1) − max(g − ε/2, 0) at the edges of the fine cells (equation 6): float64 (cells + 1,)."""
    g = torch.arange(cells + 1, device=device, dtype=torch.float64) * (epsilon / (2 * _half_window(epsilon)))
    return (g + epsilon / 2).clamp(max=1) - (g - epsilon / 2).clamp(min=0)


def look_up(table: Tensor, g: Tensor, cells: int, scale: float | None = None) -> Tensor:
    """The table's value at each g: constant in a cell where it has one entry a cell, linear between a cell's edges
    where it has one an edge. A g of NaN reads a finite value; what it weighs is NaN itself."""
    scale = cells if scale is None else scale
    index = cell_index(g, cells, scale)
    table = table.to(g.dtype)
    if table.numel() == cells:
        return table[index]
    lower = table[index]
    return lower + (g * scale - index).clamp(0, 1) * (table[index + 1] - lower)


def gradient_density_sorted(g: Tensor, epsilon: float, valid: Tensor | None = None) -> Tensor:
    """GD(g_i) by equations 4 to 6 with a sort instead of N × N comparisons; 0 where not valid."""
    norm = g.detach().double().reshape(-1)
    counted = norm if valid is None else norm.masked_fill(~valid.reshape(-1), math.inf)  # above every window
    ordered = counted.sort().values
    inside = torch.searchsorted(ordered, norm + epsilon / 2) - torch.searchsorted(ordered, norm - epsilon / 2)
    length = (norm + epsilon / 2).clamp(max=1) - (norm - epsilon / 2).clamp(min=0)
    density = torch.where(norm.isnan(), math.nan, inside / length)
    if valid is not None:
        density = density.masked_fill(~valid.reshape(-1), 0)
    return density.reshape(g.shape).to(g.dtype if g.dtype == torch.float64 else torch.float32)
