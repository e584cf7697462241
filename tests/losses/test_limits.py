"""The other two proofs of every loss: limiting cases with their gradients, and gradcheck; and what edges can do."""

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import assert_is_the_oracles, each_loss, off_the_edges, value_and_gradient

import ghmdet
from ghmdet.functional import ghmc_loss, ghmr_loss, softmax_ghmc_loss

# On the edges: what a last bit can change. An example there falls to one side or the other, the same one in counting
# and in weighting; its region's other examples then share their weight with it, and nothing else happens.


@pytest.mark.usefixtures("any_implementation")
@each_loss
def test_an_example_on_an_edge_is_its_neighbour_regions_or_its_own(loss):
    bins = 30
    for j in range(1, bins):
        five_on_the_edge_and_one_beside = torch.tensor([j / bins] * 5 + [(j - 0.5) / bins, (j + 0.5) / bins])
        inputs, targets = loss.at(five_on_the_edge_and_one_beside.double())
        inputs, targets = inputs.float(), targets.float() if targets.is_floating_point() else targets
        found = value_and_gradient(loss.build(bins=bins), inputs, targets)
        examples = loss.examples(inputs.tolist(), targets.tolist())
        assert any(is_close(found, nudged(examples, below, 1e-5)) for below in range(6))


def nudged(examples, below, step):
    """The first five moved off their edge, so many of them downwards."""
    moved = [(loss, g + (-step if i < below else step), slope) for i, (loss, g, slope) in enumerate(examples[:5])]
    return oracle.harmonize(oracle.Mechanism(30), moved + examples[5:])


def is_close(found, expected):
    try:
        assert_is_the_oracles(*found, expected, relative=1e-6)
    except AssertionError:
        return False
    return True


@pytest.mark.usefixtures("any_implementation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_untrained_network_starts_at_ln_2_over_m(dtype):
    targets = (torch.rand(1000) < 0.1).float()  # g = ½ for every example, an edge at M = 30
    assert ghmc_loss(torch.zeros(1000, dtype=dtype), targets).item() == pytest.approx(math.log(2) / 30, rel=1e-6)


@pytest.mark.usefixtures("any_implementation")
def test_an_almost_untrained_network_starts_at_that_or_twice_that():
    targets = (torch.rand(1000) < 0.1).float()
    for spread in (1e-9, 1e-8, 1e-7, 1e-6):
        regions = ghmc_loss(torch.randn(1000) * spread, targets).item() / (math.log(2) / 30)
        assert round(regions) in (1, 2)
        assert regions == pytest.approx(round(regions), rel=1e-5)


# Limiting cases, with their gradients.


@pytest.mark.usefixtures("any_implementation")
@each_loss
def test_one_region_is_the_plain_loss_divided_by_n(loss):
    inputs, targets = loss.sample(50)
    found = value_and_gradient(loss.build(bins=1), inputs, targets)
    plain = value_and_gradient(loss.unharmonized, inputs.double(), targets)
    assert_is_the_oracles(*found, (plain[0].item(), plain[1].tolist()), relative=1e-6)


@pytest.mark.usefixtures("any_implementation")
@pytest.mark.parametrize(("density", "relative"), [("regions", 1e-6), ("exact", 1e-3)])
@each_loss
def test_uniformly_spread_norms_change_nothing(loss, density, relative):
    uniform = (torch.arange(630) + 0.5) / 630  # 21 in every region and every window, β = 1
    inputs, targets = loss.at(uniform.double())
    found = value_and_gradient(loss.build(bins=30, density=density), inputs.float(), targets)
    plain = value_and_gradient(loss.unharmonized, inputs, targets)
    assert_is_the_oracles(*found, (plain[0].item(), plain[1].tolist()), relative)


@pytest.mark.parametrize("density", ["regions", "exact"])
def test_uniformly_spread_norms_have_a_beta_of_one(density):
    weights = ghmdet.Harmonizer(bins=30, density=density)((torch.arange(630).double() + 0.5) / 630)
    torch.testing.assert_close(630 * weights, torch.ones(630, dtype=torch.float64), rtol=1e-3, atol=0)


def test_the_functions_are_the_modules_first_call():
    logits, classes, boxes = torch.randn(9, 4), torch.randint(0, 4, (9,)), torch.randn(9, 4)
    settings = {"bins": 5, "density": "exact", "max_weight": 3.0}
    assert ghmc_loss(logits, classes, **settings) == ghmdet.GHMC(**settings)(logits, classes)
    assert ghmr_loss(logits, boxes, mu=0.5, **settings) == ghmdet.GHMR(mu=0.5, **settings)(logits, boxes)
    assert softmax_ghmc_loss(logits, classes, **settings) == ghmdet.SoftmaxGHMC(**settings)(logits, classes)


# The gradient is the loss's slope in every direction while the densities stay what they are.


@each_loss
def test_gradcheck_by_regions(loss):
    inputs, targets = off_the_edges(loss, 10, 8, torch.float64, gap=1e-3)
    valid, weight = torch.rand(targets.shape) < 0.8, torch.rand(targets.shape)
    criterion = loss.build(bins=10)
    assert torch.autograd.gradcheck(lambda x: criterion(x, targets, valid, weight), inputs.requires_grad_())


@each_loss
def test_gradcheck_by_windows(loss):
    in_the_middle = torch.tensor([0.21, 0.23, 0.31, 0.5, 0.52, 0.7], dtype=torch.float64)  # no window is clipped
    inputs, targets = loss.at(in_the_middle)
    criterion = loss.build(bins=10, density="exact")
    assert torch.autograd.gradcheck(lambda x: criterion(x, targets), inputs.requires_grad_())


@pytest.mark.parametrize("density", ["regions", "exact"])
def test_gradcheck_of_ones_own_loss_with_the_norms_held_fixed(density):
    x, t = torch.randn(20, dtype=torch.float64, requires_grad=True), torch.rand(20, dtype=torch.float64)
    g = (x.sigmoid() - t).abs().detach()
    harmonizer = ghmdet.Harmonizer(bins=10, density=density)
    bce = F.binary_cross_entropy_with_logits
    assert torch.autograd.gradcheck(lambda x: harmonizer.harmonize(bce(x, t, reduction="none"), g), x)


def test_the_density_is_a_constant_even_where_the_norm_is_differentiable():
    x = torch.tensor([0.1, 0.2, 0.9], requires_grad=True)
    ghmdet.Harmonizer(bins=2).harmonize(torch.ones(3), x)  # nothing of the sum hangs on x
    assert not ghmdet.Harmonizer(bins=2)(x).requires_grad
    ghmdet.Harmonizer(bins=2).harmonize(x, x).backward()
    torch.testing.assert_close(x.grad, torch.tensor([1 / 4, 1 / 4, 1 / 2]))
