"""The paper's mathematics as pure functions: no state, no ranks, no momentum.

Every harmonized loss here is Σᵢ L(xᵢ) / GD(gᵢ) over the valid examples (equation 8), GD detached. The modules in
`ghmdet.losses.harmonized` call the same functions and put their smoothed counts where these use the call's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ghmdet.losses import checks
from ghmdet.losses.binary import binary_harmonized
from ghmdet.losses.density import (
    cell_counts,
    cell_index,
    fine_cells,
    gradient_density_sorted,
    look_up,
    window_counts,
    window_lengths,
)
from ghmdet.losses.residual import asl1, residual_harmonized
from ghmdet.losses.softmax import softmax_harmonized
from ghmdet.losses.weighting import at_least_float32, checked_norm, harmonized_sum, own_weights

__all__ = ["asl1_loss", "ghmc_loss", "ghmr_loss", "gradient_density", "harmonize", "region_counts", "softmax_ghmc_loss"]


def gradient_density(g: Tensor, *, epsilon: float, valid: Tensor | None = None, method: str = "exact") -> Tensor:
    """GD(g_i), the number of valid examples within ε/2 of each g_i per length (equations 4 to 6).

    Args:
        g: gradient norms in [0, 1], any shape.
        epsilon: the window's length ε.
        valid: bool, the shape of `g` or broadcasting to it; other examples are not counted and have density 0.
        method: "exact" sorts; "histogram" reads the windows from a fine histogram, within 1e-3 on a loss.

    Returns:
        The density in the shape of `g`, float32, or float64 for float64 `g`.

    >>> gradient_density(torch.tensor([0.50, 0.52, 0.90]), epsilon=0.1)
    tensor([20., 20., 10.])
    """
    checks.check_floating("g", g)
    checks.check_positive("epsilon", epsilon)
    checks.check_one_of("method", method, ("exact", "histogram"))
    norm, valid = checked_norm(g, valid)
    if method == "exact":
        return gradient_density_sorted(norm, epsilon, valid)
    if epsilon < 1e-4:
        raise ValueError(f'epsilon must be at least 1e-4 for a histogram, got {epsilon}; method="exact" sorts')
    cells, scale = fine_cells(epsilon)
    index = cell_index(norm, cells, scale)
    table = window_counts(cell_counts(index, cells, valid), epsilon) / window_lengths(cells, epsilon, g.device)
    density = torch.where(norm.isnan(), torch.nan, look_up(table, norm, cells, scale))
    return density if valid is None else density.masked_fill(~valid, 0)


def region_counts(g: Tensor, *, bins: int, valid: Tensor | None = None) -> Tensor:
    """R_j, the number of valid examples in each of the M = `bins` unit regions: int64 (bins,).

    >>> region_counts(torch.tensor([0.0, 0.1, 0.95, 1.0]), bins=10)
    tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 2])
    """
    checks.check_floating("g", g)
    checks.check_integer_at_least("bins", bins, 1)
    norm, valid = checked_norm(g, valid)
    return cell_counts(cell_index(norm, bins), bins, valid)


def asl1_loss(d: Tensor, *, mu: float = 0.02) -> Tensor:
    """ASL1(d) = √(d² + μ²) − μ for each d (equation 17), computed as d² / (√(d² + μ²) + μ), which does not cancel:
    float32, or float64 for float64 `d`.

    >>> asl1_loss(torch.tensor([0.0, 0.02, 1.0]), mu=0.02)
    tensor([0.0000, 0.0083, 0.9802])
    """
    checks.check_floating("d", d)
    checks.check_mu(mu)
    return asl1(at_least_float32(d), mu)


def harmonize(
    loss: Tensor,
    gradient_norm: Tensor,
    *,
    bins: int = 30,
    valid: Tensor | None = None,
    weight: Tensor | None = None,
    density: str = "regions",
    normalizer: str = "regions",
    max_weight: float | None = None,
) -> Tensor:
    """Σᵢ wᵢ Lᵢ / GD(gᵢ) for any loss per example and its gradient norm in [0, 1]: a scalar."""
    table_of, cells = own_weights(bins, density, normalizer, max_weight)
    return harmonized_sum(loss, gradient_norm, valid, weight, cells, table_of)


def ghmc_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    bins: int = 30,
    valid: Tensor | None = None,
    weight: Tensor | None = None,
    class_dim: int = -1,
    density: str = "regions",
    normalizer: str = "regions",
    max_weight: float | None = None,
) -> Tensor:
    """GHM-C: Σᵢ CE(pᵢ, pᵢ*) / GD(|pᵢ − pᵢ*|), p = sigmoid(logits) (equations 8 and 11).

    Shapes and the meaning of `valid` and `weight` are `ghmdet.GHMC`'s.

    >>> ghmc_loss(torch.zeros(2, 3), torch.tensor([1, -1]), bins=1)  # one region: the mean of cross-entropy, ln 2
    tensor(0.6931)
    """
    table_of, cells = own_weights(bins, density, normalizer, max_weight)
    return binary_harmonized(logits, targets, valid, weight, class_dim, cells, table_of)


def ghmr_loss(
    inputs: Tensor,
    targets: Tensor,
    *,
    mu: float = 0.02,
    bins: int = 10,
    valid: Tensor | None = None,
    weight: Tensor | None = None,
    density: str = "regions",
    normalizer: str = "regions",
    max_weight: float | None = None,
) -> Tensor:
    """GHM-R: Σᵢ ASL1(dᵢ) / GD(|dᵢ| / √(dᵢ² + μ²)), d = inputs − targets (equation 19). Every coordinate is an example.

    Shapes and the meaning of `valid` and `weight` are `ghmdet.GHMR`'s.
    """
    checks.check_mu(mu)
    table_of, cells = own_weights(bins, density, normalizer, max_weight)
    return residual_harmonized(inputs, targets, valid, weight, mu, cells, table_of)


def softmax_ghmc_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    bins: int = 30,
    valid: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    density: str = "regions",
    normalizer: str = "regions",
    max_weight: float | None = None,
) -> Tensor:
    """Σᵢ −log p_y / GD(1 − p_y), p = softmax over dimension 1. Shapes are `torch.nn.functional.cross_entropy`'s.

    >>> softmax_ghmc_loss(torch.zeros(2, 4), torch.tensor([3, 0]), bins=1)  # ln 4
    tensor(1.3863)
    """
    table_of, cells = own_weights(bins, density, normalizer, max_weight)
    return softmax_harmonized(logits, targets, valid, weight, ignore_index, cells, table_of)
