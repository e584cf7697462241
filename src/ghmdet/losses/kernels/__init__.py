"""Fused forms of the losses: the numbers of the plain formulas in fewer passes over memory.

One pass counts the examples of each cell, one makes loss and gradient; nothing of the inputs' size is made but the
gradient. `for_tensors` says which form takes a call:

- "numba": vector code for CPUs, `numba_cpu`.
- "torch": blocks of plain torch, where numba is missing, `torch_cpu`.
- "triton": kernels for NVIDIA GPUs, `triton_gpu`.
- "plain": none of them; the formulas as they stand, differentiated by autograd. For every other device and type, under
  a compiler, and as the oracle that the tests compare the others with.

`implementation(name)` and the variable GHMDET_KERNELS choose by hand.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ghmdet.losses import checks
from ghmdet.losses.kernels.layout import Examples, arrange

__all__ = ["binary_harmonized", "binary_sum", "for_tensors", "implementation", "residual_harmonized"]

_MODULES = {"numba": "numba_cpu", "torch": "torch_cpu", "triton": "triton_gpu", "plain": None}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_chosen: str | None = None


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Within it the losses run as "numba", "torch", "triton" or "plain"."""
    global _chosen
    checks.check_one_of("implementation", name, tuple(_MODULES))
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def for_tensors(inputs: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The fused passes that take these tensors; None where the plain formulas do."""
    if inputs.dtype in _DTYPES and checks.is_plain(inputs, *others):
        return _module(_chosen or os.environ.get("GHMDET_KERNELS") or _default(inputs.device.type))
    return None


@functools.cache
def _default(device: str) -> str:
    if device == "cpu":
        return "numba" if importlib.util.find_spec("numba") else "torch"
    with_triton = device == "cuda" and torch.version.hip is None and importlib.util.find_spec("triton")
    return "triton" if with_triton else "plain"


@functools.cache
def _module(name: str) -> ModuleType | None:
    checks.check_one_of("GHMDET_KERNELS", name, tuple(_MODULES))
    module = _MODULES[name]
    return None if module is None else importlib.import_module(f"ghmdet.losses.kernels.{module}")


@dataclass(frozen=True)
class _Sum:
    """Σ wᵢ Lᵢ · table(gᵢ), but for the table."""

    passes: ModuleType
    examples: Examples
    loss: str  # "binary", "focal" or "asl1"
    parameter: float  # focal loss's α, ASL1's μ
    cells: int

    def count(self) -> tuple[Tensor, bool]:
        counts, in_range = self.passes.count(self.examples, self.loss, self.parameter, self.cells)
        return counts, in_range

    def accumulate(self, table: Tensor, scale: Tensor | float, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        total, gradient = self.passes.accumulate(
            self.examples, self.loss, self.parameter, table, self.cells, scale, with_gradient
        )
        return torch.as_tensor(total, dtype=torch.float32), gradient

    def with_gradient(self, inputs: Tensor, table: Tensor) -> Tensor:
        kept = inputs.device.type == "cpu" and inputs.dtype != torch.float16
        form = _GradientKept if kept else _GradientMadeBackward
        total: Tensor = form.apply(inputs, self, table)
        return total


def binary_harmonized(
    passes: ModuleType,
    logits: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    class_dim: int,
    cells: int,
    table_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """GHM-C's sum; `valid` and `weight` broadcast to the logits."""
    problem = _Sum(passes, arrange(logits, targets, valid, weight, class_dim), "binary", 1.0, cells)
    counts, in_range = problem.count()
    if not in_range:
        _check_targets(logits, targets, valid, class_dim)
    return problem.with_gradient(logits, table_of(counts))


def binary_sum(
    passes: ModuleType,
    logits: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    class_dim: int,
    focal_alpha: float | None = None,
) -> Tensor:
    """Σ wᵢ CE(xᵢ), or the focal loss of γ = 2: one pass, every example in one cell of weight 1."""
    if checks.is_plain_cpu(targets):
        _check_targets(logits, targets, valid, class_dim)
    examples = arrange(logits, targets, valid, weight, class_dim)
    loss, parameter = ("binary", 1.0) if focal_alpha is None else ("focal", focal_alpha)
    one = torch.ones(1, device=logits.device)
    return _Sum(passes, examples, loss, parameter, cells=1).with_gradient(logits, one)


def residual_harmonized(
    passes: ModuleType,
    inputs: Tensor,
    targets: Tensor,
    valid: Tensor | None,
    weight: Tensor | None,
    mu: float,
    cells: int,
    table_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """GHM-R's sum; `valid` and `weight` broadcast to the inputs."""
    examples = arrange(inputs, targets, valid, weight, max(inputs.dim() - 1, 0))
    problem = _Sum(passes, examples, "asl1", mu, cells)
    return problem.with_gradient(inputs, table_of(problem.count()[0]))


def _check_targets(logits: Tensor, targets: Tensor, valid: Tensor | None, class_dim: int) -> None:
    """Refuses a target out of range in a valid place."""
    if targets.dim() == logits.dim():
        checks.check_range("targets", targets, None if valid is None else valid.expand_as(targets))
    else:
        counted = None if valid is None else valid.expand_as(logits).any(class_dim)
        checks.check_class_indices(targets, -1, logits.shape[class_dim], counted, ", or -1 for no class")


class _GradientKept(torch.autograd.Function):
    """One pass makes loss and gradient; the backward pass scales what is kept. For CPUs, where the arithmetic is what
    costs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, problem: _Sum, table: Tensor) -> Tensor:
        total, gradient = problem.accumulate(table, 1.0, ctx.needs_input_grad[0])
        if gradient is not None:
            ctx.save_for_backward(problem.examples.to_inputs(gradient))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        factor = float(outputs[0])
        if not _graph_is_freed():
            gradient = gradient * factor
        elif factor != 1.0:
            gradient = gradient.mul_(factor)
        return gradient, None, None


class _GradientMadeBackward(torch.autograd.Function):
    """The backward pass makes the gradient from the inputs, its factor included. For GPUs, where memory is what costs:
    nothing of the inputs' size lives between the passes. And for float16, which cannot hold a gradient of 1e-9 that
    waits for its factor of 65,536."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, problem: _Sum, table: Tensor) -> Tensor:
        # what the backward pass reads again; autograd refuses if some of it was changed in place meanwhile
        ctx.save_for_backward(inputs, table, *problem.examples.tensors())
        ctx.problem = problem
        return problem.accumulate(table, 1.0, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        table = ctx.saved_tensors[1]
        gradient = ctx.problem.accumulate(table, outputs[0].float(), True)[1]
        return ctx.problem.examples.to_inputs(gradient), None, None


def _graph_is_freed() -> bool:
    """Whether this backward pass is the last one through the graph, so that what it saved may be written over."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and not keeps()
