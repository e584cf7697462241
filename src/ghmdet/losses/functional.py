"""The paper's mathematics as pure functions: no state, no ranks, no momentum.

Every harmonized loss here is Σᵢ L(xᵢ) / GD(gᵢ) over the valid examples (equation 8), GD detached. The modules in
`ghmdet.losses.harmonized` call the same functions and put their smoothed counts where these use the call's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ghmdet.losses import checks, kernels
from ghmdet.losses.density import (
    cell_counts,
    cell_index,
    fine_cells,
    gradient_density_sorted,
    harmonizing_weights,
    look_up,
    window_density,
)

__all__ = ["asl1_loss", "ghmc_loss", "ghmr_loss", "gradient_density", "harmonize", "region_counts", "softmax_ghmc_loss"]

# What turns a call's counts into the table of weights 1 / GD: `harmonizing_weights`, or a module with its state.
TableOf = Callable[[Tensor], Tensor]


def gradient_density(
    g: Tensor, *, epsilon: float, valid: Tensor | None = None, method: str = "exact"
) -> Tensor:
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
    norm, valid = _checked_norm(g, valid)
    if method == "exact":
        return gradient_density_sorted(norm, epsilon, valid)
    cells, scale = fine_cells(epsilon)
    index = cell_index(norm, cells, scale)
    table = window_density(cell_counts(index, cells, valid), epsilon)
    density = torch.where(norm.isnan(), torch.nan, look_up(table, norm, cells, scale))
    return density if valid is None else density.masked_fill(~valid, 0)


def region_counts(g: Tensor, *, bins: int, valid: Tensor | None = None) -> Tensor:
    """R_j, the number of valid examples in each of the M = `bins` unit regions: int64 (bins,).

    >>> region_counts(torch.tensor([0.0, 0.1, 0.95, 1.0]), bins=10)
    tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 2])
    """
    checks.check_floating("g", g)
    checks.check_integer_at_least("bins", bins, 1)
    norm, valid = _checked_norm(g, valid)
    return cell_counts(cell_index(norm, bins), bins, valid)


def asl1_loss(d: Tensor, *, mu: float = 0.02) -> Tensor:
    """ASL1(d) = √(d² + μ²) − μ for each d (equation 17), computed as d² / (√(d² + μ²) + μ), which does not cancel.

    >>> asl1_loss(torch.tensor([0.0, 0.02, 1.0]), mu=0.02)
    tensor([0.0000, 0.0083, 0.9802])
    """
    checks.check_floating("d", d)
    checks.check_positive("mu", mu)
    return _asl1(d, mu)


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
    checks.check_positive("mu", mu)
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


# What the functions above and the modules share: the same sums with the table of weights still open.


def own_weights(bins: int, density: str, normalizer: str, max_weight: float | None) -> tuple[TableOf, int]:
    """The weights from a call's own counts, and the number of cells to count in."""
    check_settings(bins, density, normalizer, max_weight)
    settings = dict(bins=bins, density=density, normalizer=normalizer, max_weight=max_weight)
    return functools.partial(harmonizing_weights, **settings), cells_of(bins, density)


def check_settings(bins: int, density: str, normalizer: str, max_weight: float | None) -> None:
    checks.check_integer_at_least("bins", bins, 1)
    checks.check_one_of("density", density, ("regions", "exact"))
    checks.check_one_of("normalizer", normalizer, ("regions", "occupied"))
    if density == "exact" and normalizer == "occupied":
        raise ValueError('normalizer="occupied" counts unit regions and needs density="regions", got density="exact"')
    if max_weight is not None:
        checks.check_positive("max_weight", max_weight)


def cells_of(bins: int, density: str) -> int:
    """How many cells the gradient norms are counted in: the unit regions, or the fine histogram for ε = 1 / bins."""
    return bins if density == "regions" else fine_cells(1 / bins)[0]


def harmonized_sum(
    loss: Tensor, gradient_norm: Tensor, valid: Tensor | None, weight: Tensor | None, cells: int, table_of: TableOf
) -> Tensor:
    """Σᵢ wᵢ Lᵢ · table(gᵢ) over the valid examples, for a loss per example in the shape of its gradient norm."""
    checks.check_floating("loss", loss)
    checks.check_floating("gradient_norm", gradient_norm)
    checks.check_same_shape("gradient_norm", gradient_norm, "the loss", loss)
    checks.check_valid_and_weight(valid, weight, loss)
    checks.check_devices(loss.device, gradient_norm=gradient_norm, valid=valid, weight=weight)
    weights = norm_weights(gradient_norm, valid, cells, table_of)
    if valid is not None:
        valid = valid.expand_as(loss)
    return _weighted_sum(_at_least_float32(loss), weights, valid, weight)


def norm_weights(gradient_norm: Tensor, valid: Tensor | None, cells: int, table_of: TableOf) -> Tensor:
    """table(gᵢ) for each gradient norm, 0 where not valid: float32, or float64 for float64 norms."""
    checks.check_floating("gradient_norm", gradient_norm)
    checks.check_valid_and_weight(valid, None, gradient_norm)
    checks.check_devices(gradient_norm.device, valid=valid)
    norm, valid = _checked_norm(gradient_norm, valid)
    index = cell_index(norm, cells)
    weights = look_up(table_of(cell_counts(index, cells, valid)), norm, cells)
    weights = torch.where(norm.isnan(), torch.nan, weights)
    return weights if valid is None else weights.masked_fill(~valid, 0)


def binary_harmonized(
    logits: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    class_dim: int,
    cells: int,
    table_of: TableOf,
) -> Tensor:
    """GHM-C with the weights that `table_of` makes of the counts."""
    checks.check_floating("inputs", logits)
    checks.check_tensor("targets", targets)
    checks.check_no_gradient("targets", targets)
    index_targets, class_dim = _reads_indices(logits, targets, class_dim)
    positions = checks.shape_of(targets) if index_targets else None
    checks.check_valid_and_weight(valid, weight, logits, positions)
    checks.check_devices(logits.device, targets=targets, valid=valid, weight=weight)
    if index_targets:
        valid, weight = (_over_classes(tensor, targets, class_dim) for tensor in (valid, weight))
    if kernels.fits(logits, targets, valid, weight):
        return kernels.binary_harmonized(logits, targets, valid, weight, class_dim, cells, table_of)

    x = _at_least_float32(logits)
    if valid is not None:
        x = torch.where(valid, x, 0)  # before the loss, not after: 0 · inf is NaN
    if index_targets:
        known = targets if valid is None else torch.where(valid.expand_as(x).any(class_dim), targets, -1)
        if checks.is_plain_cpu(logits, targets, valid, weight):
            checks.check_class_indices(known, -1, logits.shape[class_dim], None, ", or -1 for no class")
        loss, norm = _binary_terms_from_indices(x, known, class_dim)
    else:
        t = targets.to(x.dtype)
        if valid is not None:
            t = torch.where(valid, t, 0)
        if checks.is_plain_cpu(logits, targets, valid, weight):
            checks.check_range("targets", t, valid)
        loss = F.binary_cross_entropy_with_logits(x, t, reduction="none")
        norm = (x.detach().sigmoid() - t).abs()
    return _counted_sum(loss, norm, valid, weight, cells, table_of)


def residual_harmonized(
    inputs: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    mu: float,
    cells: int,
    table_of: TableOf,
) -> Tensor:
    """GHM-R with the weights that `table_of` makes of the counts."""
    checks.check_floating("inputs", inputs)
    checks.check_floating("targets", targets)
    checks.check_no_gradient("targets", targets)
    checks.check_same_shape("targets", targets, "the inputs", inputs)
    checks.check_valid_and_weight(valid, weight, inputs)
    checks.check_devices(inputs.device, targets=targets, valid=valid, weight=weight)
    if kernels.fits(inputs, targets, valid, weight):
        return kernels.residual_harmonized(inputs, targets, valid, weight, mu, cells, table_of)
    x = _at_least_float32(inputs)
    d = x - targets.to(x.dtype)
    if valid is not None:
        d = torch.where(valid, d, 0)
    loss = _asl1(d, mu)
    norm = d.detach().abs() / (d.detach().square() + mu**2).sqrt()
    return _counted_sum(loss, norm, valid, weight, cells, table_of)


def softmax_harmonized(
    logits: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    cells: int,
    table_of: TableOf,
) -> Tensor:
    """SoftmaxGHMC with the weights that `table_of` makes of the counts."""
    checks.check_floating("inputs", logits)
    checks.check_tensor("targets", targets)
    shape = checks.shape_of(logits)
    positions = shape[:1] + shape[2:] if len(shape) > 1 else ()
    if not shape or targets.shape != positions:
        raise ValueError(
            f"targets must be class indices of the inputs' shape {shape} without dimension "
            f"{1 if len(shape) > 1 else 0}, {positions}, got {checks.shape_of(targets)}"
        )
    checks.check_index_targets(targets, positions, f"class indices, {ignore_index} where ignored")
    checks.check_valid_and_weight(valid, weight, targets)
    checks.check_devices(logits.device, targets=targets, valid=valid, weight=weight)
    counted = targets != ignore_index
    if valid is not None:
        counted = counted & valid
    class_dim = 1 if len(shape) > 1 else 0
    classes = shape[class_dim]
    if checks.is_plain_cpu(logits, targets, valid, weight):
        meaning = f", or {ignore_index} where ignored"
        checks.check_class_indices(targets, 0, classes, counted, meaning)
    x = _at_least_float32(logits)
    x = torch.where(counted.unsqueeze(class_dim), x, 0)
    known, fault = _safe_indices(torch.where(counted, targets, 0), 0, classes)
    loss = F.cross_entropy(x, known, reduction="none") + fault.to(x.dtype)
    norm = -torch.expm1(-loss.detach())  # 1 − p_y, exact also where p_y is near 1
    return _counted_sum(loss, norm, counted, weight, cells, table_of)


def _counted_sum(
    loss: Tensor, norm: Tensor, valid: Tensor | None, weight: Tensor | None, cells: int, table_of: TableOf
) -> Tensor:
    if valid is not None:
        valid = valid.expand_as(norm)
    table = table_of(cell_counts(cell_index(norm, cells), cells, valid))
    return _weighted_sum(loss, look_up(table, norm, cells), valid, weight)


def _weighted_sum(loss: Tensor, weights: Tensor, valid: Tensor | None, weight: Tensor | None) -> Tensor:
    weights = weights.to(loss.dtype)
    if weight is not None:
        weights = weights * weight.to(loss.dtype)
    if valid is not None:
        loss, weights = torch.where(valid, loss, 0), torch.where(valid, weights, 0)
    return (loss * weights).sum()


def _binary_terms_from_indices(x: Tensor, targets: Tensor, class_dim: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy and gradient norm with target 1 at each position's class and 0 elsewhere, without a one-hot:
    every example as a negative, then the positives put in their places."""
    if x.numel() == 0:
        return x, x.detach()
    known, fault = _safe_indices(targets, -1, x.shape[class_dim])
    at = known.clamp(min=0).unsqueeze(class_dim)
    positive = (known >= 0).unsqueeze(class_dim)
    negatives = x * 0 - F.logsigmoid(-x)  # log(1 + eˣ); the product makes an infinite logit non-finite on both sides
    here = torch.where(positive, -F.logsigmoid(x.gather(class_dim, at)), negatives.gather(class_dim, at))
    loss = negatives.scatter(class_dim, at, here + fault.to(x.dtype).unsqueeze(class_dim))
    p = x.detach().sigmoid()
    p_here = p.gather(class_dim, at)
    return loss, p.scatter(class_dim, at, torch.where(positive, 1 - p_here, p_here))


def _safe_indices(targets: Tensor, least: int, classes: int) -> tuple[Tensor, Tensor]:
    """The indices clamped into memory's bounds, and for each what to add to its loss: 0, or NaN where it was outside."""
    inside = (targets >= least) & (targets < classes)
    return targets.long().clamp(min=least, max=classes - 1), torch.where(inside, 0.0, torch.nan)


def _reads_indices(logits: Tensor, targets: Tensor, class_dim: int) -> tuple[bool, int]:
    """Whether the targets are class indices, and the class dimension counted from the front."""
    shape = checks.shape_of(logits)
    if targets.shape == logits.shape:
        if targets.dtype.is_complex:
            raise TypeError(f"targets must be real, got {targets.dtype}")
        return False, max(len(shape) - 1, 0)
    if not -len(shape) <= class_dim < len(shape):
        raise ValueError(f"class_dim must be a dimension of the inputs' shape {shape}, got {class_dim}")
    class_dim %= len(shape)
    positions = shape[:class_dim] + shape[class_dim + 1 :]
    if targets.shape != positions:
        raise ValueError(
            f"targets must have the inputs' shape {shape}, or be class indices of shape {positions} "
            f"(without dimension {class_dim}), got {checks.shape_of(targets)}"
        )
    checks.check_index_targets(targets, positions, "integer class indices, -1 for no class")
    return True, class_dim


def _over_classes(tensor: Tensor | None, targets: Tensor, class_dim: int) -> Tensor | None:
    """A tensor of the targets' shape stands for whole positions."""
    return tensor.unsqueeze(class_dim) if tensor is not None and tensor.shape == targets.shape else tensor


def _checked_norm(g: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradient norms detached, float32 or float64, 0 where not valid; `valid` in their shape."""
    checks.check_valid_and_weight(valid, None, g)
    norm = _at_least_float32(g.detach())
    if valid is not None:
        valid = valid.expand_as(norm)
        norm = torch.where(valid, norm, 0)
    if checks.is_plain_cpu(g, valid):
        checks.check_range("the gradient norm", norm, valid)
    return norm, valid


def _asl1(d: Tensor, mu: float) -> Tensor:
    return d.square() / ((d.square() + mu**2).sqrt() + mu)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
