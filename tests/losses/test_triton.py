"""The GPU's kernels, interpreted on the CPU: the same numbers as the plain formulas.

The file is also the script that runs under Triton's interpreter, which must be asked for before Triton is imported.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from ghmdet.losses import GHMC, GHMR, CrossEntropy, FocalLoss
from ghmdet.losses.kernels import implementation


def cases():
    torch.manual_seed(0)
    logits, classes = torch.randn(3, 17, 30) * 4 - 2, torch.randint(-1, 30, (3, 17))
    valid, every = torch.rand(3, 17) > 0.3, torch.rand(3, 17, 30) > 0.3
    picture = (torch.randn(2, 5, 6, 7), torch.randint(-1, 5, (2, 6, 7)))
    deltas = torch.randn(50, 4) * 0.1
    yield "index", GHMC(), (logits, classes)
    yield "valid positions", GHMC(), (logits, classes, valid)
    yield "valid examples, class weights", GHMC(), (logits, classes, every, torch.rand(1, 30))
    yield "weighted positions", GHMC(max_weight=5.0), (logits, classes, None, torch.rand(3, 17))
    yield "soft", GHMC(bins=7), (logits, torch.rand(3, 17, 30), every)
    yield "bool", GHMC(), (logits, torch.rand(3, 17, 30) > 0.9)
    yield "class in the middle", GHMC(class_dim=1), (*picture, torch.rand(2, 6, 7) > 0.3)
    yield "bfloat16", GHMC(), (logits.bfloat16(), classes, valid)
    yield "exact", GHMC(density="exact"), (logits, classes, valid)
    yield "empty", GHMC(), (torch.zeros(0, 4), torch.zeros(0).long())
    yield "boxes", GHMR(), (deltas, torch.zeros(50, 4))
    yield "valid boxes", GHMR(density="exact"), (deltas, torch.zeros(50, 4), torch.rand(50, 1) > 0.4)
    yield "cross-entropy", CrossEntropy(), (logits, classes, valid)
    yield "focal", FocalLoss(), (logits, classes, valid)


def tolerance(criterion, gradient):
    """How close a gradient must be. Between the edges of a fine cell the exact density's weight may double, and a last
    bit of g moves it a hundredth of a cell: there the interface's 1e-3 holds."""
    if gradient.dtype != torch.float32:
        return {"rtol": 1e-2, "atol": 1e-5}
    exact = hasattr(criterion, "harmonizer") and criterion.harmonizer.density == "exact"
    return {"rtol": 1e-3 if exact else 5e-5, "atol": 1e-7}


def value_and_gradient(name, criterion, inputs, *rest):
    inputs = inputs.detach().requires_grad_()
    with implementation(name):
        loss = criterion(inputs, *rest)
        (3 * loss).backward()
    return loss.detach(), inputs.grad


def compare() -> None:
    from ghmdet.losses import checks, kernels

    # as on a GPU, although the interpreter's tensors lie on the CPU
    kernels._GradientKept = kernels._GradientMadeBackward
    checks.is_plain_cpu = lambda *tensors: False
    for name, criterion, arguments in cases():
        loss, gradient = value_and_gradient("triton", criterion, *arguments)
        if hasattr(criterion, "reset"):
            criterion.reset()
        expected, slow = value_and_gradient("plain", criterion, *arguments)
        close = tolerance(criterion, slow)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(gradient, slow, **close, msg=lambda m, n=name: f"{n}: {m}")
        print("equal:", name)
    for name in ("triton", "plain"):
        with implementation(name):
            outside = GHMC()(torch.zeros(2, 3), torch.tensor([0, 3]))
        assert outside.isnan(), "an index outside of the classes must make the loss NaN"


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_interpreted_kernels_equal_the_plain_formulas():
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal:") == len(list(cases()))


if __name__ == "__main__":
    compare()
