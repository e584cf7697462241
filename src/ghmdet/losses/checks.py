"""What a loss accepts: each check says the rule, the value that came, and the way out.

Shapes, dtypes and arguments are always checked. Values cost a look at the numbers, so they are checked where that is
free of a device's synchronisation: on the CPU, outside of a compiler's or a fake tensor's trace.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bounded_indices",
    "check_class_indices",
    "check_devices",
    "check_floating",
    "check_index_targets",
    "check_integer",
    "check_integer_at_least",
    "check_momentum",
    "check_mu",
    "check_no_gradient",
    "check_number",
    "check_one_of",
    "check_positive",
    "check_range",
    "check_real",
    "check_same_shape",
    "check_tensor",
    "check_valid_and_weight",
    "is_plain",
    "is_plain_cpu",
    "shape_of",
]


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape as a tuple, the way messages show it."""
    return tuple(tensor.shape)


def is_plain(*tensors: Tensor | None) -> bool:
    """True for real tensors that run eagerly: not traced, faked, or wrapped by a function transform."""
    if torch.compiler.is_compiling():
        return False
    return all(
        tensor is None
        or (
            type(tensor) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        )
        for tensor in tensors
    )


def is_plain_cpu(*tensors: Tensor | None) -> bool:
    """True where values can be read at no cost: such tensors, in main memory."""
    return all(tensor is None or tensor.device.type == "cpu" for tensor in tensors) and is_plain(*tensors)


def check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def check_integer_at_least(name: str, value: Any, least: int) -> None:
    check_integer(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_positive(name: str, value: Any, *, or_infinite: bool = False) -> None:
    check_number(name, value)
    if not (value > 0 and (or_infinite or math.isfinite(value))):
        raise ValueError(f"{name} must be above 0{'' if or_infinite else ' and finite'}, got {value}")


def check_mu(value: Any) -> None:
    check_positive("mu", value)
    if value < 1e-15:
        raise ValueError(f"mu must be at least 1e-15, its square must not vanish in float32, got {value}")


def check_momentum(value: Any) -> None:
    check_number("momentum", value)
    if not 0 <= value < 1:
        raise ValueError(f"momentum must be in [0, 1), got {value}")


def check_one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_floating(name: str, value: Any) -> None:
    check_tensor(name, value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}")


def check_real(name: str, value: Any) -> None:
    check_tensor(name, value)
    if value.dtype.is_complex:
        raise TypeError(f"{name} must be real, got {value.dtype}")


def check_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must have the shape of {like_name}, {shape_of(like)}, got {shape_of(tensor)}")


def check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on the inputs' device {device}, got {tensor.device}")


def check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, it would be dropped; pass {name}.detach()")


def check_index_targets(targets: Tensor, positions: tuple[int, ...], meaning: str) -> None:
    if targets.dtype == torch.bool or targets.dtype.is_floating_point or targets.dtype.is_complex:
        raise TypeError(f"targets of shape {positions} must be {meaning}, got {targets.dtype}")


def check_valid_and_weight(
    valid: Tensor | None,
    weight: Tensor | None,
    like: Tensor,
    positions: tuple[int, ...] | None = None,
    *,
    owner: str = "the inputs'",
) -> None:
    """`valid` is bool, `weight` floating; each broadcasts to the shape of `like` or has the shape of `positions`."""
    rule = f"broadcast to {owner} shape {shape_of(like)}"
    if positions is not None:
        rule = f"have the targets' shape {positions} or {rule}"
    for name, tensor in (("valid", valid), ("weight", weight)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if name == "valid" and tensor.dtype != torch.bool:
            raise TypeError(f"valid must be a bool tensor, got {tensor.dtype}; pass valid > 0")
        if name == "weight":
            check_floating(name, tensor)
            check_no_gradient(name, tensor)
        if tensor.shape != positions and not _broadcasts(shape_of(tensor), shape_of(like)):
            raise ValueError(f"{name} must {rule}, got {shape_of(tensor)}")


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def check_range(name: str, values: Tensor, valid: Tensor | None) -> None:
    """Values in [0, 1] in every valid place; NaN passes, it makes the loss non-finite."""
    wrong = (values < 0) | (values > 1)
    if valid is not None:
        wrong &= valid
    if wrong.any():
        first = values.expand_as(wrong)[wrong][0].item()
        indices = name == "targets" and not values.dtype.is_floating_point
        hint = "; class indices have the inputs' shape without the class dimension" if indices else ""
        raise ValueError(f"{name} must be in [0, 1] in every valid place, got {first}{hint}")


def check_class_indices(targets: Tensor, least: int, classes: int, valid: Tensor | None, meaning: str) -> None:
    """Class indices in [least, classes) in every valid place."""
    wrong = (targets < least) | (targets >= classes)
    if valid is not None:
        wrong &= valid
    if wrong.any():
        raise ValueError(f"class indices must be in [0, {classes}){meaning}, got {targets[wrong][0].item()}")


def bounded_indices(indices: Tensor, least: int, classes: int) -> tuple[Tensor, Tensor]:
    """The indices clamped into memory's bounds, and what to add to the loss of each: 0, or NaN where it was outside.
    For where values are not looked at."""
    inside = (indices >= least) & (indices < classes)
    return indices.clamp(min=least, max=classes - 1), torch.where(inside, 0.0, torch.nan)
