"""What one example contributes, as loops over a block that become vector instructions.

For each loss there are two: one finds only the cell of the gradient norm, one also the loss and its gradient. They
must find the same cell: an example that is counted in one and weighted as of another would meet the weight of a cell
that may be empty. They call the same functions of the same numbers, in the same order.
"""

from __future__ import annotations

import numpy as np

from ghmdet.losses.kernels.arithmetic import exp_negative, f32, jit, log1p_ratio, u32

__all__ = [
    "asl1_cells",
    "asl1_terms",
    "focal_terms",
    "negative_cells",
    "negative_terms",
    "positive_terms",
    "soft_cells",
    "soft_terms",
]


@jit()
def cell_of(position, last):
    """min(⌊g · cells⌋, cells − 1); the comparison is false for NaN, which goes to the last cell."""
    return u32(position if position < last else last)


@jit("contract")
def sides(x):
    """p = sigmoid(x), 1 − p without its rounding, and log(1 + exp(−|x|)). One division serves all three."""
    e = exp_negative(abs(x))
    q = f32(1) / ((f32(1) + e) * (f32(2) + e))
    likelier = q * (f32(2) + e)
    other = e * likelier
    logarithm = log1p_ratio(e * q * (f32(1) + e))
    return (likelier, other, logarithm) if x >= f32(0) else (other, likelier, logarithm)


@jit("contract")
def negative_cells(x, cells, cell, n):
    """The cell of g = sigmoid(x), the norm of an example with target 0."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        p, _, _ = sides(x[i])
        cell[i] = cell_of(p * scale, last)


@jit("contract")
def negative_terms(x, cells, cell, gradient, loss, n):
    """Cross-entropy log(1 + eˣ) of examples with target 0, its gradient p, and the cell of g = p."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        p, _, logarithm = sides(x[i])
        gradient[i] = p
        cell[i] = cell_of(p * scale, last)
        above = x[i] if x[i] > f32(0) else x[i] * f32(0)  # NaN for −∞, as the loss of any infinity
        loss[i] = above + logarithm


@jit("contract")
def positive_terms(x, cells):
    """Cell, gradient p − 1 and loss log(1 + e⁻ˣ) of one example with target 1."""
    _, o, logarithm = sides(x)
    above = -x if x < f32(0) else x * f32(0)
    return cell_of(o * f32(cells), f32(cells - 1)), -o, above + logarithm


@jit("contract")
def soft_cells(x, t, cells, cell, n):
    """The cell of g = |sigmoid(x) − t|."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        p, o, _ = sides(x[i])
        cell[i] = cell_of(abs(p * (f32(1) - t[i]) - o * t[i]) * scale, last)


@jit("contract")
def soft_terms(x, t, cells, cell, gradient, loss, n):
    """Cross-entropy max(x, 0) − x·t + log(1 + exp(−|x|)), its gradient p − t, and the cell of g = |p − t|."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        p, o, logarithm = sides(x[i])
        d = p * (f32(1) - t[i]) - o * t[i]
        gradient[i] = d
        cell[i] = cell_of(abs(d) * scale, last)
        loss[i] = ((x[i] if x[i] > f32(0) else f32(0)) - x[i] * t[i]) + logarithm


@jit("contract")
def focal_terms(alpha, gradient, loss, n):
    """From cross-entropy's terms those of αₜ g² CE, g = |p − t|: its gradient is ± αₜ g² (g + 2(1 − g) CE).

    Targets are 0 or 1, so that the gradient's sign tells which; where it is 0, so is all."""
    for i in range(n):
        g = abs(gradient[i])
        factor = ((f32(1) - alpha) if gradient[i] >= f32(0) else alpha) * g * g
        size = factor * (g + f32(2) * (f32(1) - g) * loss[i])
        gradient[i] = size if gradient[i] >= f32(0) else -size
        loss[i] *= factor


@jit("contract")
def asl1_cells(x, t, mu, cells, cell, n):
    """The cell of g = |d| / √(d² + μ²), d = x − t."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        d = x[i] - t[i]
        root = np.sqrt(d * d + mu * mu)
        q = d * (f32(1) / (root * (root + mu)))
        cell[i] = cell_of(abs(q * (root + mu)) * scale, last)


@jit("contract")
def asl1_terms(x, t, mu, cells, cell, gradient, loss, n):
    """ASL1 = d² / (√(d² + μ²) + μ), its gradient d / √(d² + μ²), and the cell of its norm."""
    scale, last = f32(cells), f32(cells - 1)
    for i in range(n):
        d = x[i] - t[i]
        root = np.sqrt(d * d + mu * mu)
        q = d * (f32(1) / (root * (root + mu)))  # one division serves both quotients
        g = q * (root + mu)
        gradient[i] = g
        cell[i] = cell_of(abs(g) * scale, last)
        loss[i] = q * root * d
