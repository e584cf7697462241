"""A block of examples, small enough for the first cache: reading it into float32, and writing its gradient."""

from __future__ import annotations

import numpy as np

from ghmdet.losses.kernels.arithmetic import bits_of, f32, float16_bits, float16_value, float_of, jit, u32
from ghmdet.losses.kernels.layout import BY_CLASS, BY_ELEMENT, BY_NOTHING, BY_POSITION

__all__ = [
    "BFLOAT16",
    "BLOCK",
    "FLOAT16",
    "FLOAT32",
    "keep_valid",
    "positives",
    "read",
    "spread",
    "write",
]

BLOCK = 1024  # seven float32 buffers of this length, 28 KB, fit the first cache
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # how the inputs' memory is read; the last two lie there as uint16


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
def keep_valid(valid, by, start, classes, inner, nothing, x, mask, n):
    """Puts `nothing` into ignored places; `mask` is 0 there. Returns how many they are."""
    if by == BY_NOTHING:
        return 0
    spread(valid, by, start, classes, inner, mask, n)
    kept = 0
    for i in range(n):
        kept += mask[i] != 0
        x[i] = x[i] if mask[i] != 0 else nothing
    return n - kept


@jit()
def positives(indices, start, classes, inner, by, mask, at, n):
    """Lists in `at` the examples of a block that are their position's class and not ignored; returns their number."""
    found = 0
    if inner == 1:
        for row in range(start // classes, (start + n - 1) // classes + 1):
            k = indices[row]
            i = row * classes + k - start
            if 0 <= k < classes and 0 <= i < n and (by == BY_NOTHING or mask[i] != 0):
                at[found] = i
                found += 1
        return found
    i = 0
    while i < n:
        row = (start + i) // inner
        column = (start + i) - row * inner
        m = min(inner - column, n - i)
        first = (row // classes) * inner + column
        for j in range(m):
            if indices[first + j] == row % classes and (by == BY_NOTHING or mask[i + j] != 0):
                at[found] = i + j
                found += 1
        i += m
    return found


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
