"""normalizer="occupied" is what the authors' released code computes: shown with their loop, written down again here.

Their loop goes over the regions that hold an example, weighs each region's examples by the total over its count, and
divides by the number of such regions. With momentum it keeps a count per region that starts at zero and moves only
when the region holds an example. These two differences from the paper's equation 12 are all that sets it apart.
"""

import oracle
import pytest
import torch
from cases import MU

import ghmdet

CALLS = [(-4.0, 60), (-1.0, 25), (0.0, 40), (3.0, 7), (-2.0, 33), (-4.0, 50)]  # where logits lie, and how many


class AuthorsLoop:
    """The released code's sum over any losses and gradient norms; each of its two departures can be mended."""

    def __init__(self, bins, momentum, *, start_at_zero=True, freeze_empty_regions=True):
        self.bins, self.momentum = bins, momentum
        self.start_at_zero, self.freeze_empty_regions = start_at_zero, freeze_empty_regions
        self.kept = [0.0] * bins
        self.first = True

    def __call__(self, losses, norms):
        total, weights, occupied = len(norms), [0.0] * len(norms), 0
        for j in range(self.bins):
            inside = [i for i, g in enumerate(norms) if oracle.region(g, self.bins) == j]
            count = self._count(j, len(inside))
            if inside:
                occupied += 1
                for i in inside:
                    weights[i] = total / count
        self.first = False
        return sum(loss * weight / occupied for loss, weight in zip(losses, weights)) / total

    def _count(self, j, found):
        if self.momentum == 0:
            return found
        if found or not self.freeze_empty_regions:
            a = self.momentum
            self.kept[j] = a * self.kept[j] + (1 - a) * found
        if self.first and not self.start_at_zero:
            self.kept[j] = found
        return self.kept[j]


def calls():
    """Inputs, targets and the oracle's examples, call after call; some leave regions empty that others fill."""
    for middle, n in CALLS:
        logits, targets = torch.randn(n, dtype=torch.float64) + middle, (torch.rand(n) < 0.2).double()
        yield logits, targets, [oracle.binary(x, t) for x, t in zip(logits.tolist(), targets.tolist())]


def compare(loop, momentum, bins=10):
    """The library's loss over the loop's, call after call."""
    criterion = ghmdet.GHMC(bins=bins, momentum=momentum, normalizer="occupied")
    ratios = []
    for logits, targets, examples in calls():
        losses, norms, _ = zip(*examples)
        ratios.append(criterion(logits, targets).item() / loop(losses, norms))
    return ratios


@pytest.mark.parametrize("bins", [1, 10, 30])
def test_without_momentum_every_call_is_the_authors(bins):
    assert compare(AuthorsLoop(bins, 0.0), 0.0, bins) == pytest.approx([1.0] * len(CALLS), rel=1e-9)


def test_without_momentum_every_call_of_ghmr_is_the_authors():
    loop, criterion = AuthorsLoop(10, 0.0), ghmdet.GHMR(mu=MU, bins=10, momentum=0.0, normalizer="occupied")
    for scale in (1.0, 0.1, 0.01, 0.001):
        inputs, targets = torch.randn(30, 4, dtype=torch.float64) * scale, torch.randn(30, 4).double() * scale
        losses, norms, _ = zip(*(oracle.box(d, MU) for d in (inputs - targets).flatten().tolist()))
        assert criterion(inputs, targets).item() == pytest.approx(loop(losses, norms), rel=1e-9)


def test_without_momentum_ignored_examples_are_left_out_as_the_authors_leave_them_out():
    loop, criterion = AuthorsLoop(10, 0.0), ghmdet.GHMC(bins=10, momentum=0.0, normalizer="occupied")
    for logits, targets, examples in calls():
        valid = torch.rand(len(logits)) < 0.6
        losses, norms, _ = zip(*(e for e, counts in zip(examples, valid.tolist()) if counts))
        assert criterion(logits, targets, valid).item() == pytest.approx(loop(losses, norms), rel=1e-9)


@pytest.mark.parametrize("momentum", [0.5, 0.75, 0.9])
def test_with_momentum_the_authors_first_loss_is_too_large_by_their_start_at_zero(momentum):
    first, *_ = compare(AuthorsLoop(10, momentum), momentum)
    assert first == pytest.approx(1 - momentum, rel=1e-9)  # the library's over theirs


def test_with_momentum_the_start_at_zero_alone_fades_where_no_region_is_ever_empty():
    loop, criterion = AuthorsLoop(4, 0.75), ghmdet.Harmonizer(bins=4, momentum=0.75, normalizer="occupied")
    for call in range(1, 30):
        norms = torch.tensor([0.1, 0.3, 0.6, 0.9], dtype=torch.float64).repeat_interleave(5)  # the same every call
        ratio = criterion(norms).sum().item() / loop([1.0] * 20, norms.tolist())
        assert ratio == pytest.approx(1 - 0.75**call, rel=1e-9)


def test_with_momentum_a_region_that_was_empty_keeps_the_authors_old_count_and_fades_in_the_papers():
    loop = AuthorsLoop(2, 0.5, start_at_zero=False)
    criterion = ghmdet.Harmonizer(bins=2, momentum=0.5, normalizer="occupied")
    both, easy, hard = [0.1] * 8 + [0.9] * 8, [0.1] * 8, [0.9] * 8
    found = [(criterion(torch.tensor(g).double()).sum().item(), loop([1.0] * len(g), g)) for g in (both, easy, hard)]
    # the hard region: 8, then empty, then 8. Theirs: 8, 8, ½ · 8 + ½ · 8 = 8. The paper's: 8, 4, ½ · 4 + ½ · 8 = 6.
    assert [theirs for _, theirs in found] == pytest.approx([1.0, 1.0, 8 / 8])
    assert [ours for ours, _ in found] == pytest.approx([1.0, 1.0, 8 / 6])


@pytest.mark.parametrize("momentum", [0.5, 0.75, 0.9])
def test_with_momentum_nothing_else_differs(momentum):
    either_left = [
        compare(AuthorsLoop(10, momentum, start_at_zero=False), momentum),
        compare(AuthorsLoop(10, momentum, freeze_empty_regions=False), momentum),
    ]
    mended = compare(AuthorsLoop(10, momentum, start_at_zero=False, freeze_empty_regions=False), momentum)
    assert mended == pytest.approx([1.0] * len(CALLS), rel=1e-9)
    for ratios in either_left:  # and it takes both
        assert ratios != pytest.approx([1.0] * len(CALLS), rel=1e-3)
