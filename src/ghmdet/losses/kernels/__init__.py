"""Fused forms of the losses: the numbers of the plain formulas in fewer passes over memory.

One pass counts the examples of each cell, one writes loss and gradient. Nothing of the inputs' size is made but the
gradient, which is kept from the forward pass: the backward pass only scales it.

`implementation("plain")` and the variable GHMDET_KERNELS choose by hand: "numba", "torch" (blocks of plain torch, what
runs where numba is missing), or "plain" (the formulas as they stand, differentiated by autograd; tests compare the
others with it).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ghmdet.losses import checks
from ghmdet.losses.kernels import torch_cpu
from ghmdet.losses.kernels.layout import Examples, arrange

__all__ = ["binary_harmonized", "fits", "implementation", "residual_harmonized"]

_NAMES = ("numba", "torch", "plain")
_chosen: str | None = None


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Within it the losses run as "numba", "torch" or "plain"."""
    global _chosen
    checks.check_one_of("implementation", name, _NAMES)
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def fits(inputs: Tensor, *others: Tensor | None) -> bool:
    """Whether a fused form takes these tensors; where not, the plain formulas do, also under a compiler."""
    return (
        checks.is_plain_cpu(inputs, *others)
        and inputs.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and _module() is not None
    )


def binary_harmonized(
    logits: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    class_dim: int,
    cells: int,
    table_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """GHM-C's sum; `valid` and `weight` broadcast to the logits."""
    index_targets = targets.dim() < logits.dim()
    if index_targets and targets.numel():
        least, most = targets.aminmax()
        if least < -1 or most >= logits.shape[class_dim]:
            counted = None if valid is None else valid.expand_as(logits).any(class_dim)
            checks.check_class_indices(targets, -1, logits.shape[class_dim], counted, ", or -1 for no class")
    examples = arrange(logits, targets, valid, weight, class_dim, index_targets)
    counts, in_range = _kernels().count(examples, "binary", 1.0, cells)
    if not in_range:
        checks.check_range("targets", targets, None if valid is None else valid.expand_as(targets))
    return _sum(logits, examples, "binary", 1.0, table_of(counts), cells)


def residual_harmonized(
    inputs: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    mu: float,
    cells: int,
    table_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """GHM-R's sum; `valid` and `weight` broadcast to the inputs."""
    examples = arrange(inputs, targets, valid, weight, max(inputs.dim() - 1, 0), False)
    counts, _ = _kernels().count(examples, "asl1", mu, cells)
    return _sum(inputs, examples, "asl1", mu, table_of(counts), cells)


def _sum(inputs: Tensor, examples: Examples, loss: str, mu: float, table: Tensor, cells: int) -> Tensor:
    total: Tensor = _HarmonizedSum.apply(inputs, examples, loss, mu, table, cells)
    return total


class _HarmonizedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, inputs: Tensor, examples: Examples, loss: str, mu: float, table: Tensor, cells: int
    ) -> Tensor:
        scale = 1.0
        if inputs.dtype == torch.float16:  # weights of 1e-9 have no float16: keep the gradient near 2¹⁴, scale it back
            scale = 2.0**14 / max(float(table.max()), 1e-30)
        total, gradient = _kernels().accumulate(examples, loss, mu, table, cells, scale, ctx.needs_input_grad[0])
        if gradient is not None:
            ctx.save_for_backward(examples.to_inputs(gradient))
            ctx.scale = scale
        return torch.tensor(total, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, *outputs):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        factor = float(outputs[0]) / ctx.scale
        if factor == 1.0:
            return gradient, None, None, None, None, None
        if _graph_is_freed():
            return gradient.mul_(factor), None, None, None, None, None
        return gradient * factor, None, None, None, None, None


def _graph_is_freed() -> bool:
    """Whether this backward pass is the last one through the graph, so that what it saved may be written over."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and not keeps()


def _kernels() -> ModuleType:
    module = _module()
    assert module is not None
    return module


def _module() -> ModuleType | None:
    name = _chosen or os.environ.get("GHMDET_KERNELS") or ("numba" if _has_numba() else "torch")
    checks.check_one_of("GHMDET_KERNELS", name, _NAMES)
    if name == "plain":
        return None
    if name == "torch":
        return torch_cpu
    from ghmdet.losses.kernels import numba_cpu  # numba takes half a second to import: only when first used

    return numba_cpu


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None and importlib.util.find_spec("numpy") is not None
