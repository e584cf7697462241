"""The first two proofs of every loss: values worked out by hand, and the slow loop over the paper's equations."""

import math

import oracle
import pytest
import torch
from cases import LOSSES, MU, assert_is_the_oracles, each_loss, off_the_edges, value_and_gradient

import ghmdet
from ghmdet.functional import asl1_loss, ghmc_loss, ghmr_loss, gradient_density

LN3, LN4 = math.log(3), math.log(4)


# Worked out by hand. A region weighs its examples alike, so it adds their mean loss, over M.


@pytest.mark.usefixtures("any_implementation")
def test_ghmc_by_hand():
    # p = ¾, ¾, ¼, ¼ for targets 1, 1, 0, 1: three lie in the region of g = ¼ with loss ln 4/3, one at g = ¾ with ln 4
    value, gradient = value_and_gradient(
        ghmdet.GHMC(bins=10), torch.tensor([LN3, LN3, -LN3, -LN3]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    )
    assert value.item() == pytest.approx((math.log(4 / 3) + LN4) / 10, rel=1e-6)
    # p − p* over GD = R · M
    torch.testing.assert_close(gradient, torch.tensor([-0.25 / 30, -0.25 / 30, 0.25 / 30, -0.75 / 10]))


@pytest.mark.usefixtures("any_implementation")
def test_ghmc_with_a_soft_target_by_hand():
    # p = ¾ against ½ and ¼ against 0: both have g = ¼, and mean loss (2 ln 2 − ½ ln 3 + ln 4/3) / 2
    value = ghmc_loss(torch.tensor([LN3, -LN3]), torch.tensor([0.5, 0.0]), bins=10)
    assert value.item() == pytest.approx((math.log(4) - LN3 / 2 + math.log(4 / 3)) / 2 / 10, rel=1e-6)


@pytest.mark.usefixtures("any_implementation")
def test_ghmc_with_class_indices_by_hand():
    # the first row's class is 1, the second is background: g = ¼, ¼ and ¼, ¾
    logits, classes = torch.tensor([[-LN3, LN3], [-LN3, LN3]]), torch.tensor([1, -1])
    value, gradient = value_and_gradient(ghmdet.GHMC(bins=10), logits, classes)
    assert value.item() == pytest.approx((math.log(4 / 3) + LN4) / 10, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[0.25 / 30, -0.25 / 30], [0.25 / 30, 0.75 / 10]]))


@pytest.mark.usefixtures("any_implementation")
def test_ghmr_by_hand():
    # d = 5/12 μ and 12/5 μ make triangles 5, 12, 13: g = 5/13 and 12/13, ASL1 = 13/12 μ − μ and 13/5 μ − μ
    inputs, targets = torch.tensor([[5 / 12, -5 / 12, 12 / 5, 1.0]]) * MU, torch.tensor([[0.0, 0.0, 0.0, 1.0]]) * MU
    value, gradient = value_and_gradient(ghmdet.GHMR(mu=MU, bins=10), inputs, targets)
    assert value.item() == pytest.approx((MU / 12 + MU * 8 / 5 + 0) / 10, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[5 / 13 / 20, -5 / 13 / 20, 12 / 13 / 10, 0.0]]))


def test_softmax_ghmc_by_hand():
    # p = (⅛, ¼, ⅝) for every row; g = 1 − p_y = ⅞, ⅞, ⅜
    logits = torch.tensor([0.125, 0.25, 0.625]).log().expand(3, 3)
    value, gradient = value_and_gradient(ghmdet.SoftmaxGHMC(bins=10), logits, torch.tensor([0, 0, 2]))
    assert value.item() == pytest.approx((math.log(8) + math.log(8 / 5)) / 10, rel=1e-6)
    easy, hard = torch.tensor([0.125, 0.25, -0.375]) / 10, torch.tensor([-0.875, 0.25, 0.625]) / 20
    torch.testing.assert_close(gradient, torch.stack([hard, hard, easy]))


def test_harmonizer_by_hand():
    g, own = torch.tensor([0.1, 0.2, 0.9, 0.3]), torch.tensor([1.0, 2.0, 3.0, 6.0])
    harmonizer = ghmdet.Harmonizer(bins=2)
    torch.testing.assert_close(harmonizer(g), torch.tensor([1 / 6, 1 / 6, 1 / 2, 1 / 6]))
    assert harmonizer.harmonize(own, g).item() == pytest.approx((1 + 2 + 6) / 6 + 3 / 2)


def test_the_definition_by_windows_by_hand():
    # ε = ½: the windows of 0.1 and 0.2 hold both, and reach from 0 on; 0.9 is alone, its window ends at 1
    weights = ghmdet.Harmonizer(bins=2, density="exact")(torch.tensor([0.1, 0.2, 0.9]))
    torch.testing.assert_close(weights, torch.tensor([0.35 / 2, 0.45 / 2, 0.35 / 1]), rtol=1e-5, atol=0)


def test_asl1_by_hand():
    assert asl1_loss(torch.tensor([0.75, -4 / 3]) * MU, mu=MU).tolist() == pytest.approx([MU / 4, MU * 2 / 3])


# The slow loop over the paper's equations.

SETTINGS = {
    "the paper's": {},
    "the paper's, call after call": {"momentum": 0.75},
    "the authors' normalizer": {"momentum": 0.75, "normalizer": "occupied"},
    "capped": {"momentum": 0.75, "max_weight": 2.0},
}


@pytest.mark.usefixtures("any_implementation")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@each_loss
def test_unit_regions_are_the_slow_loops(loss, settings):
    settings = {"bins": 10, "momentum": 0.0} | settings
    criterion, mechanism = loss.build(**settings), oracle.Mechanism(**settings)
    for rows in (40, 7, 1, 60):
        inputs, targets = off_the_edges(loss, 10, rows)
        found = value_and_gradient(criterion, inputs, targets)
        expected = oracle.harmonize(mechanism, loss.examples(inputs.tolist(), targets.tolist()))
        assert_is_the_oracles(*found, expected, relative=1e-6)


@each_loss
def test_unit_regions_are_the_slow_loops_in_every_single_gradient(loss):
    inputs, targets = off_the_edges(loss, 30, 60, torch.float64)
    found = value_and_gradient(loss.build(bins=30), inputs, targets)
    expected = oracle.harmonize(oracle.Mechanism(30), loss.examples(inputs.tolist(), targets.tolist()))
    assert found[0].dtype == found[1].dtype == torch.float64
    assert_is_the_oracles(*found, expected, relative=1e-6, of_each=True)


@pytest.mark.usefixtures("any_implementation")
@each_loss
def test_valid_and_weight_are_the_slow_loops(loss):
    inputs, targets = off_the_edges(loss, 10, 60)
    shape = targets.shape  # of single examples, or of whole positions
    valid, weight = torch.rand(shape) < 0.6, torch.rand(shape) * 3
    found = value_and_gradient(loss.build(bins=10), inputs, targets, valid, weight)
    examples = loss.examples(inputs.tolist(), targets.tolist())
    times = len(examples) // valid.numel()
    valid, weight = (t.flatten().repeat_interleave(times).tolist() for t in (valid, weight))
    assert_is_the_oracles(*found, oracle.harmonize(oracle.Mechanism(10), examples, valid, weight), relative=1e-6)


ADVERSARIAL = {
    "all in one region": ([0.0, 0.01, -0.02, 0.03] * 20, [0.62, 0.61, 0.62, 0.61] * 20),
    "all certain and right": ([50.0, -50.0] * 20, [1.0, 0.0] * 20),
    "all easy": ([12.0, -12.0] * 20, [1.0, 0.0] * 20),
    "all easy and soft": ([-9.0, -12.0] * 20, [0.0, 1e-5] * 20),
    "all certain and wrong": ([50.0, -50.0] * 20, [0.0, 1.0] * 20),
    "g = 0 for soft targets": ([0.0] * 30, [0.5] * 30),
    "both ends and one between": ([50.0] * 30 + [-50.0, 2.0], [1.0] * 30 + [1.0, 0.0]),
    "the largest logits": ([1e4, -1e4, 1e4, -1e4, 0.3], [1.0, 0.0, 0.0, 1.0, 0.0]),
    "one example": ([0.3], [0.0]),
    "on the edges of four regions": ([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.25, 0.5, 0.75, 1.0]),
}


@pytest.mark.usefixtures("any_implementation")
@pytest.mark.parametrize("bins", [1, 4, 32])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_ghmc_on_adversarial_inputs_is_the_slow_loops(name, bins):
    inputs, targets = ADVERSARIAL[name]
    found = value_and_gradient(ghmdet.GHMC(bins=bins), torch.tensor(inputs), torch.tensor(targets))
    examples = [oracle.binary(x, t) for x, t in zip(inputs, targets)]
    assert_is_the_oracles(*found, oracle.harmonize(oracle.Mechanism(bins), examples), relative=1e-6)


@pytest.mark.usefixtures("any_implementation")
@pytest.mark.parametrize("d", [[0.0] * 9, [1e-6] * 9, [1e6, -1e6, 0.0], [1e-6, 0.01, 3.0], [0.5]])
def test_ghmr_on_adversarial_inputs_is_the_slow_loops(d):
    inputs = torch.tensor(d)
    found = value_and_gradient(ghmdet.GHMR(mu=MU, bins=8), inputs, torch.zeros_like(inputs))
    examples = [oracle.box(one, MU) for one in inputs.double().tolist()]
    if max(map(abs, d)) > 1e-3:
        assert_is_the_oracles(*found, oracle.harmonize(oracle.Mechanism(8), examples), relative=1e-6)
    # so near zero, even the oracle's √(d² + μ²) − μ cancels; ASL1 is d² / 2μ there
    expected = sum((one * one / 2 / MU if abs(one) < 1e-5 else loss) for one, (loss, _, _) in zip(d, examples))
    assert ghmr_loss(inputs, torch.zeros_like(inputs), mu=MU, bins=1) * len(d) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "row", [[12.0, 0.0, -1.0], [1e4, 0.0, -1e4], [-12.0, 0.0, 1.0], [-1e4, 0.0, 1e4], [3.0, 3.0, 3.0]]
)
def test_softmax_ghmc_on_adversarial_inputs_is_the_slow_loops(row):
    inputs, targets = torch.tensor([row] * 9), torch.zeros(9, dtype=torch.long)
    found = value_and_gradient(ghmdet.SoftmaxGHMC(bins=8), inputs, targets)
    assert_is_the_oracles(*found, oracle.harmonize(oracle.Mechanism(8), [oracle.softmax(row, 0)] * 9), relative=1e-6)


@pytest.mark.parametrize("ignore_index", [-100, -1, 2])
def test_softmax_ghmc_leaves_out_its_ignore_index(ignore_index):
    inputs, targets = off_the_edges(LOSSES["SoftmaxGHMC"], 8, 40)
    kept = targets != 2
    targets[~kept] = ignore_index
    found = ghmdet.SoftmaxGHMC(bins=8, ignore_index=ignore_index)(inputs, targets)
    assert found.item() == pytest.approx(ghmdet.SoftmaxGHMC(bins=8)(inputs[kept], targets[kept]).item(), rel=1e-6)


def test_softmax_ghmc_of_pixels_is_that_of_their_list():
    inputs, targets = torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4))
    listed = ghmdet.SoftmaxGHMC()(inputs.permute(0, 2, 3, 1).reshape(-1, 5), targets.flatten())
    assert ghmdet.SoftmaxGHMC()(inputs, targets).item() == pytest.approx(listed.item(), rel=1e-6)
    one = ghmdet.SoftmaxGHMC()(inputs[0, :, 0, 0], targets[0, 0, 0])  # a single example, as cross_entropy takes it
    assert one == ghmdet.SoftmaxGHMC()(inputs[:1, :, 0, 0], targets[:1, 0, 0])


@each_loss
def test_the_sorted_density_is_the_slow_loops(loss):
    inputs, targets = off_the_edges(loss, 10, 60, torch.float64, window_gap=1e-6)
    examples = loss.examples(inputs.tolist(), targets.tolist())
    total, norm, _ = (torch.tensor([e[i] for e in examples], dtype=torch.float64) for i in (0, 1, 0))
    expected, _ = oracle.harmonize(oracle.Mechanism(10, density="exact"), examples)
    assert (total / gradient_density(norm, epsilon=0.1)).sum().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("any_implementation")
@pytest.mark.parametrize("momentum", [0.0, 0.75])
@each_loss
def test_the_fine_histogram_is_within_a_thousandth_of_the_definition(loss, momentum):
    settings = {"bins": 10, "momentum": momentum, "density": "exact"}
    criterion, mechanism = loss.build(**settings), oracle.Mechanism(**settings)
    inputs, targets = off_the_edges(loss, 10, 60, window_gap=3e-4)  # a fine bin is narrower than 1/8000
    assert len(inputs) > 15
    for part in (slice(0, None, 2), slice(1, None, 2), slice(None)):
        found = value_and_gradient(criterion, inputs[part], targets[part])
        expected = oracle.harmonize(mechanism, loss.examples(inputs[part].tolist(), targets[part].tolist()))
        assert_is_the_oracles(*found, expected, relative=1e-3, of_each=loss is not LOSSES["SoftmaxGHMC"])
