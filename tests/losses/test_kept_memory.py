"""The memory of the last big gradient is kept for the next one, but never where a gradient still lies."""

import pytest
import torch

from ghmdet.functional import ghmc_loss
from ghmdet.losses.kernels import implementation

pytest.importorskip("numba")


def big(seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(4000, 100, generator=rng).requires_grad_(), torch.randint(-1, 100, (4000,), generator=rng)


def fresh_gradient(seed):
    with implementation("torch"):
        inputs, targets = big(seed)
        ghmc_loss(inputs, targets).backward()
    return inputs.grad


@pytest.mark.parametrize("hold", [lambda t: t.grad, lambda t: t.grad.numpy(), lambda t: t.grad[3:], lambda t: t.grad.T])
def test_a_gradient_that_somebody_holds_is_not_written_over(hold):
    inputs, targets = big(0)
    ghmc_loss(inputs, targets).backward()
    held = hold(inputs)
    before = torch.as_tensor(held).clone()
    del inputs
    for seed in (1, 2):
        other, targets = big(seed)
        ghmc_loss(other, targets).backward()
    assert torch.equal(torch.as_tensor(held), before)


def test_two_losses_alive_at_once_have_gradients_of_their_own():
    (a, ta), (b, tb) = big(0), big(1)
    first, second = ghmc_loss(a, ta), ghmc_loss(b, tb)
    (first + 2 * second).backward()
    torch.testing.assert_close(a.grad, fresh_gradient(0))
    torch.testing.assert_close(b.grad, 2 * fresh_gradient(1))


def test_memory_that_was_shared_with_another_process_is_not_used_again():
    inputs, targets = big(0)
    ghmc_loss(inputs, targets).backward()
    inputs.grad.share_memory_()
    address = inputs.grad.data_ptr()
    inputs.grad = None
    ghmc_loss(inputs, targets).backward()
    assert inputs.grad.data_ptr() != address
    torch.testing.assert_close(inputs.grad, fresh_gradient(0))


def test_memory_is_used_again_when_it_is_free():
    inputs, targets = big(0)
    for _ in range(3):
        inputs.grad = None
        ghmc_loss(inputs, targets).backward()
        address = inputs.grad.data_ptr()
    inputs.grad = None
    ghmc_loss(inputs, targets).backward()
    assert inputs.grad.data_ptr() == address
