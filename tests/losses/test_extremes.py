"""Nothing that stands in an ignored place reaches the loss; in a valid place it does, and shows."""

import math

import pytest
import torch

from ghmdet.functional import ghmc_loss, ghmr_loss, harmonize, softmax_ghmc_loss

pytestmark = pytest.mark.usefixtures("any_implementation")


@pytest.mark.parametrize("targets", [torch.randint(0, 5, (6,)), torch.rand(6, 5)], ids=["indices", "dense"])
def test_all_ignored_is_a_zero_on_the_graph(targets):
    for junk in (0.0, math.nan, math.inf):
        logits = torch.full((6, 5), junk, requires_grad=True)
        loss = ghmc_loss(logits, targets, valid=torch.zeros(6, 5, dtype=torch.bool))
        loss.backward()
        assert loss.item() == 0
        assert (logits.grad == 0).all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_in_ignored_places_does_no_harm(junk, dtype):
    logits, valid = torch.randn(60, 5).to(dtype), torch.rand(60) < 0.7
    dense, classes, weight = torch.rand(60, 5), torch.randint(-1, 5, (60,)), torch.rand(60)
    dirty = [torch.where(valid[:, None], t, junk) for t in (logits, dense, weight[:, None].expand(60, 5))]
    mask = valid[:, None]
    found = ghmc_loss(dirty[0], dirty[1], valid=mask, weight=dirty[2])
    assert found.item() == pytest.approx(
        ghmc_loss(logits[valid], dense[valid], weight=weight[valid, None]).item(), rel=2e-6
    )
    found = ghmr_loss(dirty[0], dirty[1], mu=0.5, valid=mask, weight=dirty[2])
    expected = ghmr_loss(logits[valid], dense[valid], mu=0.5, weight=weight[valid, None])
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
    found = ghmc_loss(dirty[0], torch.where(valid, classes, 255), valid=valid)
    assert found.item() == pytest.approx(ghmc_loss(logits[valid], classes[valid]).item(), rel=2e-6)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_the_same_in_a_valid_place_makes_the_loss_non_finite(junk):
    inputs = torch.tensor([0.3, junk, -1.0])
    for target in (0.0, 0.5, 1.0):
        targets = torch.tensor([0.0, target, 1.0])
        assert not ghmc_loss(inputs, targets).isfinite()
        assert not ghmr_loss(inputs, targets).isfinite()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("its_class", [0, 1, -1])
def test_the_same_beside_a_class_index_makes_the_loss_non_finite(junk, its_class):
    assert not ghmc_loss(torch.tensor([[0.3, junk, -1.0]]), torch.tensor([its_class])).isfinite()


def test_a_target_of_nan_in_a_valid_place_makes_the_loss_non_finite():
    inputs, targets = torch.randn(3), torch.tensor([0.0, math.nan, 1.0])
    assert not ghmc_loss(inputs, targets).isfinite()
    assert not ghmr_loss(inputs, targets).isfinite()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("its_class", [0, 1])
def test_the_same_among_exclusive_classes_makes_the_loss_non_finite(junk, its_class):
    assert not softmax_ghmc_loss(torch.tensor([[0.3, junk, -1.0]]), torch.tensor([its_class])).isfinite()


@pytest.mark.parametrize(("own", "norm"), [(math.nan, 0.5), (math.inf, 0.5), (1.0, math.nan)])
def test_the_same_in_a_loss_of_ones_own_makes_it_non_finite(own, norm):
    loss, g = torch.tensor([1.0, own]), torch.tensor([0.2, norm])
    assert not harmonize(loss, g).isfinite()
    assert harmonize(loss, g, valid=torch.tensor([True, False])).item() == pytest.approx(1 / 30)
