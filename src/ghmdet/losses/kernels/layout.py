"""One description of a loss's examples for every fused kernel: three dimensions, contiguous, in memory's order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BY_CLASS", "BY_ELEMENT", "BY_NOTHING", "BY_POSITION", "Examples", "Spread", "arrange"]

# How a smaller tensor stands for all examples: one value an example, one a position (all its classes), one a class;
# or there is no such tensor.
BY_ELEMENT, BY_POSITION, BY_CLASS, BY_NOTHING = 0, 1, 2, 3


@dataclass(frozen=True)
class Spread:
    """Values that stand for all examples (outer, classes, inner)."""

    values: Tensor  # (outer, classes, inner), (outer, 1, inner) or (1, classes, 1), contiguous
    by: int  # BY_ELEMENT, BY_POSITION or BY_CLASS


@dataclass(frozen=True)
class Examples:
    """Inputs with their targets, as (outer, classes, inner) blocks of memory."""

    inputs: Tensor  # (outer, classes, inner), contiguous; any of float32, bfloat16, float16
    targets: Tensor  # the same shape, or class indices (outer, inner), int64
    index_targets: bool
    valid: Spread | None  # bool
    weight: Spread | None  # float32
    order: tuple[int, ...]  # the inputs' dimensions in memory's order
    shape: tuple[int, ...]  # the inputs' shape in that order

    def tensors(self) -> list[Tensor]:
        """Everything but the inputs."""
        return [self.targets, *(spread.values for spread in (self.valid, self.weight) if spread is not None)]

    def to_inputs(self, gradient: Tensor) -> Tensor:
        """A tensor in this layout seen in the inputs' own shape."""
        gradient = gradient.view(self.shape)
        if self.order == tuple(sorted(self.order)):
            return gradient
        return gradient.permute([self.order.index(d) for d in range(len(self.order))])


def arrange(inputs: Tensor, targets: Tensor, valid: Tensor | None, weight: Tensor | None, class_dim: int) -> Examples:
    """Lays the examples out; targets without the class dimension are class indices, int64.

    Nothing of the inputs' size is copied unless their memory has gaps or overlaps, or `valid` or `weight` varies over
    both classes and positions without having the inputs' shape.
    """
    index_targets = targets.dim() < inputs.dim()
    if not index_targets and inputs.is_contiguous() and targets.is_contiguous() and valid is None and weight is None:
        line = (1, 1, inputs.numel())  # nothing refers to classes or positions: one run
        order = tuple(range(inputs.dim()))
        return Examples(inputs.detach().view(line), targets.view(line), False, None, None, order, tuple(inputs.shape))
    strides = inputs.stride()
    order = tuple(sorted(range(inputs.dim()), key=lambda d: -strides[d]))  # stable: ties keep their order
    ordered = inputs.detach().permute(order).contiguous()
    shape = tuple(ordered.shape)
    at = order.index(class_dim) if order else 0
    outer, classes, inner = _split(shape, at)
    if index_targets:
        kept = [d - (d > class_dim) for d in order if d != class_dim]
        targets = targets.permute(kept).contiguous().view(outer, inner)
    else:
        targets = targets.permute(order).contiguous().view(outer, classes, inner)
    spreads = [
        None if t is None else _spread(t.detach().expand(inputs.shape).permute(order), at, (outer, classes, inner))
        for t in (valid, weight)
    ]
    if spreads[1] is not None:
        spreads[1] = Spread(spreads[1].values.float(), spreads[1].by)
    return Examples(ordered.view(outer, classes, inner), targets, index_targets, spreads[0], spreads[1], order, shape)


def _split(shape: tuple[int, ...], at: int) -> tuple[int, int, int]:
    outer, inner = torch.Size(shape[:at]).numel(), torch.Size(shape[at + 1 :]).numel()
    classes = shape[at] if shape else 1
    # one class: positions are examples, one long run of them
    return (1, 1, outer * inner) if classes == 1 else (outer, classes, inner)


def _spread(expanded: Tensor, at: int, shape: tuple[int, int, int]) -> Spread:
    """The smallest form of a tensor that was expanded to the inputs' shape: broadcast dimensions have stride 0."""
    outer, classes, inner = shape
    varies = [size > 1 and stride != 0 for size, stride in zip(expanded.shape, expanded.stride())]
    if classes > 1 and not varies[at]:
        return Spread(expanded.select(at, 0).contiguous().view(outer, 1, inner), BY_POSITION)
    if classes > 1 and not any(varies[:at] + varies[at + 1 :]):
        first = expanded[tuple(slice(None) if d == at else slice(0, 1) for d in range(expanded.dim()))]
        return Spread(first.contiguous().view(1, classes, 1), BY_CLASS)
    return Spread(expanded.contiguous().view(outer, classes, inner), BY_ELEMENT)
