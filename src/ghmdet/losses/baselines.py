"""What the paper compares gradient harmonizing with, each with the normaliser that its row of the tables used.

All are called like the harmonized losses, `criterion(inputs, targets, valid=None, weight=None)`, and like those they
return W × (this rank's share) under `sync`, so that DDP's mean of the gradients is that of one process on the joined
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghmdet.losses import checks
from ghmdet.losses.binary import binary_losses, binary_sum, check_binary, focal_sum
from ghmdet.losses.ranks import Sync, check_sync, number_of_ranks, sum_over_ranks
from ghmdet.losses.residual import asl1, check_residual
from ghmdet.losses.weighting import at_least_float32, weighted_sum

__all__ = ["ASL1", "OHEM", "CrossEntropy", "FocalLoss", "SmoothL1", "prior_bias"]


def prior_bias(probability: float = 0.01) -> float:
    """The last layer's bias that lets every example start at π: −log((1 − π) / π). Focal loss and cross-entropy need
    it, gradient harmonizing does not.

    >>> round(prior_bias(0.01), 3)
    -4.595
    """
    return -math.log((1 - probability) / probability)


class CrossEntropy(nn.Module):
    """Binary cross-entropy, 20 × the sum over pyramid levels of its mean over valid anchors × classes.

    The paper up-weights by 20 so that the loss starts "around 1". With π = 0.01 every example costs 0.01 at first, so
    that five levels' means times 20 make 1.0; the mean over all levels at once would make 0.20.

    Args:
        scale: the factor, 20 in the paper.
        class_dim: as for `ghmdet.GHMC`.

    `levels` gives the sizes of the pyramid levels along the positions' last dimension; without it there is one.
    """

    def __init__(self, scale: float = 20.0, *, class_dim: int = -1, sync: Sync = True) -> None:
        super().__init__()
        check_sync(sync)
        checks.check_positive("scale", scale)
        self.scale, self.class_dim, self.sync = scale, class_dim, sync

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        valid: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        levels: Sequence[int] | None = None,
    ) -> Tensor:
        targets, valid, weight, class_dim = check_binary(inputs, targets, valid, weight, self.class_dim)
        counted = torch.ones((), dtype=torch.bool, device=inputs.device) if valid is None else valid
        counted = counted.expand_as(inputs).sum(class_dim)  # valid examples at each position
        positions = counted.shape[-1] if counted.dim() else 1
        sizes = [positions] if levels is None else list(levels)
        if sum(sizes) != positions:
            raise ValueError(f"levels must add up to the positions' last dimension, {positions}, got {sizes}")
        by_level = torch.split(counted.reshape(-1, positions), sizes, dim=-1)
        totals = sum_over_ranks(torch.stack([part.sum() for part in by_level]), self.sync).clamp(min=1)
        means = self.scale * number_of_ranks(self.sync) / totals
        means = torch.cat([mean.expand(size) for mean, size in zip(means, sizes)])
        means = means.expand(counted.shape).unsqueeze(class_dim)
        weight = means if weight is None else weight * means
        return binary_sum(inputs, targets, valid, weight, class_dim)


class FocalLoss(nn.Module):
    """Focal loss, Σ αₜ (1 − pₜ)^γ CE over all valid examples, divided by the number of positive positions.

    Hard targets: class indices, or dense 0/1. A position is positive where one of its classes is.
    """

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0, *, class_dim: int = -1, sync: Sync = True) -> None:
        super().__init__()
        check_sync(sync)
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
        if not gamma >= 0:
            raise ValueError(f"gamma must be at least 0, got {gamma}")
        self.alpha, self.gamma, self.class_dim, self.sync = alpha, gamma, class_dim, sync

    def forward(
        self, inputs: Tensor, targets: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        targets, valid, weight, class_dim = check_binary(inputs, targets, valid, weight, self.class_dim)
        positive = targets > 0 if targets.dim() == inputs.dim() else targets >= 0
        if targets.dim() == inputs.dim():
            positive = (positive if valid is None else positive & valid).any(class_dim) if inputs.dim() else positive
        elif valid is not None:
            positive = positive & valid.expand_as(inputs).any(class_dim)
        total = focal_sum(inputs, targets, valid, weight, class_dim, self.alpha, self.gamma)
        return _over_count(total, positive.sum(), self.sync)


class OHEM(nn.Module):
    """Cross-entropy on each image's hardest anchors: ranked by loss, thinned by NMS at 0.7, the first 128 kept.

    The strongest variant of the focal-loss paper's table. An anchor's loss is the sum over its classes; the result is
    the mean over all kept anchors. Needs torchvision for NMS.

    Args:
        keep: anchors an image.
        iou: NMS drops an anchor that overlaps a harder one by more.
    """

    def __init__(self, keep: int = 128, iou: float = 0.7, *, sync: Sync = True) -> None:
        super().__init__()
        check_sync(sync)
        checks.check_integer_at_least("keep", keep, 1)
        checks.check_positive("iou", iou)
        self.keep, self.iou, self.sync = keep, iou, sync

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        valid: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        boxes: Tensor,
    ) -> Tensor:
        """`inputs` (images, anchors, classes), `targets` and `valid` (images, anchors), `boxes` (anchors, 4) or
        (images, anchors, 4) as x1, y1, x2, y2."""
        if inputs.dim() != 3 or boxes.shape[-2:] != (*inputs.shape[1:2], 4):
            raise ValueError(
                "inputs must be (images, anchors, classes) and boxes (anchors, 4) or (images, anchors, 4), got "
                f"{checks.shape_of(inputs)} and {checks.shape_of(boxes)}"
            )
        targets, valid, weight, class_dim = check_binary(inputs, targets, valid, weight, -1)
        counts = valid if valid is not None else torch.ones((), dtype=torch.bool, device=inputs.device)
        counts = counts.expand_as(inputs)
        with torch.no_grad():
            losses = torch.where(counts, binary_losses(inputs, targets, valid, class_dim)[1], 0)
            hardness = losses.sum(class_dim).masked_fill(~counts.any(class_dim), -math.inf)
            kept = torch.zeros_like(hardness, dtype=torch.bool)
            for image, every in enumerate(boxes.expand(*inputs.shape[:2], 4)):
                kept[image] = self._hardest(hardness[image], every)
        total = binary_sum(inputs, targets, counts & kept.unsqueeze(class_dim), weight, class_dim)
        return _over_count(total, kept.sum(), self.sync)

    def _hardest(self, hardness: Tensor, boxes: Tensor) -> Tensor:
        """The mask of kept anchors, bool (anchors,)."""
        from torchvision.ops import nms

        order = hardness.argsort(descending=True)[: int((hardness > -math.inf).sum())]
        among = 32 * self.keep  # whether an anchor survives depends on harder ones alone: a prefix is enough
        while True:
            first = order[:among]
            survivors = first[nms(boxes[first].float(), hardness[first], self.iou)]
            if len(survivors) >= self.keep or among >= len(order):
                break
            among *= 4
        mask = torch.zeros_like(hardness, dtype=torch.bool)
        mask[survivors[: self.keep]] = True
        return mask


class SmoothL1(nn.Module):
    """Smooth L1 (equation 15), summed over the four coordinates and divided by the number of boxes.

    d²/2δ for |d| ≤ δ, |d| − δ/2 beyond; δ = 1/9 in the paper. Inputs and targets (boxes, 4) or any equal shapes of at
    least one dimension; a box counts where one of its last dimension is valid.
    """

    def __init__(self, delta: float = 1 / 9, *, sync: Sync = True) -> None:
        super().__init__()
        check_sync(sync)
        checks.check_positive("delta", delta)
        self.delta, self.sync = delta, sync

    def forward(
        self, inputs: Tensor, targets: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        d, number = _differences(inputs, targets, valid, weight)
        losses = F.smooth_l1_loss(d, torch.zeros_like(d), beta=self.delta, reduction="none")
        return _over_count(weighted_sum(losses, valid, weight), number, self.sync)


class ASL1(nn.Module):
    """√(d² + μ²) − μ (equation 17), summed over the four coordinates and divided by the number of boxes."""

    def __init__(self, mu: float = 0.02, *, sync: Sync = True) -> None:
        super().__init__()
        check_sync(sync)
        checks.check_mu(mu)
        self.mu, self.sync = mu, sync

    def forward(
        self, inputs: Tensor, targets: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        d, number = _differences(inputs, targets, valid, weight)
        return _over_count(weighted_sum(asl1(d, self.mu), valid, weight), number, self.sync)


def _differences(inputs: Tensor, targets: Tensor, valid: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """d with 0 in ignored places, and the number of boxes."""
    check_residual(inputs, targets, valid, weight)
    x = at_least_float32(inputs)
    d = x - targets.to(x.dtype)
    if valid is None:
        return d, torch.full((), d[..., 0].numel(), dtype=torch.int64, device=d.device)
    valid = valid.expand_as(d)
    return torch.where(valid, d, 0), valid.any(-1).sum()


def _over_count(total: Tensor, number: Tensor, sync: Sync) -> Tensor:
    """W × total / the number over all ranks."""
    return total * (number_of_ranks(sync) / sum_over_ranks(number, sync).clamp(min=1))
