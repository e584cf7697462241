"""Mutually exclusive classes: cross-entropy over a softmax, harmonized."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ghmdet.losses import checks
from ghmdet.losses.weighting import TableOf, at_least_float32, counted_sum

__all__ = ["softmax_harmonized"]


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
    class_dim = 1 if len(shape) > 1 else 0
    classes = shape[class_dim]
    if classes < 1:
        raise ValueError(f"inputs must have at least one class in dimension {class_dim}, got shape {shape}")
    checks.check_integer("ignore_index", ignore_index)
    checks.check_index_targets(targets, positions, f"class indices, {ignore_index} where ignored")
    checks.check_valid_and_weight(valid, weight, targets, owner="the targets'")
    checks.check_devices(logits.device, targets=targets, valid=valid, weight=weight)
    targets = targets.long()
    counted = targets != ignore_index
    if valid is not None:
        counted = counted & valid
    if checks.is_plain_cpu(logits, targets, valid, weight):
        meaning = f", or ignore_index={ignore_index}"
        checks.check_class_indices(targets, 0, classes, counted, meaning)
    x = at_least_float32(logits)
    x = torch.where(counted.unsqueeze(class_dim), x, 0)
    known, fault = checks.bounded_indices(torch.where(counted, targets, 0), 0, classes)
    # p_y = σ(m) for the margin m = x_y − log Σ exp of the others: no digit is lost where p_y is near 1
    at = known.unsqueeze(class_dim)
    others = x.scatter(class_dim, at, torch.finfo(x.dtype).min).logsumexp(class_dim)
    own = x.gather(class_dim, at).squeeze(class_dim)
    margin = own - others
    # +∞ at the own class or −∞ at another would pass unnoticed
    fault = fault.to(x.dtype) + (own.detach() + x.detach().amin(class_dim)) * 0
    loss = fault - F.logsigmoid(margin)
    norm = (-margin.detach()).sigmoid()
    return counted_sum(loss, norm, counted, weight, cells, table_of)
