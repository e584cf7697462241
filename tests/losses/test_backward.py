"""The gradient is kept from the forward pass; the backward pass must still behave as autograd's users expect."""

import pytest
import torch

from ghmdet.functional import ghmc_loss, ghmr_loss

pytestmark = pytest.mark.usefixtures("any_implementation")


@pytest.fixture(params=["ghmc, indices", "ghmc, dense", "ghmr"])
def loss_of(request):
    if request.param == "ghmr":
        return lambda x: ghmr_loss(x, torch.zeros_like(x), mu=0.5)
    targets = torch.arange(20) % 6 - 1 if request.param == "ghmc, indices" else (torch.arange(100) % 2.0).view(20, 5)
    return lambda x: ghmc_loss(x, targets)


@pytest.fixture
def x():
    return torch.randn(20, 5, requires_grad=True)


@pytest.fixture
def slope(loss_of, x):
    (gradient,) = torch.autograd.grad(loss_of(x), x)
    return gradient.clone()


@pytest.mark.parametrize("factor", [1.0, 3.0, -0.5, 0.0, 65536.0])
def test_a_factor_on_the_loss_is_a_factor_on_the_gradient(loss_of, x, slope, factor):
    (loss_of(x) * factor).backward()
    torch.testing.assert_close(x.grad, slope * factor)


def test_going_back_twice_adds_up(loss_of, x, slope):
    loss = loss_of(x)
    loss.backward(retain_graph=True)
    (loss * 3).backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, slope * 5)


def test_a_gradient_once_handed_out_is_not_written_over(loss_of, x, slope):
    loss = loss_of(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * 5).backward()
    torch.testing.assert_close(first, slope)


def test_what_the_user_does_to_a_gradient_does_not_reach_the_next_one(loss_of, x, slope):
    loss = loss_of(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    first.zero_()
    loss.backward(retain_graph=True)
    x.grad.mul_(100)  # as clipping would
    x.grad = None
    loss.backward()
    torch.testing.assert_close(x.grad, slope)


def test_gradients_are_added_to_those_already_there(loss_of, x, slope):
    x.grad = torch.ones_like(x)
    loss_of(x).backward()
    torch.testing.assert_close(x.grad, 1 + slope)


def test_two_losses_of_the_same_inputs_add_up(loss_of, x, slope):
    (2 * loss_of(x) + loss_of(x)).backward()
    torch.testing.assert_close(x.grad, 3 * slope)


def test_the_gradient_flows_on_to_what_made_the_inputs(loss_of, slope):
    scale = torch.ones((), requires_grad=True)
    x = torch.randn(20, 5)
    loss_of(x * scale).backward()
    expected = x.clone().requires_grad_()
    loss_of(expected).backward()
    torch.testing.assert_close(scale.grad, (expected.grad * x).sum())


def test_without_gradients_the_loss_is_the_same_number(loss_of, x):
    expected = loss_of(x).item()
    with torch.no_grad():
        assert loss_of(x).item() == expected
        assert loss_of(x).grad_fn is None
    with torch.inference_mode():
        assert loss_of(x).item() == expected
    assert not loss_of(x.detach()).requires_grad


def test_the_inputs_stay_as_they_were(loss_of, x):
    before = x.detach().clone()
    loss_of(x).backward()
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changed", ["inputs", "targets", "valid", "weight"])
def test_what_is_changed_before_the_backward_pass_is_refused_or_does_no_harm(changed, dtype):
    leaf = torch.randn(20, 5).to(dtype).requires_grad_()

    def gradient(change):
        given = {"inputs": leaf * 1, "targets": torch.arange(100).view(20, 5) / 100}
        given |= {"valid": given["targets"] > 0.3, "weight": given["targets"] * 2}
        inputs, targets, valid, weight = given.values()
        loss = ghmc_loss(inputs, targets, valid=valid, weight=weight)
        with torch.no_grad():
            given[changed].zero_() if change else None  # a buffer filled anew for the next batch
        return torch.autograd.grad(loss, leaf)[0]

    expected = gradient(change=False)
    try:
        found = gradient(change=True)
    except RuntimeError as refusal:
        assert "modified by an inplace operation" in str(refusal)  # noqa: PT017
    else:
        torch.testing.assert_close(found, expected)


def test_twenty_million_examples():
    n = 20_000_003  # more than float32 counts
    loss = ghmc_loss(torch.zeros(n, dtype=torch.bfloat16), torch.zeros(1).expand(n), bins=1)
    assert loss.item() == pytest.approx(0.6931472, rel=1e-6)
