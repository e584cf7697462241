"""The losses that the paper compares with, each against its formula and its stated normaliser."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import nms, sigmoid_focal_loss

from ghmdet.losses import ASL1, OHEM, CrossEntropy, FocalLoss, SmoothL1, prior_bias
from ghmdet.losses.kernels import implementation

IMPLEMENTATIONS = ("numba", "torch", "plain")


def example(images=2, anchors=50, classes=7):
    torch.manual_seed(0)
    logits = torch.randn(images, anchors, classes) * 2 - 2
    targets = torch.randint(-1, classes, (images, anchors))
    valid = torch.rand(images, anchors) > 0.2
    one_hot = F.one_hot(targets.clamp(min=0), classes) * (targets >= 0).unsqueeze(-1)
    return logits.requires_grad_(), targets, valid, one_hot.float()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_cross_entropy_starts_at_one_with_five_levels_and_the_prior_bias(name):
    levels = [400, 100, 25, 9, 4]
    logits = torch.full((2, sum(levels), 80), prior_bias(0.01))
    with implementation(name):
        loss = CrossEntropy()(logits, torch.full((2, sum(levels)), -1), levels=levels)
    assert loss.item() == pytest.approx(20 * 5 * -math.log(0.99), rel=1e-5)
    assert loss.item() == pytest.approx(1.0, abs=0.01)


def test_cross_entropy_over_the_whole_batch_starts_at_a_fifth_of_that():
    loss = CrossEntropy()(torch.full((2, 538, 80), prior_bias(0.01)), torch.full((2, 538), -1))
    assert loss.item() == pytest.approx(0.20, abs=0.01)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_cross_entropy_is_the_sum_of_each_levels_mean_over_valid_examples(name):
    logits, targets, valid, one_hot = example()
    every = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none")
    expected = sum(20 * every[:, part][valid[:, part]].mean() for part in (slice(0, 30), slice(30, 45), slice(45, 50)))
    (slow,) = torch.autograd.grad(expected, logits)
    with implementation(name):
        loss = CrossEntropy()(logits, targets, valid, levels=[30, 15, 5])
        (fast,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dense", [False, True])
def test_focal_is_torchvisions_over_the_positives(name, dense):
    logits, targets, valid, one_hot = example()
    every = sigmoid_focal_loss(logits, one_hot, alpha=0.25, gamma=2, reduction="none")
    expected = every[valid].sum() / ((targets >= 0) & valid).sum()
    (slow,) = torch.autograd.grad(expected, logits)
    with implementation(name):
        loss = FocalLoss()(logits, one_hot if dense else targets, valid.unsqueeze(-1) if dense else valid)
        (fast,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-8)


def test_focal_at_gamma_zero_and_alpha_half_is_half_cross_entropy():
    logits, targets, _, one_hot = example()
    loss = FocalLoss(alpha=0.5, gamma=0)(logits, targets) * (targets >= 0).sum()
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, one_hot, reduction="sum") / 2)


def test_focal_of_another_exponent():
    logits, targets, _, one_hot = example()
    loss = FocalLoss(alpha=0.3, gamma=1.5)(logits, targets) * (targets >= 0).sum()
    torch.testing.assert_close(loss, sigmoid_focal_loss(logits, one_hot, alpha=0.3, gamma=1.5, reduction="sum"))


def boxes_on_a_line(number, step):
    left = torch.arange(number) * float(step)
    return torch.stack([left, torch.zeros(number), left + 10, torch.full((number,), 10.0)], 1)


def test_ohem_keeps_each_images_hardest_anchors_that_do_not_overlap():
    logits, targets, valid, one_hot = example()
    boxes = boxes_on_a_line(50, 1)  # neighbours overlap by 9 / 11 = 0.82, the next but one by 8 / 12 = 0.67
    hardness = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum(-1)
    expected = 0
    for image in range(2):
        known = valid[image].nonzero()[:, 0]
        kept = known[nms(boxes[known], hardness[image][known].detach(), 0.7)[:8]]
        expected = expected + hardness[image][kept].sum()
    torch.testing.assert_close(OHEM(keep=8)(logits, targets, valid, boxes=boxes), expected / 16)


def test_ohem_of_a_prefix_is_ohem_of_all():
    """Survivors are searched among the hardest few first; where too few survive, among more."""
    torch.manual_seed(1)
    logits, boxes = torch.randn(1, 3000, 1), torch.tensor([[0.0, 0, 10, 10]]).repeat(3000, 1)
    boxes[-1] += 100  # of 3000 anchors two can survive; the second may be the easiest
    targets = torch.full((1, 3000), -1)
    logits[0, -1] = -9
    loss = OHEM(keep=4)(logits, targets, boxes=boxes)
    torch.testing.assert_close(loss, (F.softplus(logits.max()) + F.softplus(torch.tensor(-9.0))) / 2)


def test_ohem_has_a_gradient_at_the_kept_anchors_alone():
    logits, targets, valid, _ = example()
    OHEM(keep=3)(logits, targets, valid, boxes=boxes_on_a_line(50, 20)).backward()
    assert (logits.grad.abs().sum(-1) > 0).sum(1).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("loss", "one"),
    [
        (SmoothL1(), lambda d: d**2 / (2 / 9) if abs(d) <= 1 / 9 else abs(d) - 1 / 18),
        (ASL1(), lambda d: math.sqrt(d**2 + 0.02**2) - 0.02),
    ],
    ids=["smooth L1", "ASL1"],
)
def test_box_losses_sum_over_coordinates_and_divide_by_boxes(loss, one):
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 4) * 0.3, torch.randn(20, 4) * 0.3
    valid = torch.rand(20, 1) > 0.3
    inputs[~valid[:, 0]] = math.nan
    differences = (inputs - targets)[valid[:, 0]].flatten().tolist()
    expected = sum(map(one, differences)) / int(valid.sum())
    inputs.requires_grad_()
    value = loss(inputs, targets, valid)
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert inputs.grad.isfinite().all()


@pytest.mark.parametrize("loss", [SmoothL1(), ASL1()], ids=["smooth L1", "ASL1"])
def test_box_losses_of_no_box_are_a_zero_on_the_graph(loss):
    inputs = torch.zeros(0, 4, requires_grad=True)
    value = loss(inputs, torch.zeros(0, 4))
    value.backward()
    assert value.item() == 0
    assert inputs.grad.shape == (0, 4)


@pytest.mark.parametrize("loss", [CrossEntropy(), FocalLoss()], ids=["cross-entropy", "focal"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_ignored_places_may_hold_anything(loss, name):
    logits, targets, valid, _ = example()
    with implementation(name):
        clean = loss(logits, targets, valid)
        dirty = logits.detach().masked_fill(~valid.unsqueeze(-1), math.nan).requires_grad_()
        value = loss(dirty, targets.masked_fill(~valid, 99), valid)
        value.backward()
    torch.testing.assert_close(value, clean)
    assert (dirty.grad[~valid] == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CrossEntropy(0), "scale must be above 0 and finite, got 0"),
        (lambda: FocalLoss(alpha=1.5), "alpha must be between 0 and 1, got 1.5"),
        (lambda: FocalLoss(gamma=-1), "gamma must be at least 0, got -1"),
        (lambda: OHEM(keep=0), "keep must be at least 1, got 0"),
        (lambda: SmoothL1(0), "delta must be above 0 and finite, got 0"),
        (lambda: ASL1(-1), "mu must be above 0 and finite, got -1"),
        (
            lambda: CrossEntropy()(torch.zeros(2, 5, 3), torch.zeros(2, 5).long(), levels=[2, 2]),
            r"levels must add up to the positions' last dimension, 5, got \[2, 2\]",
        ),
        (
            lambda: OHEM()(torch.zeros(2, 5, 3), torch.zeros(2, 5).long(), boxes=torch.zeros(4, 4)),
            r"boxes \(anchors, 4\) or \(images, anchors, 4\), got \(2, 5, 3\) and \(4, 4\)",
        ),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
