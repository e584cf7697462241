"""Regression by differences: ASL1 on box deltas, harmonized (GHM-R)."""

from __future__ import annotations

import torch
from torch import Tensor

from ghmdet.losses import checks, kernels
from ghmdet.losses.weighting import TableOf, at_least_float32, counted_sum

__all__ = ["asl1", "check_residual", "residual_harmonized"]


def check_residual(inputs: Tensor, targets: Tensor, valid: Tensor | None, weight: Tensor | None) -> None:
    """Checks what every loss of box deltas takes."""
    checks.check_floating("inputs", inputs)
    checks.check_real("targets", targets)
    checks.check_no_gradient("targets", targets)
    checks.check_same_shape("targets", targets, "the inputs", inputs)
    checks.check_valid_and_weight(valid, weight, inputs)
    checks.check_devices(inputs.device, targets=targets, valid=valid, weight=weight)


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
    check_residual(inputs, targets, valid, weight)
    passes = kernels.for_tensors(inputs, targets, valid, weight)
    if passes is not None:
        return kernels.residual_harmonized(passes, inputs, targets, valid, weight, mu, cells, table_of)
    x = at_least_float32(inputs)
    d = x - targets.to(x.dtype)
    if valid is not None:
        d = torch.where(valid, d, 0)
    loss = asl1(d, mu)
    norm = d.detach().abs() / (d.detach().square() + mu**2).sqrt()
    return counted_sum(loss, norm, valid, weight, cells, table_of)


def asl1(d: Tensor, mu: float) -> Tensor:
    return d.square() / ((d.square() + mu**2).sqrt() + mu)
