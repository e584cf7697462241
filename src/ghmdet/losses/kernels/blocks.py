"""The fused losses' two passes over a stretch of examples, in blocks that stay in the first cache.

A block is read into float32 buffers: x the logit (or the box delta), t its target. From these each loop makes what
the next one needs, each loop simple enough to become vector instructions. Both passes find an example's cell by the
same function of the same numbers: an example that is counted in one cell and weighted as of another would meet the
weight of a cell that may be empty.
"""

from __future__ import annotations

import numpy as np

from ghmdet.losses.kernels.arithmetic import (
    bits_of,
    exp_negative,
    f32,
    float16_bits,
    float16_value,
    float_of,
    jit,
    log1p_ratio,
    u32,
)

__all__ = ["ASL1", "BFLOAT16", "BINARY", "FLOAT16", "FLOAT32", "FOCAL", "accumulate", "count"]

BLOCK = 1024
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # how the inputs' memory is read; the last two lie there as uint16
BINARY, ASL1, FOCAL = 0, 1, 2  # which loss; its parameter is μ for ASL1, α for focal loss
BY_ELEMENT, BY_POSITION, BY_CLASS, BY_NOTHING = 0, 1, 2, 3  # as in layout.py; 3: there is no such tensor
IGNORED = f32(-1e30)  # a logit whose probability, gradient and loss are exactly 0


@jit()
def read(source, kind, into):
    """A block of inputs as float32."""
    n = source.shape[0]
    if kind == FLOAT32:
        for i in range(n):
            into[i] = f32(source[i])
    elif kind == BFLOAT16:
        for i in range(n):
            into[i] = float_of(u32(u32(source[i]) << u32(16)))
    else:
        for i in range(n):
            into[i] = float16_value(source[i])


@jit()
def spread(source, by, start, classes, inner, into, n):
    """Fills a block with values given per example, position or class, by runs along the innermost dimension."""
    if by == BY_ELEMENT:
        block = source[start : start + n]
        for i in range(n):
            into[i] = block[i]
        return
    length = classes if inner == 1 else inner
    i = 0
    while i < n:
        row = (start + i) // length
        at = (start + i) - row * length
        m = min(length - at, n - i)
        if (inner == 1) == (by == BY_POSITION):  # one value for the run
            into[i : i + m] = source[row if inner == 1 else row % classes]
        else:
            first = at if by == BY_CLASS else (row // classes) * inner + at
            into[i : i + m] = source[first : first + m]
        i += m


@jit()
def place_classes(indices, start, classes, inner, t, n):
    """Puts 1 where an example is its position's class; `t` holds 0 elsewhere."""
    if inner == 1:
        for row in range(start // classes, (start + n - 1) // classes + 1):
            k = indices[row]
            at = row * classes + k - start
            if 0 <= k < classes and 0 <= at < n:
                t[at] = f32(1)
        return
    i = 0
    while i < n:
        row = (start + i) // inner
        at = (start + i) - row * inner
        m = min(inner - at, n - i)
        block = indices[(row // classes) * inner + at :][:m]
        for j in range(m):
            t[i + j] = f32(1) if block[j] == row % classes else f32(0)
        i += m


@jit()
def load(inputs, kind, targets, target_kind, indices, valid, valid_by, start, classes, inner, loss, x, t, mask, n):
    """Reads a block of inputs and targets; returns how many of its examples are ignored.

    Ignored examples get numbers with gradient norm 0, gradient 0 and loss 0: the caller takes them out of cell 0.
    """
    read(inputs[start : start + n], kind, x)
    if indices.shape[0] > 0:
        t[:n] = f32(0)
        place_classes(indices, start, classes, inner, t, n)
    else:
        read(targets[start : start + n], target_kind, t)
    if valid_by == BY_NOTHING:
        return 0
    spread(valid, valid_by, start, classes, inner, mask, n)
    kept = 0
    nothing = f32(0) if loss == ASL1 else IGNORED
    for i in range(n):
        on = mask[i] != 0
        kept += on
        x[i] = x[i] if on else nothing
        t[i] = t[i] if on else f32(0)
    return n - kept


@jit()
def cell_of(position, last):
    """min(⌊g · cells⌋, cells − 1); the comparison is false for NaN, which goes to the last cell."""
    return u32(position if position < last else last)


@jit("contract")
def binary_cells(x, t, cells, cell, n):
    """The cell of g = |sigmoid(x) − t| for each example."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        e = exp_negative(abs(x[i]))
        q = f32(1) / ((f32(1) + e) * (f32(2) + e))
        larger = q * (f32(2) + e)  # 1 / (1 + e), the probability of the likelier side
        p = larger if x[i] >= f32(0) else e * larger
        o = e * larger if x[i] >= f32(0) else larger  # 1 − p without its rounding
        cell[i] = cell_of(abs(p * (f32(1) - t[i]) - o * t[i]) * scale, last)


@jit("contract")
def binary_terms(x, t, cells, position, cell, gradient, loss, n):
    """Cross-entropy max(x, 0) − x·t + log(1 + exp(−|x|)), its gradient p − t, and where g lies, in cells."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        e = exp_negative(abs(x[i]))
        q = f32(1) / ((f32(1) + e) * (f32(2) + e))  # one division serves the probability and the logarithm
        larger = q * (f32(2) + e)
        p = larger if x[i] >= f32(0) else e * larger
        o = e * larger if x[i] >= f32(0) else larger
        d = p * (f32(1) - t[i]) - o * t[i]
        gradient[i] = d
        position[i] = abs(d) * scale
        cell[i] = cell_of(abs(d) * scale, last)
        above = x[i] if x[i] > f32(0) else f32(0)
        loss[i] = (above - x[i] * t[i]) + log1p_ratio(e * q * (f32(1) + e))


@jit("contract")
def focal_terms(t, alpha, gradient, loss, n):
    """From cross-entropy's terms those of αₜ g² CE, g = |p − t|: its gradient is ± αₜ g² (g + 2(1 − g) CE)."""
    for i in range(n):
        g = abs(gradient[i])
        factor = (f32(1) - alpha + (f32(2) * alpha - f32(1)) * t[i]) * g * g
        size = factor * (g + f32(2) * (f32(1) - g) * loss[i])
        gradient[i] = size if gradient[i] >= f32(0) else -size
        loss[i] *= factor


@jit("contract")
def asl1_cells(x, t, mu, cells, cell, n):
    """The cell of g = |d| / √(d² + μ²), d = x − t, for each example."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        d = x[i] - t[i]
        root = np.sqrt(d * d + mu * mu)
        q = d * (f32(1) / (root * (root + mu)))
        cell[i] = cell_of(abs(q * (root + mu)) * scale, last)


@jit("contract")
def asl1_terms(x, t, mu, cells, position, cell, gradient, loss, n):
    """ASL1 = d² / (√(d² + μ²) + μ), its gradient d / √(d² + μ²), and where g lies, in cells."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        d = x[i] - t[i]
        root = np.sqrt(d * d + mu * mu)
        q = d * (f32(1) / (root * (root + mu)))  # one division serves both quotients
        g = q * (root + mu)
        gradient[i] = g
        position[i] = abs(g) * scale
        cell[i] = cell_of(abs(g) * scale, last)
        loss[i] = q * root * d


@jit()
def outside_unit(t, n):
    """How many targets lie outside [0, 1]; NaN is not one of them."""
    found = 0
    for i in range(n):
        found += (t[i] < f32(0)) | (t[i] > f32(1))
    return found


@jit()
def tally(cell, counts, n):
    """Counts a block's cells. An increment waits for the one before of the same counter; four histograms in turn do
    not, where there are so few cells that neighbours often share one."""
    if counts.shape[0] == 4:
        whole = n // 4 * 4
        for i in range(0, whole, 4):
            counts[0, cell[i]] += 1
            counts[1, cell[i + 1]] += 1
            counts[2, cell[i + 2]] += 1
            counts[3, cell[i + 3]] += 1
    else:
        whole = 0
    for i in range(whole, n):
        counts[0, cell[i]] += 1


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
    """First pass: adds the stretch's examples to `counts`, (4, cells) or (1, cells); returns how many targets are not
    in [0, 1]."""
    x, t, cell = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, u32)
    mask = np.empty(BLOCK, np.uint8)
    wrong = 0
    parameter = f32(parameter)
    while start < stop:
        n = min(BLOCK, stop - start)
        ignored = load(
            inputs, kind, targets, target_kind, indices, valid, valid_by, start, classes, inner, loss, x, t, mask, n
        )
        if loss == BINARY:
            if indices.shape[0] == 0:
                wrong += outside_unit(t, n)
            binary_cells(x, t, cells, cell, n)
        else:
            asl1_cells(x, t, parameter, cells, cell, n)
        tally(cell, counts, n)
        counts[0, 0] -= ignored
        start += n
    return wrong


@jit()
def weights_of(position, cell, table, cells, into, n):
    """The table's weight of each example: by its cell, or between the cell's two edges."""
    if table.shape[0] == cells:
        for i in range(n):
            into[i] = table[cell[i]]
        return
    for i in range(n):
        lower = table[cell[i]]
        share = position[i] - f32(cell[i])
        into[i] = lower + (share if share < f32(1) else f32(1)) * (table[cell[i] + u32(1)] - lower)


@jit("contract", "reassoc", "nsz")
def weighted_sum(weight, loss, n):
    """Σ wᵢ Lᵢ of a block, in as many partial sums as a vector has lanes."""
    total = f32(0)
    for i in range(n):
        total += weight[i] * loss[i]
    return total


@jit()
def write(weight, gradient, scale, kind, into):
    """The block's gradient wᵢ · L′ᵢ · scale, rounded to the inputs' type."""
    n = into.shape[0]
    if kind == FLOAT32:
        for i in range(n):
            into[i] = weight[i] * gradient[i] * scale
    elif kind == BFLOAT16:
        for i in range(n):
            value = weight[i] * gradient[i] * scale
            bits = bits_of(value)
            rounded = u32(bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1)))  # to nearest, ties to even
            into[i] = np.uint16((rounded if value == value else u32(0x7FC00000)) >> u32(16))
    else:
        for i in range(n):
            into[i] = float16_bits(weight[i] * gradient[i] * scale)


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
    x, t, position = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, f32)
    gradient, losses, weights = np.empty(BLOCK, f32), np.empty(BLOCK, f32), np.empty(BLOCK, f32)
    factors, cell = np.empty(BLOCK, f32), np.empty(BLOCK, u32)
    mask = np.empty(BLOCK, np.uint8)
    total = 0.0
    parameter = f32(parameter)
    scale = f32(scale)
    while start < stop:
        n = min(BLOCK, stop - start)
        load(inputs, kind, targets, target_kind, indices, valid, valid_by, start, classes, inner, loss, x, t, mask, n)
        if loss != ASL1:
            binary_terms(x, t, cells, position, cell, gradient, losses, n)
            if loss == FOCAL:
                focal_terms(t, parameter, gradient, losses, n)
        else:
            asl1_terms(x, t, parameter, cells, position, cell, gradient, losses, n)
        weights_of(position, cell, table, cells, weights, n)
        if weight_by != BY_NOTHING:
            spread(weight, weight_by, start, classes, inner, factors, n)
            for i in range(n):
                weights[i] *= factors[i]
        if valid_by != BY_NOTHING:
            for i in range(n):
                weights[i] = weights[i] if mask[i] != 0 else f32(0)
        total += np.float64(weighted_sum(weights, losses, n))
        if gradients.shape[0] > 0:
            write(weights, gradient, scale, kind, gradients[start : start + n])
        start += n
    return total
