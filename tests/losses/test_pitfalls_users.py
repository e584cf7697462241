"""What users of the widely used implementation struggled with, as far as the losses are concerned."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghmdet import GHMC, GHMR, Harmonizer, SoftmaxGHMC, functional

everywhere = pytest.mark.usefixtures("any_implementation")


def stored(criterion: nn.Module) -> Tensor:
    (counts,) = criterion.buffers()
    return counts.clone()


def test_settings_are_safe_everywhere():
    x, labels = torch.randn(20, 4), torch.randint(4, (20,))
    for bins, momentum, density in itertools.product([1, 2, 30, 1000], [0, 0.75, 0.9, 0.999], ["regions", "exact"]):
        settings = {"bins": bins, "momentum": momentum, "density": density}
        for criterion in (GHMC(**settings), SoftmaxGHMC(**settings)):
            assert all(criterion(x * spread, labels).isfinite() for spread in (0.1, 1, 100))
        for mu in (1e-4, 0.02, 10):
            assert GHMR(mu, **settings)(x, torch.zeros_like(x)).isfinite()


@pytest.mark.parametrize("examples", [1, 2, 10])
@everywhere
def test_the_loss_is_finite_and_bounded_on_a_handful_of_examples(examples):
    criterion, cross_entropy = GHMC(bins=30), math.log1p(math.exp(3))
    for call in range(50):
        loss = criterion(torch.full((examples,), 3.0 if call % 10 == 9 else -3.0), torch.zeros(examples))
        assert 0 < loss.item() <= cross_entropy / 30 / (1 - 0.75) * 1.001


@everywhere
def test_class_indices_are_dense_targets_without_the_class_dimension_and_minus_one_is_background():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 3, -1, 1, -1, 2])
    dense = F.one_hot(labels + 1, 5)[:, 1:]
    for targets in (dense, dense.float(), dense.bool()):
        torch.testing.assert_close(GHMC()(logits, targets), GHMC()(logits, labels))


@everywhere
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("classes", [4, 300])
def test_class_indices_of_any_integer_type(dtype, classes):
    logits, labels = torch.randn(5, classes), torch.tensor([0, 3, 2, 1, 3])
    torch.testing.assert_close(GHMC()(logits, labels.to(dtype)), GHMC()(logits, labels))
    torch.testing.assert_close(SoftmaxGHMC()(logits, labels.to(dtype)), SoftmaxGHMC()(logits, labels))


@everywhere
def test_valid_and_weight_of_the_targets_shape_stand_for_whole_positions_also_where_both_readings_fit():
    logits, labels = torch.randn(3, 3), torch.tensor([2, -1, 0])
    valid, weight = torch.tensor([True, False, True]), torch.tensor([1.0, 5.0, 0.5])
    by_position = GHMC()(logits, labels, valid.unsqueeze(1), weight.unsqueeze(1))
    by_class = GHMC()(logits, labels, valid.unsqueeze(0), weight.unsqueeze(0))
    assert GHMC()(logits, labels, valid, weight) == by_position
    assert by_class != by_position


@everywhere
def test_class_weights_are_written_as_one_row():
    logits, labels = torch.randn(5, 3), torch.tensor([2, -1, 0, 1, 2])
    weight = torch.tensor([[1.0, 0.0, 3.0]])
    parts = [GHMC(bins=4)(logits, labels, weight=F.one_hot(torch.tensor([k]), 3).float()) for k in range(3)]
    torch.testing.assert_close(GHMC(bins=4)(logits, labels, weight=weight), parts[0] + 3 * parts[2])


def test_softmax_has_its_own_norm():
    logits, labels = torch.randn(50, 4, requires_grad=True), torch.randint(4, (50,))
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)
    norm = gradient.abs().sum(1) / 2
    each = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(SoftmaxGHMC()(logits, labels), functional.harmonize(each, norm, bins=30))


def test_segmentation_masks_with_an_ignore_index():
    logits, mask = torch.randn(2, 5, 6, 6), torch.randint(5, (2, 6, 6))
    ignored = mask == 3
    criterion = SoftmaxGHMC(ignore_index=255)
    loss = criterion(logits, mask.masked_fill(ignored, 255).to(torch.uint8))
    assert loss == SoftmaxGHMC()(logits, mask, valid=~ignored)
    assert stored(criterion).sum() == (~ignored).sum()


@everywhere
@pytest.mark.parametrize("density", ["regions", "exact"])
def test_the_density_is_detached(density):
    x, targets = torch.randn(40, requires_grad=True), torch.rand(40).round()
    pull = x.detach().sigmoid() - targets
    weights = Harmonizer(density=density)(pull.abs())
    GHMC(density=density)(x, targets).backward()
    torch.testing.assert_close(x.grad, weights * pull, rtol=1e-3, atol=1e-6)


def test_weights_carry_no_gradient_even_where_the_norm_does():
    norm = torch.rand(5, requires_grad=True)
    assert not Harmonizer()(norm).requires_grad
    assert not functional.gradient_density(norm, epsilon=0.1).requires_grad
    assert not Harmonizer().harmonize(torch.ones(5), norm).requires_grad


def test_each_criterion_remembers_for_itself():
    mine, other = GHMC(), GHMC()
    fork = copy.deepcopy(mine)
    mine(torch.zeros(9), torch.zeros(9))
    assert stored(other).sum() == stored(fork).sum() == 0


@pytest.mark.parametrize("loss", [GHMC, GHMR, SoftmaxGHMC, Harmonizer])
def test_reset_forgets(loss):
    def call(criterion, x) -> Tensor:
        if loss is SoftmaxGHMC:
            return criterion(x, torch.zeros(len(x), dtype=torch.long))
        return criterion(x.sigmoid()).sum() if loss is Harmonizer else criterion(x, torch.zeros_like(x))

    fold, next_fold = torch.randn(30, 2), torch.randn(20, 2) + 1
    criterion, mixed = loss(), loss()
    for each in (criterion, mixed):
        call(each, fold)
    criterion.reset()
    assert call(criterion, next_fold) == call(loss(), next_fold) != call(mixed, next_fold)


def test_a_resumed_criterion_goes_on_exactly():
    batches = [torch.randn(30) * spread for spread in (1, 2, 3)]
    through, resumed = GHMC(), GHMC()
    for x in batches[:2]:
        through(x, torch.zeros(30))
    resumed.load_state_dict(through.state_dict())
    assert resumed(batches[2], torch.zeros(30)) == through(batches[2], torch.zeros(30))
    assert torch.equal(stored(resumed), stored(through))


@everywhere
@pytest.mark.parametrize("targets", [torch.full((6,), -1), torch.zeros(6, 3)], ids=["class indices", "dense targets"])
def test_images_without_objects_still_teach(targets):
    x = torch.randn(6, 3, requires_grad=True)
    GHMC()(x, targets).backward()
    assert (x.grad > 0).all()


NOTHING = {
    "no box": (GHMR, (0, 4), torch.zeros(0, 4), None),
    "no anchor": (GHMC, (0, 3), torch.zeros(0, 3), None),
    "no anchor, class indices": (GHMC, (0, 3), torch.zeros(0, dtype=torch.long), None),
    "no pixel": (SoftmaxGHMC, (0, 3), torch.zeros(0, dtype=torch.long), None),
    "no valid box": (GHMR, (5, 4), torch.zeros(5, 4), torch.zeros(5, 1, dtype=torch.bool)),
    "no valid anchor": (GHMC, (5, 3), torch.zeros(5, 3), torch.tensor(False)),
    "no valid position": (GHMC, (5, 3), torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.bool)),
    "all ignored": (SoftmaxGHMC, (5, 3), torch.full((5,), -100), None),
}


@everywhere
@pytest.mark.parametrize("density", ["regions", "exact"])
@pytest.mark.parametrize("case", NOTHING)
def test_no_valid_example_is_a_zero_that_stays_on_the_graph(case, density):
    loss, shape, targets, valid = NOTHING[case]
    x = torch.full(shape, math.nan, requires_grad=True)
    criterion = loss(density=density)
    total = criterion(x, targets, valid)
    total.backward()
    assert total == 0
    assert torch.equal(x.grad, torch.zeros(shape))
    assert stored(criterion).sum() == 0


def test_a_harmonizer_without_an_example_is_a_zero_that_stays_on_the_graph():
    loss = torch.full((3,), math.nan, requires_grad=True)
    Harmonizer().harmonize(loss, torch.full((3,), math.nan), torch.tensor(False)).backward()
    assert loss.grad.tolist() == [0, 0, 0]


@everywhere
def test_the_papers_normalizer_and_the_released_codes_are_both_there():
    untrained = torch.zeros(50, 4), torch.randint(-1, 4, (50,))
    assert GHMC()(*untrained).item() == pytest.approx(math.log(2) / 30, rel=1e-5)
    assert GHMC(normalizer="occupied")(*untrained).item() == pytest.approx(math.log(2), rel=1e-5)
    spread = torch.logit(torch.tensor([0.05, 0.15, 0.15, 0.95])), torch.zeros(4)
    paper, code = GHMC(bins=10)(*spread), GHMC(bins=10, normalizer="occupied")(*spread)
    assert (code / paper).item() == pytest.approx(10 / 3, rel=1e-5)


@everywhere
def test_max_weight_leads_from_the_paper_towards_plain_cross_entropy():
    logits = torch.logit(torch.tensor([0.05] * 98 + [0.55, 0.95]))
    losses = F.binary_cross_entropy_with_logits(logits, torch.zeros(100), reduction="none")

    def loss(max_weight) -> float:
        return GHMC(bins=10, max_weight=max_weight)(logits, torch.zeros(100)).item()

    betas = torch.tensor([100 / 980] * 98 + [10, 10])
    for cap in (100, 10, 5, 1, 0.1):
        assert loss(cap) == pytest.approx((losses * betas.clamp(max=cap)).mean().item(), rel=1e-5)
    assert loss(None) == loss(10)


@everywhere
def test_harmonizing_sees_easy_and_hard_and_knows_nothing_of_classes():
    logits, labels = torch.randn(60, 3), torch.tensor([0] * 55 + [1] * 4 + [2])
    swapped = torch.tensor([2, 0, 1])
    loss = GHMC()(logits, labels)
    torch.testing.assert_close(GHMC()(logits[:, swapped.argsort()], swapped[labels]), loss)
