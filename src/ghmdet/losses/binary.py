"""One-against-rest classification: cross-entropy of single logits, harmonized (GHM-C), plain, or focal.

The formulas as they stand, differentiated by autograd, for any device and under a compiler; on a CPU `kernels` has
the same sums in fewer passes. Class indices stand for their one-hot without building it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ghmdet.losses import checks, kernels
from ghmdet.losses.weighting import TableOf, at_least_float32, counted_sum, weighted_sum

__all__ = ["binary_harmonized", "binary_losses", "binary_sum", "check_binary", "focal_sum"]


def check_binary(
    logits: Tensor, targets: Tensor, valid: Tensor | None, weight: Tensor | None, class_dim: int
) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Checks what every loss of one-against-rest classification takes. Returns the targets, indices as int64, `valid`
    and `weight` as they broadcast to the logits, and the class dimension counted from the front."""
    checks.check_floating("inputs", logits)
    checks.check_real("targets", targets)
    checks.check_integer("class_dim", class_dim)
    checks.check_no_gradient("targets", targets)
    index_targets, class_dim = _reads_indices(logits, targets, class_dim)
    checks.check_valid_and_weight(valid, weight, logits, checks.shape_of(targets) if index_targets else None)
    checks.check_devices(logits.device, targets=targets, valid=valid, weight=weight)
    if index_targets:
        valid, weight = (_over_classes(tensor, targets, class_dim) for tensor in (valid, weight))
        targets = targets.long()
    return targets, valid, weight, class_dim


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
    targets, valid, weight, class_dim = check_binary(logits, targets, valid, weight, class_dim)
    passes = kernels.for_tensors(logits, targets, valid, weight)
    if passes is not None:
        return kernels.binary_harmonized(passes, logits, targets, valid, weight, class_dim, cells, table_of)
    x, loss = binary_losses(logits, targets, valid, class_dim)
    norm = binary_norms(x.detach(), targets, valid, class_dim)
    return counted_sum(loss, norm, valid, weight, cells, table_of)


def binary_sum(logits: Tensor, targets: Tensor, valid: Tensor | None, weight: Tensor | None, class_dim: int) -> Tensor:
    """Σ wᵢ CE(xᵢ), for arguments as `check_binary` returns them."""
    passes = kernels.for_tensors(logits, targets, valid, weight)
    if passes is not None:
        return kernels.binary_sum(passes, logits, targets, valid, weight, class_dim)
    return weighted_sum(binary_losses(logits, targets, valid, class_dim)[1], valid, weight)


def focal_sum(
    logits: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    class_dim: int,
    alpha: float,
    gamma: float,
) -> Tensor:
    """Σ wᵢ αₜ (1 − pₜ)^γ CE(xᵢ), for arguments as `check_binary` returns them."""
    passes = kernels.for_tensors(logits, targets, valid, weight)
    if passes is not None and gamma == 2:  # a power of another exponent has no fused form
        return kernels.binary_sum(passes, logits, targets, valid, weight, class_dim, focal_alpha=alpha)
    x, losses = binary_losses(logits, targets, valid, class_dim)
    norm = binary_norms(x, targets, valid, class_dim)  # 1 − pₜ
    # a logit of −∞ has p = 0, so that its norm is the target
    is_positive = binary_norms(torch.full_like(x.detach(), -math.inf), targets, valid, class_dim)
    balance = (1 - alpha) + (2 * alpha - 1) * is_positive
    return weighted_sum(losses * norm**gamma * balance, valid, weight)


def binary_losses(logits: Tensor, targets: Tensor, valid: Tensor | None, class_dim: int) -> tuple[Tensor, Tensor]:
    """The logits with 0 in ignored places, and each one's cross-entropy."""
    x = at_least_float32(logits)
    if valid is not None:
        x = torch.where(valid, x, 0)  # before the loss, not after: 0 · inf is NaN
    readable = checks.is_plain_cpu(logits, targets, valid)
    if targets.dim() == logits.dim():
        t = _dense(targets, valid, x.dtype)
        if readable:
            checks.check_range("targets", t, None)
        # not binary_cross_entropy_with_logits: at t = 0 it is x − log σ(x), which leaves no digit of an easy negative's
        return x, t * _softplus(-x) + (1 - t) * _softplus(x)
    if x.numel() == 0:
        return x, x
    known = _known_classes(targets, valid, x, class_dim)
    if readable:
        checks.check_class_indices(known, -1, x.shape[class_dim], None, ", or -1 for no class")
    at, positive, fault = _places(known, x.shape[class_dim], class_dim)
    negatives = _softplus(x)
    here = torch.where(positive, _softplus(-x.gather(class_dim, at)), negatives.gather(class_dim, at))
    return x, negatives.scatter(class_dim, at, here + fault.to(x.dtype))


def binary_norms(x: Tensor, targets: Tensor, valid: Tensor | None, class_dim: int) -> Tensor:
    """g = |sigmoid(x) − p*| of each example, for logits with 0 in ignored places."""
    p = x.sigmoid()
    if targets.dim() == x.dim():
        return (p - _dense(targets, valid, x.dtype)).abs()
    if x.numel() == 0:
        return p
    at, positive, _ = _places(_known_classes(targets, valid, x, class_dim), x.shape[class_dim], class_dim)
    p_here = p.gather(class_dim, at)
    return p.scatter(class_dim, at, torch.where(positive, 1 - p_here, p_here))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ), NaN for an infinite x on either side, as in torch's cross-entropy of dense targets."""
    return x * 0 - F.logsigmoid(-x)


def _dense(targets: Tensor, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    t = targets.to(dtype)
    return t if valid is None else torch.where(valid, t, 0)


def _known_classes(targets: Tensor, valid: Tensor | None, x: Tensor, class_dim: int) -> Tensor:
    """Class indices, −1 at positions of which no class counts."""
    return targets if valid is None else torch.where(valid.expand_as(x).any(class_dim), targets, -1)


def _places(known: Tensor, classes: int, class_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each position's own class lies along the class dimension, whether it has one, and 0 or NaN to add to its
    loss: NaN where its index lies outside of the classes."""
    index, fault = checks.bounded_indices(known, -1, classes)
    return tuple(t.unsqueeze(class_dim) for t in (index.clamp(min=0), index >= 0, fault))  # type: ignore[return-value]


def _reads_indices(logits: Tensor, targets: Tensor, class_dim: int) -> tuple[bool, int]:
    """Whether the targets are class indices, and the class dimension counted from the front."""
    shape = checks.shape_of(logits)
    if targets.shape == logits.shape:
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
