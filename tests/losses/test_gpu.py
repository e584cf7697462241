"""On a GPU, where there is one: the numbers of the plain formulas on the CPU, and no wait for the host.

`python tests/losses/test_gpu.py` runs the comparison without pytest.
"""

import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_triton import cases, tolerance, value_and_gradient

from ghmdet.losses import GHMC, GHMR, OHEM, SmoothL1, SoftmaxGHMC
from ghmdet.losses.kernels import implementation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def to_gpu(arguments):
    return [None if a is None else a.cuda() for a in arguments]


@pytest.mark.parametrize("name", ["triton", "plain"])
def test_the_numbers_are_those_of_the_cpu(name):
    for case, criterion, arguments in cases():
        expected, slow = value_and_gradient("plain", criterion, *arguments)
        if hasattr(criterion, "reset"):
            criterion.reset()
        loss, gradient = value_and_gradient(name, criterion.cuda(), *to_gpu(arguments))
        close = tolerance(criterion, slow)
        torch.testing.assert_close(loss.cpu(), expected, rtol=2e-5, atol=1e-7, msg=lambda m, c=case: f"{c}: {m}")
        torch.testing.assert_close(gradient.cpu(), slow, **close, msg=lambda m, c=case: f"{c}: {m}")


def test_no_step_waits_for_the_device():
    logits, classes = torch.randn(4, 1000, 20, device="cuda", requires_grad=True), torch.zeros(4, 1000).long().cuda()
    valid, deltas = torch.ones(4, 1000, dtype=torch.bool).cuda(), torch.randn(50, 4, device="cuda", requires_grad=True)
    ghmc, exact, ghmr, smooth = GHMC().cuda(), GHMC(density="exact").cuda(), GHMR(max_weight=9.0).cuda(), SmoothL1()
    softmax = SoftmaxGHMC().cuda()
    zeros = torch.zeros_like(deltas)

    def step():
        total = ghmc(logits, classes, valid) + exact(logits, classes) + ghmr(deltas, zeros) + smooth(deltas, zeros)
        (total + softmax(logits.transpose(1, 2), classes, valid)).backward()

    for name in ("triton", "plain"):
        with implementation(name):
            step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the mode itself is called a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_half_a_billion_examples_are_counted_and_addressed():
    logits = torch.full((30_000_000, 80), -3.0, device="cuda", dtype=torch.bfloat16)  # offsets beyond 2³¹
    logits[-1, -1] = 2.0
    criterion = GHMC(bins=10).cuda()
    criterion(logits, torch.full((30_000_000,), -1, device="cuda"))
    assert criterion.harmonizer.smoothed_counts.sum().item() == logits.numel()
    assert criterion.harmonizer.smoothed_counts[8].item() == 1  # sigmoid(2) = 0.88


def test_float16_gradients_survive_a_grad_scaler():
    logits = (torch.randn(1000, 80, device="cuda") - 4).half().requires_grad_()
    (2**16 * GHMC().cuda()(logits, torch.full((1000,), -1, device="cuda"))).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad != 0).float().mean() > 0.99


def test_ohem_runs():
    logits = torch.randn(2, 5000, 20, device="cuda", requires_grad=True)
    corner = torch.rand(5000, 2, device="cuda") * 500
    loss = OHEM()(logits, torch.zeros(2, 5000).long().cuda(), boxes=torch.cat([corner, corner + 40], 1))
    loss.backward()
    assert (logits.grad.abs().sum(-1) > 0).sum().item() == 256


def main() -> None:
    warnings.simplefilter("default")
    for name in ("triton", "plain"):
        test_the_numbers_are_those_of_the_cpu(name)
    for test in (
        test_no_step_waits_for_the_device,
        test_half_a_billion_examples_are_counted_and_addressed,
        test_float16_gradients_survive_a_grad_scaler,
        test_ohem_runs,
    ):
        try:
            test()
            print("passed", test.__name__)
        except Exception:
            print("FAILED", test.__name__)
            traceback.print_exc()


if __name__ == "__main__":
    main()
