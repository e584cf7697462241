"""The fused losses' two passes over a stretch of examples: one counts, one makes loss and gradient.

From a block's logits x (or predicted deltas) and targets t each loop makes what the next one needs. Class indices never
become targets: every example is taken as a negative, t = 0, and the few positives are put right one by one.
"""

from __future__ import annotations

import numpy as np

from ghmdet.losses.kernels.arithmetic import f32, jit, u32
from ghmdet.losses.kernels.blocks import BLOCK, keep_valid, positives, read, spread, write
from ghmdet.losses.kernels.layout import BY_NOTHING
from ghmdet.losses.kernels.terms import (
    asl1_cells,
    asl1_terms,
    focal_terms,
    negative_cells,
    negative_terms,
    positive_terms,
    soft_cells,
    soft_terms,
)

__all__ = ["ASL1", "BINARY", "FOCAL", "accumulate", "count", "outside_classes"]

BINARY, ASL1, FOCAL = 0, 1, 2  # which loss; its parameter is μ for ASL1, α for focal loss
IGNORED = f32(-1e30)  # a logit whose probability, gradient and loss are exactly 0


@jit()
def tally(cell, counts, n):
    """Counts a block's cells. An increment waits for the one before of the same counter; four histograms in turn do
    not, where there are so few cells that neighbours often share one."""
    whole = 0
    if counts.shape[0] == 4:
        whole = n // 4 * 4
        for i in range(0, whole, 4):
            counts[0, cell[i]] += 1
            counts[1, cell[i + 1]] += 1
            counts[2, cell[i + 2]] += 1
            counts[3, cell[i + 3]] += 1
    for i in range(whole, n):
        counts[0, cell[i]] += 1


@jit()
def outside_unit(t, n):
    """How many targets lie outside [0, 1]; NaN is not one of them."""
    found = 0
    for i in range(n):
        found += (t[i] < f32(0)) | (t[i] > f32(1))
    return found


@jit()
def outside_classes(indices, classes):
    """How many class indices are neither −1 nor a class."""
    found = 0
    for i in range(indices.shape[0]):
        found += (indices[i] < -1) | (indices[i] >= classes)
    return found


@jit()
def count(
    inputs,
    kind,
    targets,
    target_kind,
    indices,
    valid,
    valid_by,
    classes,
    inner,
    loss,
    parameter,
    cells,
    start,
    stop,
    counts,
):
    """First pass: adds the stretch's examples to `counts`; returns how many targets are not in [0, 1]."""
    x, t, cell = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, u32)
    mask, at = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.int32)
    indexed = indices.shape[0] > 0
    nothing = f32(0) if loss == ASL1 else IGNORED
    parameter = f32(parameter)
    wrong = 0
    while start < stop:
        n = min(BLOCK, stop - start)
        read(inputs[start : start + n], kind, x)
        ignored = keep_valid(valid, valid_by, start, classes, inner, nothing, x, mask, n)
        if indexed:
            found = positives(indices, start, classes, inner, valid_by, mask, at, n)
            negative_cells(x, cells, cell, n)
            for i in at[:found]:
                cell[i] = positive_terms(x[i], cells)[0]
        else:
            read(targets[start : start + n], target_kind, t)
            clear(t, mask, valid_by != BY_NOTHING, n)
            if loss == ASL1:
                asl1_cells(x, t, parameter, cells, cell, n)
            else:
                wrong += outside_unit(t, n)
                soft_cells(x, t, cells, cell, n)
        tally(cell, counts, n)
        counts[0, 0] -= ignored
        start += n
    return wrong


@jit()
def clear(values, mask, masked, n):
    """Puts 0 into ignored places."""
    if masked:
        for i in range(n):
            values[i] = values[i] if mask[i] != 0 else f32(0)


@jit()
def weights_of(gradient, cell, table, cells, into, n):
    """The table's weight of each example: by its cell, or between the cell's two edges, by where its norm, the
    gradient's size, lies."""
    if table.shape[0] == cells:
        for i in range(n):
            into[i] = table[cell[i]]
        return
    scale = f32(cells)
    for i in range(n):
        lower = table[cell[i]]
        share = abs(gradient[i]) * scale - f32(cell[i])
        into[i] = lower + (share if share < f32(1) else f32(1)) * (table[cell[i] + u32(1)] - lower)


@jit("contract", "reassoc", "nsz")
def weighted_sum(weight, loss, n):
    """Σ wᵢ Lᵢ of a block, in as many partial sums as a vector has lanes."""
    total = f32(0)
    for i in range(n):
        total += weight[i] * loss[i]
    return total


@jit()
def accumulate(
    inputs,
    kind,
    targets,
    target_kind,
    indices,
    valid,
    valid_by,
    weight,
    weight_by,
    classes,
    inner,
    loss,
    parameter,
    cells,
    table,
    scale,
    start,
    stop,
    gradients,
):
    """Second pass: the stretch's Σ wᵢ Lᵢ · table(gᵢ), and its gradient into `gradients` unless that is empty."""
    x, t, cell = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, u32)
    gradient, losses, weights = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, f32)
    factors, mask, at = np.empty(BLOCK, f32), np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.int32)
    masked = valid_by != BY_NOTHING
    nothing = f32(0) if loss == ASL1 else IGNORED
    parameter, scale = f32(parameter), f32(scale)
    total = 0.0
    while start < stop:
        n = min(BLOCK, stop - start)
        read(inputs[start : start + n], kind, x)
        keep_valid(valid, valid_by, start, classes, inner, nothing, x, mask, n)
        if indices.shape[0] > 0:
            negative_terms(x, cells, cell, gradient, losses, n)
            for i in at[: positives(indices, start, classes, inner, valid_by, mask, at, n)]:
                cell[i], gradient[i], losses[i] = positive_terms(x[i], cells)
        else:
            read(targets[start : start + n], target_kind, t)
            clear(t, mask, masked, n)
            if loss == ASL1:
                asl1_terms(x, t, parameter, cells, cell, gradient, losses, n)
            else:
                soft_terms(x, t, cells, cell, gradient, losses, n)
        weights_of(gradient, cell, table, cells, weights, n)
        if loss == FOCAL:
            focal_terms(parameter, gradient, losses, n)
        if weight_by != BY_NOTHING:
            spread(weight, weight_by, start, classes, inner, factors, n)
            for i in range(n):
                weights[i] *= factors[i]
        clear(weights, mask, masked, n)
        total += np.float64(weighted_sum(weights, losses, n))
        if gradients.shape[0] > 0:
            write(weights, gradient, scale, kind, gradients[start : start + n])
        start += n
    return total
