"""The scalar arithmetic of the fused losses, written so that LLVM turns a loop over it into vector instructions.

numba calls a library function for an exponential or a logarithm, one number at a time. Written out as polynomials
they are a handful of fused multiply-adds, sixteen numbers at a time where the processor has AVX-512.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["bits_of", "exp_negative", "float16_bits", "float16_value", "float_of", "jit", "log1p_ratio"]

f32 = np.float32
u32 = np.uint32
i32 = np.int32


def jit(*fast: str) -> Callable[[Callable[..., Any]], Any]:
    """Compiles without the interpreter's lock and with IEEE division; `fast` names what LLVM may reorder.

    The machine code is kept on disk beside the package, or in the user's cache; where neither can be written, it is
    compiled anew in each process.
    """

    def compile(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fast)}
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # numba: no locator available, the caches are read-only
            return njit(**options)(function)

    return functools.wraps(jit)(compile)


@intrinsic
def float_of(context, bits):
    """The float32 whose bits these are."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of(context, value):
    """The bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@jit("contract")
def exp_negative(a):
    """exp(−a) for a ≥ 0, to 8e-8 relative; 0 from a = 87 on, where float32 ends.

    exp(−a) = 2ᵏ · exp(r) with |r| ≤ ln 2 / 2: k goes into the exponent's bits, exp(r) is a polynomial.
    """
    z = -a if a < f32(87) else f32(-87)
    k = i32(z * f32(1.4426950408889634) - f32(0.5))  # to the nearest, since z ≤ 0 is cut towards 0
    r = z - f32(k) * f32(0.693145751953125)  # ln 2 in two parts, the first exact in its product with k
    r = r - f32(k) * f32(1.428606765330187e-06)
    p = f32(0.001381459836566525)  # (exp(r) − 1 − r) / r², the largest error made least: 3e-9 of exp(r)
    p = p * r + f32(0.00836871689808562)
    p = p * r + f32(0.04166838805113442)
    p = p * r + f32(0.16666520631511733)
    p = p * r + f32(0.49999993447767593)
    p = p * (r * r) + r + f32(1)
    return p * float_of(u32(u32(k + i32(127)) << u32(23))) if a < f32(87) else f32(0)


@jit("contract")
def log1p_ratio(s):
    """log(1 + e) for s = e / (2 + e), 0 ≤ e ≤ 1: it is 2 artanh(s), odd in s, a polynomial in s² to 4e-9."""
    q = s * s
    y = f32(0.28191546293703096)
    y = y * q + f32(0.27957666002317644)
    y = y * q + f32(0.40025114309243087)
    y = y * q + f32(0.6666631014519698)
    y = y * q + f32(2.0000000080787346)
    return y * s


@jit()
def float16_value(half):
    """The float32 of a float16's bits."""
    bits = u32(half)
    magnitude = u32((bits & u32(0x7FFF)) << u32(13))
    # as a float32 the exponent is 112 too low; the product also lifts denormals
    scaled = bits_of(float_of(magnitude) * f32(5.192296858534828e33))
    finite = scaled if magnitude < u32(0x0F800000) else u32(magnitude | u32(0x7F800000))
    return float_of(u32(finite | u32((bits & u32(0x8000)) << u32(16))))


@jit()
def float16_bits(value):
    """The float16 nearest to a float32, as bits; ties to even, NaN stays NaN."""
    bits = bits_of(value)
    sign = u32((bits >> u32(16)) & u32(0x8000))
    magnitude = u32(bits & u32(0x7FFFFFFF))
    # a normal result: rebias the exponent, add half a last place less one, and one more where the last bit is odd
    normal = u32(u32(magnitude - u32(0x37FFF001) + ((magnitude >> u32(13)) & u32(1))) >> u32(13))
    # a denormal result: adding 0.5 shifts the mantissa to where float16 has it, rounded by the hardware
    denormal = u32(bits_of(float_of(magnitude) + f32(0.5)) - u32(0x3F000000))
    result = normal if magnitude >= u32(0x38800000) else denormal
    result = result if magnitude < u32(0x47800000) else u32(0x7C00)  # infinity from 65,536 on; 65,520 rounds there
    return np.uint16(sign | (result if magnitude <= u32(0x7F800000) else u32(0x7E00)))
