"""The fused passes as Triton kernels, for GPUs.

A program walks over the examples in blocks. In the first pass it keeps its histogram in registers and adds it to the
counts once at its end; the second makes one partial sum a program, or, in the backward pass, the gradient.
Nothing waits for the host: values are not checked, an index outside of the classes makes the loss NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghmdet.losses.kernels.layout import BY_NOTHING, Examples

__all__ = ["accumulate", "count"]

_LOSSES = {"binary": 0, "asl1": 1, "focal": 2}
_BLOCK = 1024
_REGISTER_CELLS = 127  # a histogram of up to this many cells and one more is kept in registers
_PROGRAMS = 132 * 8  # as many as a large GPU holds at a time; more blocks than that are walked over


def count(examples: Examples, loss: str, parameter: float, cells: int) -> tuple[Tensor, bool]:
    """R, int64 (cells,), and True: the targets' range is not looked at."""
    counts = torch.zeros(cells, dtype=torch.int64, device=examples.inputs.device)
    size = examples.inputs.numel()
    if size:
        _count_kernel[_grid(size)](
            *_arguments(examples),
            counts,
            parameter,
            size,
            *examples.inputs.shape[1:],
            cells,
            triton.next_power_of_2(cells + 1) if cells <= _REGISTER_CELLS else 0,
            _LOSSES[loss],
            examples.index_targets,
            BY_NOTHING if examples.valid is None else examples.valid.by,
            examples.inputs.shape[2] == 1,
            _BLOCK,
        )
    return counts, True


def accumulate(
    examples: Examples,
    loss: str,
    parameter: float,
    table: Tensor,
    cells: int,
    scale: Tensor | float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Σ wᵢ Lᵢ · table(gᵢ); or with a gradient that, times `scale`, and a sum of 0 that nobody reads."""
    inputs = examples.inputs
    size = inputs.numel()
    gradient = torch.empty_like(inputs) if with_gradient else None
    grid = _grid(size)
    sums = torch.zeros(grid[0], dtype=torch.float64, device=inputs.device)
    if size:
        _accumulate_kernel[grid](
            *_arguments(examples),
            examples.weight.values if examples.weight is not None else inputs,
            table.float().contiguous(),
            scale if isinstance(scale, Tensor) else torch.full((), scale, device=inputs.device),
            sums,
            gradient if gradient is not None else inputs,
            parameter,
            size,
            *inputs.shape[1:],
            cells,
            table.numel() > cells,
            _LOSSES[loss],
            examples.index_targets,
            BY_NOTHING if examples.valid is None else examples.valid.by,
            BY_NOTHING if examples.weight is None else examples.weight.by,
            inputs.shape[2] == 1,
            with_gradient,
            _BLOCK,
        )
    return sums.sum(), gradient


def _arguments(examples: Examples) -> tuple[Tensor, Tensor, Tensor]:
    valid = examples.inputs if examples.valid is None else examples.valid.values.view(torch.uint8)
    targets = examples.targets
    return examples.inputs, targets.view(torch.uint8) if targets.dtype == torch.bool else targets, valid


def _grid(size: int) -> tuple[int]:
    return (max(1, min(_PROGRAMS, triton.cdiv(size, _BLOCK))),)


@triton.jit
def _place(block, within, CLASSES: tl.constexpr, inner, INNER_IS_ONE: tl.constexpr):
    """The class of each example and its position, (outer, inner) in one number.

    64-bit division once a block, 32-bit division by a constant for each example: the other way round it costs more
    than all the rest.
    """
    if INNER_IS_ONE:
        local = (block % CLASSES).to(tl.int32) + within
        return local % CLASSES, block // CLASSES + local // CLASSES
    local = (block % inner).to(tl.int32) + within
    row = block // inner + local // inner  # (outer, classes) in one number
    of_class = ((block // inner) % CLASSES).to(tl.int32) + local // inner
    return of_class % CLASSES, row // CLASSES * inner + local % inner


@triton.jit
def _read(values, at, of_class, position, on, BY: tl.constexpr):
    """Values that stand for the examples as layout.py's BY_ELEMENT, BY_POSITION or BY_CLASS says: 0, 1, 2."""
    if BY == 0:
        return tl.load(values + at, mask=on, other=0)
    if BY == 1:
        return tl.load(values + position, mask=on, other=0)
    return tl.load(values + of_class, mask=on, other=0)


@triton.jit
def _load(
    inputs,
    targets,
    valid,
    block,
    size,
    CLASSES: tl.constexpr,
    inner,
    INDEXED: tl.constexpr,
    VALID: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block's x and t, which of its examples count, and where they stand."""
    within = tl.arange(0, BLOCK)
    at = block + within
    on = at < size
    of_class, position = _place(block, within, CLASSES, inner, INNER)
    if VALID != 3:
        on = on & (_read(valid, at, of_class, position, on, VALID) != 0)
    x = tl.load(inputs + at, mask=on, other=0).to(tl.float32)
    if INDEXED:
        index = tl.load(targets + position, mask=on, other=-1)
        outside = (index < -1) | (index >= CLASSES)
        t = tl.where(index == of_class, 1.0, 0.0)
        t = tl.where(outside, float("nan"), t)
    else:
        t = tl.load(targets + at, mask=on, other=0).to(tl.float32)
    return x, t, on, at, of_class, position


@triton.jit
def _terms(x, t, parameter, LOSS: tl.constexpr):
    """Each example's gradient norm, loss, and the loss's gradient."""
    if LOSS == 1:
        d = x - t
        root = tl.sqrt_rn(d * d + parameter * parameter)
        gradient = d / root
        return tl.abs(gradient), d * d / (root + parameter), gradient
    e = tl.exp(-tl.abs(x))
    likelier = 1 / (1 + e)
    p = tl.where(x >= 0, likelier, e * likelier)
    o = tl.where(x >= 0, e * likelier, likelier)
    gradient = p * (1 - t) - o * t
    # log(1 + e) without the rounding of 1 + e: for small e the ratio of the rounded sum's log to its excess
    sum_ = 1 + e
    log = tl.where(sum_ == 1, e, tl.log(sum_) * (e / tl.where(sum_ == 1, 1.0, sum_ - 1)))
    loss = tl.maximum(x, 0) - x * t + log
    loss = tl.where(x == x, loss, float("nan"))
    norm = tl.abs(gradient)
    if LOSS == 2:
        factor = (1 - parameter + (2 * parameter - 1) * t) * norm * norm
        size = factor * (norm + 2 * (1 - norm) * loss)
        return norm, factor * loss, tl.where(gradient >= 0, size, -size)
    return norm, loss, gradient


@triton.jit
def _cell(norm, cells):
    """min(⌊g · cells⌋, cells − 1); NaN goes to the last cell."""
    position = norm * cells
    return tl.where(position < cells - 1, position, cells - 1).to(tl.int32)


@triton.jit
def _count_kernel(
    inputs,
    targets,
    valid,
    counts,
    parameter,
    size,
    CLASSES: tl.constexpr,
    inner,
    cells,
    REGISTERS: tl.constexpr,
    LOSS: tl.constexpr,
    INDEXED: tl.constexpr,
    VALID: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    if REGISTERS > 0:
        histogram = tl.zeros([REGISTERS], dtype=tl.int32)
    for turn in range(tl.cdiv(size - start, step)):
        block = start + turn * step
        x, t, on, _, _, _ = _load(inputs, targets, valid, block, size, CLASSES, inner, INDEXED, VALID, INNER, BLOCK)
        norm, _, _ = _terms(x, t, parameter, LOSS)
        cell = _cell(norm, cells)
        if REGISTERS > 0:
            histogram += tl.histogram(tl.where(on, cell, REGISTERS - 1), REGISTERS)
        else:
            tl.atomic_add(counts + cell, 1, mask=on, sem="relaxed")
    if REGISTERS > 0:
        each = tl.arange(0, REGISTERS)
        tl.atomic_add(counts + each, histogram.to(tl.int64), mask=each < cells, sem="relaxed")


@triton.jit
def _accumulate_kernel(
    inputs,
    targets,
    valid,
    weight,
    table,
    scale,
    sums,
    gradients,
    parameter,
    size,
    CLASSES: tl.constexpr,
    inner,
    cells,
    BETWEEN: tl.constexpr,
    LOSS: tl.constexpr,
    INDEXED: tl.constexpr,
    VALID: tl.constexpr,
    WEIGHT: tl.constexpr,
    INNER: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    factor = tl.load(scale)
    total = tl.zeros([], dtype=tl.float64)
    for turn in range(tl.cdiv(size - start, step)):
        block = start + turn * step
        x, t, on, at, of_class, position = _load(
            inputs, targets, valid, block, size, CLASSES, inner, INDEXED, VALID, INNER, BLOCK
        )
        norm, loss, gradient = _terms(x, t, parameter, LOSS)
        cell = _cell(norm, cells)
        weights = tl.load(table + cell, mask=on, other=0)
        if BETWEEN:
            upper = tl.load(table + cell + 1, mask=on, other=0)
            weights += tl.minimum(norm * cells - cell, 1.0) * (upper - weights)
        if WEIGHT != 3:
            weights *= _read(weight, at, of_class, position, on, WEIGHT)
        if GRADIENT:
            value = tl.where(on, weights * gradient * factor, 0.0)
            tl.store(gradients + at, value.to(gradients.dtype.element_ty), mask=at < size)
        else:
            total += tl.sum(tl.where(on, weights * loss, 0.0), 0).to(tl.float64)
    if not GRADIENT:
        tl.store(sums + tl.program_id(0), total)
