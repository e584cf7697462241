"""What went wrong in the widely used implementation, row by row of the list of its defects: none of it happens here.

`RegionLoop` and a few one-liners do it the old way, so that each test shows that it can fail.
"""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ghmdet import GHMC, GHMR, Harmonizer, SoftmaxGHMC
from ghmdet.losses import kernels

everywhere = pytest.mark.usefixtures("any_implementation")


class RegionLoop:
    """GHM-C the old way: an average that starts at zero, is advanced by every call and only where a region holds
    examples; edges in the logits' dtype; weights tested for > 0; ignored places multiplied by zero."""

    def __init__(self, bins: int = 10, momentum: float = 0.75) -> None:
        self.bins, self.momentum = bins, momentum
        self.stored = [0.0] * bins

    def __call__(self, logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        counted = torch.ones_like(logits) if weight is None else (weight > 0).to(logits.dtype)
        g = (logits.sigmoid() - targets).abs()
        edges = (torch.arange(self.bins + 1) / self.bins).to(logits.dtype)
        edges[-1] += 1e-6
        weights, occupied = torch.zeros_like(logits), 0
        for j in range(self.bins):
            inside = (g >= edges[j]) & (g < edges[j + 1]) & (counted > 0)
            if inside.sum().item() > 0:
                held = self.stored[j] * self.momentum + (1 - self.momentum) * inside.sum().item()
                self.stored[j] = held if self.momentum else inside.sum().item()
                weights[inside] = 1 / self.stored[j]
                occupied += 1
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return (losses * weights * counted).sum() / max(occupied, 1)


def negatives(*norms: float, times: int = 1) -> tuple[Tensor, Tensor]:
    """Logits whose gradient norms are these, every one a negative."""
    logits = torch.logit(torch.tensor(norms * times))
    return logits, torch.zeros_like(logits)


def stored(criterion: nn.Module) -> Tensor:
    (counts,) = criterion.buffers()
    return counts.clone()


def test_pitfall_01_a_step_is_one_update_of_the_average_however_many_levels_it_joins():
    def remembered(before: float, now: float, first: float) -> float:
        return (now - before) / (first - before)

    criterion, loop = GHMC(bins=10, momentum=0.75), RegionLoop(momentum=0.75)
    criterion(*negatives(0.05, times=500))
    criterion(*negatives(0.05, times=100))
    assert remembered(100, stored(criterion)[0].item(), 500) == pytest.approx(0.75)

    loop.stored[0] = 100.0
    for _level in range(5):
        loop(*negatives(0.05, times=20))
    assert remembered(20, loop.stored[0], 100) == pytest.approx(0.75**5)


def test_pitfall_01_the_order_of_levels_does_not_matter():
    levels = [negatives(0.05, times=1000), negatives(0.05, 0.35, times=100), negatives(0.35, 0.65, times=10)]

    def whole(order) -> float:
        return GHMC(bins=10)(*map(torch.cat, zip(*order))).item()

    def one_by_one(order) -> float:
        loop = RegionLoop()
        return sum(loop(*level).item() for level in order)

    assert whole(levels) == pytest.approx(whole(levels[::-1]), rel=1e-6)
    assert one_by_one(levels) != pytest.approx(one_by_one(levels[::-1]), rel=0.1)


@pytest.mark.parametrize(("momentum", "too_large"), [(0.75, 4), (0.9, 10)])
def test_pitfall_02_first_call_is_unbiased(momentum, too_large):
    batch = negatives(0.05, 0.15, 0.15, 0.95)
    assert GHMC(momentum=momentum)(*batch) == GHMC(momentum=0)(*batch)
    old, unbiased = RegionLoop(momentum=momentum)(*batch), RegionLoop(momentum=0)(*batch)
    assert old.item() == pytest.approx(too_large * unbiased.item())


def test_pitfall_02_calls_without_an_example_leave_the_next_one_the_first():
    batch = negatives(0.05, 0.95)
    criterion = GHMC()
    criterion(*batch, valid=torch.tensor(False))
    criterion(torch.zeros(0), torch.zeros(0))
    assert criterion(*batch) == GHMC()(*batch)


@pytest.mark.parametrize("momentum", [0.5, 0.75, 0.9])
def test_pitfall_02_a_region_filled_late_weighs_1_over_1_minus_momentum_too_much_and_max_weight_caps_it(momentum):
    easy, late = torch.full((9,), 0.05), torch.tensor([0.05] * 9 + [0.95])
    free, capped = Harmonizer(10, momentum), Harmonizer(10, momentum, max_weight=0.5)
    for harmonizer in (free, capped):
        for _call in range(100):
            harmonizer(easy)
    assert free(late)[-1].item() == pytest.approx(0.1 / (1 - momentum))
    assert capped(late).max().item() * len(late) == pytest.approx(0.5)


@everywhere
def test_pitfall_02_validation_stays_finite_however_long_a_region_was_empty():
    criterion = GHMC(bins=10)
    criterion(*negatives(0.05, 0.95))
    for _call in range(500):
        criterion(*negatives(0.05))
    assert criterion.eval()(*negatives(0.05, 0.95)).isfinite()


def test_pitfall_03_empty_regions_decay():
    criterion, loop = GHMC(bins=10, momentum=0.75), RegionLoop(momentum=0.75)
    for loss in (criterion, loop):
        loss(*negatives(0.05, 0.95))
    first, frozen = stored(criterion), list(loop.stored)
    for loss in (criterion, loop):
        for _call in range(3):
            loss(*negatives(0.05))
    assert stored(criterion)[9].item() == pytest.approx(first[9].item() * 0.75**3)
    assert loop.stored[9] == frozen[9]


def test_pitfall_03_a_call_without_an_example_is_no_update():
    criterion = GHMC()
    criterion(*negatives(0.05, 0.95))
    before = stored(criterion)
    criterion(*negatives(0.05), valid=torch.tensor(False))
    criterion(torch.zeros(0), torch.zeros(0))
    assert torch.equal(stored(criterion), before)


class Made(TorchDispatchMode):
    """Every tensor that torch makes within it."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.tensors += [made for made in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(made)]
        return result


def test_pitfall_04_nothing_waits_for_a_device():
    with FakeTensorMode():
        logits, targets = torch.randn(4, 3, requires_grad=True), torch.zeros(4, 3)
        for criterion in (GHMC(), GHMC(density="exact"), GHMR(), SoftmaxGHMC()):
            labels = torch.zeros(4, dtype=torch.long) if isinstance(criterion, SoftmaxGHMC) else targets
            loss = criterion(logits, labels, labels == 0)
            loss.backward()
            assert loss.shape == ()
        with pytest.raises(DataDependentOutputException):
            RegionLoop()(logits, targets)


def test_pitfall_04_more_regions_are_not_more_work():
    def operations(loss) -> int:
        with Made() as made, kernels.implementation("plain"):
            loss(*negatives(0.05, 0.5, 0.95))
        return len(made.tensors)

    assert operations(GHMC(bins=3)) == operations(GHMC(bins=300))
    assert operations(RegionLoop(bins=300)) > 20 * operations(RegionLoop(bins=3))


@everywhere
def test_pitfall_04_no_one_hot_is_built():
    labels = torch.arange(2000) % 81 - 1
    one_hot = F.one_hot(labels + 1, 81)[:, 1:]

    def builds_it(targets_of) -> bool:
        with Made() as made:
            GHMC()(torch.randn(2000, 80), targets_of(labels))
        return any(tensor.shape == one_hot.shape and torch.equal(tensor.long(), one_hot) for tensor in made.tensors)

    assert not builds_it(lambda labels: labels)
    assert builds_it(lambda labels: F.one_hot(labels + 1, 81)[:, 1:].float())


def test_pitfall_06_micro_batches_at_the_kth_root_of_the_momentum_remember_as_one_step_does():
    before, now = negatives(0.05, times=80), negatives(0.05, 0.45, times=20)
    quarter = negatives(0.05, 0.45, times=5)
    whole, parts, careless = GHMC(10, 0.75), GHMC(10, 0.75 ** (1 / 4)), GHMC(10, 0.75)
    whole(*before)
    for criterion in (parts, careless):
        criterion(*(half[:20] for half in before))
        for _ in range(4):
            criterion(*quarter)
    assert now[0].numel() == 4 * quarter[0].numel()
    whole(*now)
    assert 4 * stored(parts) == pytest.approx(stored(whole))
    assert 4 * stored(careless) != pytest.approx(stored(whole), rel=0.05)


def test_pitfall_06_equal_micro_batches_average_to_the_loss_of_the_whole():
    quarter = negatives(0.05, 0.05, 0.45, 0.95)
    whole = GHMC()(*(half.repeat(4) for half in quarter))
    accumulating = GHMC()
    assert sum(accumulating(*quarter).item() for _ in range(4)) / 4 == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("apart", ["eval", "no_grad", "inference_mode"])
def test_pitfall_07_validation_leaves_the_state_alone(apart):
    criterion, loop = GHMC(bins=10), RegionLoop()
    for loss in (criterion, loop):
        loss(*negatives(0.05))
    before, disturbed = stored(criterion), list(loop.stored)
    criterion.train(apart != "eval")
    with getattr(torch, apart, torch.enable_grad)():
        criterion(*negatives(0.05, 0.95))
        loop(*negatives(0.05, 0.95))
    assert torch.equal(stored(criterion), before)
    assert loop.stored != disturbed


def test_pitfall_07_validation_reads_the_stored_average():
    criterion = GHMC(bins=10)
    assert criterion.eval()(*negatives(0.05, times=2)) == GHMC(bins=10)(*negatives(0.05, times=2))
    criterion.train()(*negatives(0.05, times=8))
    assert criterion.eval()(*negatives(0.05)).item() == pytest.approx(-math.log(0.95) / (8 * 10))
    assert criterion(*negatives(0.95)).item() == pytest.approx(-math.log(0.05) / (1 * 10)), "nothing stored: its own"


@pytest.mark.parametrize("unknown", [{"reduction": "sum"}, {"use_sigmoid": True}, {"loss_weight": 2.0}])
@pytest.mark.parametrize("loss", [GHMC, GHMR, SoftmaxGHMC, Harmonizer])
def test_pitfall_08_what_is_not_supported_is_refused_when_written(loss, unknown):
    with pytest.raises(TypeError, match=next(iter(unknown))):
        loss(**unknown)


OTHER = {"bins": 7, "momentum": 0.2, "density": "exact", "normalizer": "occupied", "max_weight": 1.1}
OTHER |= {"class_dim": 0, "mu": 0.5, "ignore_index": 3}
DOCUMENTED = [
    (loss, name)
    for loss in (GHMC, GHMR, SoftmaxGHMC, Harmonizer)
    for name in inspect.signature(loss).parameters
    if name != "sync"  # changes something where there are ranks: test_pitfalls_ranks.py
]


@pytest.mark.parametrize(("loss", "argument"), DOCUMENTED, ids=lambda value: getattr(value, "__name__", value))
def test_pitfall_09_every_argument_does_something(loss, argument):
    def two_calls(**settings) -> float:
        criterion, rng = loss(**settings), torch.Generator().manual_seed(0)
        total = 0.0
        for spread in (1.0, 3.0):
            x = torch.randn(12, 12, generator=rng) * spread
            labels = torch.arange(12) % 5
            if loss is Harmonizer:
                total += criterion.harmonize(x.square(), x.sigmoid()).item()
            else:
                total += criterion(x, torch.zeros_like(x) if loss is GHMR else labels).item()
        return total

    assert two_calls(**{argument: OTHER[argument]}) != pytest.approx(two_calls(), rel=1e-3)


def test_pitfall_09_a_call_takes_no_argument_that_it_ignores():
    with pytest.raises(TypeError, match="avg_factor"):
        GHMC()(*negatives(0.5), avg_factor=3)


@everywhere
def test_pitfall_10_weights_scale_the_loss_and_leave_the_counts_alone():
    batch = negatives(0.05, 0.15, 0.25, 0.95)
    weight = torch.tensor([0.0, 0.25, 1.0, 8.0])
    each = -torch.log1p(-torch.tensor([0.05, 0.15, 0.25, 0.95])) / (1 * 10)
    criterion, loop = GHMC(bins=10), RegionLoop(momentum=0)
    assert criterion(*batch, weight=weight).item() == pytest.approx((each * weight).sum().item(), rel=1e-5)
    assert loop(*batch, weight=weight) == loop(*batch, weight=10 * weight)
    assert stored(criterion).sum() == 4
