"""What a loss remembers: the moving average of its counts, when it changes, and how it travels."""

import copy
import pickle
import warnings

import oracle
import pytest
import torch
from cases import each_loss

from ghmdet import GHMC, Harmonizer

EASY, HARD = 0.1, 0.9  # gradient norms in the two regions of bins=2


def norms(easy, hard):
    return torch.tensor([EASY] * easy + [HARD] * hard)


def remembered(harmonizer):
    """S of each region, read from the weights 1 / (S · M) of an example in each."""
    bins, was_training = harmonizer.bins, harmonizer.training
    middles = (torch.arange(bins) + 0.5).double() / bins
    weights = harmonizer.eval()(middles)
    harmonizer.train(was_training)
    return (1 / (weights * bins)).tolist()


# The recurrence


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.75, 0.99])
def test_every_region_follows_the_recurrence_also_while_empty(momentum):
    harmonizer, average = Harmonizer(bins=5, momentum=momentum), None
    for call in range(12):
        g = torch.rand(100).double() if call % 3 else torch.rand(10).double() / 5  # then only the first region
        harmonizer(g)
        counts = oracle.region_counts(g.tolist(), 5)
        average = [momentum * s + (1 - momentum) * r for s, r in zip(average or counts, counts)]
        expected = [s or 1.0 for s in average]  # where nothing is stored, the reading example stands for itself
        assert remembered(harmonizer) == pytest.approx(expected, rel=1e-9)


def test_the_first_call_stands_for_all_the_past():
    for momentum in (0.0, 0.9, 0.999):
        weights = Harmonizer(bins=2, momentum=momentum)(norms(3, 1))
        torch.testing.assert_close(weights, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))


def test_a_call_is_weighted_by_the_average_that_includes_it():
    harmonizer = Harmonizer(bins=2, momentum=0.75)
    harmonizer(norms(8, 4))
    torch.testing.assert_close(harmonizer(norms(0, 1)), torch.tensor([1 / (2 * (0.75 * 4 + 0.25 * 1))]))


@each_loss
def test_a_call_without_a_valid_example_leaves_the_average_alone(loss):
    criterion = loss.build(bins=4, momentum=0.5)
    inputs, targets = loss.sample(20)
    nothing = torch.zeros(targets.shape, dtype=torch.bool)
    criterion(inputs, targets, nothing)  # before the first example: it does not start the average either
    first = criterion(inputs, targets)
    assert first == loss.build(bins=4, momentum=0.5)(inputs, targets)
    before = copy.deepcopy(criterion.state_dict())
    assert criterion(inputs, targets, nothing).item() == 0
    assert criterion(inputs[:0], targets[:0]).item() == 0
    assert_same_state(criterion.state_dict(), before)


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# When it stands still


@each_loss
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("density", ["regions", "exact"])
def test_only_training_with_gradients_changes_it(loss, mode, density):
    criterion = loss.build(bins=4, momentum=0.5, density=density)
    criterion(*loss.sample(20))
    before = copy.deepcopy(criterion.state_dict())
    if mode == "eval":
        criterion.eval()(*loss.sample(30))
    else:
        with getattr(torch, mode)():
            criterion(*loss.sample(30))
    assert_same_state(criterion.state_dict(), before)
    criterion.train()(*loss.sample(30))
    assert any(not torch.equal(value, before[key]) for key, value in criterion.state_dict().items())


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_then_the_stored_counts_weigh_and_a_calls_own_where_none_is_stored(mode):
    harmonizer = Harmonizer(bins=3, momentum=0.75)
    harmonizer(torch.tensor([0.1] * 6 + [0.9]))
    call = torch.tensor([0.1, 0.5, 0.5, 0.9])
    expected = torch.tensor([1 / 18, 1 / 6, 1 / 6, 1 / 3])  # 6 and 1 are stored, nothing is for the middle region
    if mode == "eval":
        found = harmonizer.eval()(call)
    else:
        with getattr(torch, mode)():
            found = harmonizer(call)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("density", ["regions", "exact"])
def test_a_count_that_has_faded_below_half_an_example_is_not_stored_any_more(density):
    harmonizer = Harmonizer(bins=3, momentum=0.75, density=density)
    harmonizer(torch.tensor([0.1, 0.9]))
    for calls, weight in ((7, 1 / 3 / 0.75**7), (1, 1 / 3)):  # 0.75⁷ = 0.13 is above (1 − 0.75) / 2, 0.75⁸ is not
        for _ in range(calls):
            harmonizer.train()(torch.tensor([0.1]))
        # the exact window around 0.9 is cut at 1: l = 0.1 + 1/6 of the 1/3 that a region has
        length = 1 if density == "regions" else (0.1 + 1 / 6) * 3
        assert harmonizer.eval()(torch.tensor([0.9])).item() == pytest.approx(weight * length, rel=1e-4)


def test_before_any_training_evaluation_uses_its_own_counts():
    for density in ("regions", "exact"):
        g = torch.rand(50)
        expected = Harmonizer(bins=5, density=density)(g)
        torch.testing.assert_close(Harmonizer(bins=5, density=density).eval()(g), expected)


def test_training_goes_on_where_it_stopped_for_evaluation():
    harmonizer, undisturbed = Harmonizer(bins=2), Harmonizer(bins=2)
    for h in (harmonizer, undisturbed):
        h(norms(3, 1))
    harmonizer.eval()(norms(1, 100))
    assert torch.equal(harmonizer.train()(norms(2, 2)), undisturbed(norms(2, 2)))


@each_loss
def test_reset_forgets(loss):
    criterion = loss.build(bins=4, momentum=0.9)
    criterion(*loss.sample(20))
    inputs, targets = loss.sample(20)
    (criterion if hasattr(criterion, "reset") else criterion.harmonizer).reset()
    assert criterion(inputs, targets) == loss.build(bins=4, momentum=0.9)(inputs, targets)


# How it travels


def trained(**settings):
    criterion = GHMC(**({"bins": 4, "momentum": 0.5} | settings))
    criterion(torch.randn(100_001), torch.zeros(100_001))  # more in a region than float16 holds
    return criterion


def next_loss(criterion):
    x = torch.linspace(-3, 3, 50)
    return criterion(x, (x > 1).float())


@pytest.mark.parametrize(
    "send",
    [copy.deepcopy, lambda criterion: pickle.loads(pickle.dumps(criterion))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_goes_on_alone(send):
    criterion = trained()
    copied = send(criterion)
    assert next_loss(copied) == next_loss(criterion)
    before = copy.deepcopy(copied.state_dict())
    criterion(torch.full((9,), 3.0), torch.zeros(9))
    assert_same_state(copied.state_dict(), before)


@pytest.mark.parametrize("density", ["regions", "exact"])
def test_a_state_dict_brings_it_back(density):
    criterion, restored = trained(density=density), GHMC(bins=4, momentum=0.5, density=density)
    restored.load_state_dict(criterion.state_dict())
    assert next_loss(restored) == next_loss(criterion)


def test_a_state_dict_of_another_number_of_bins_starts_anew_and_says_so():
    restored = GHMC(bins=5, momentum=0.5)
    next_loss(restored)
    with pytest.warns(UserWarning, match="bins"):
        restored.load_state_dict(trained().state_dict())
    assert next_loss(restored) == next_loss(GHMC(bins=5, momentum=0.5))


def test_a_state_dict_of_another_momentum_loads_without_a_word():
    restored = GHMC(bins=4, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored.load_state_dict(trained().state_dict())


@pytest.mark.parametrize("move", ["half", "bfloat16", "float", "double"])
def test_a_change_of_the_models_type_leaves_the_counts_exact(move):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), trained())
    before = copy.deepcopy(model[1].state_dict())
    getattr(model, move)()
    model.to(dtype=torch.float16)
    assert_same_state(model[1].state_dict(), before)
    assert all(state.dtype == torch.float64 for state in model[1].buffers())


def test_the_average_counts_where_single_precision_stops():
    criterion = GHMC(bins=1, momentum=0.0)
    criterion(torch.zeros(2**24 + 1, dtype=torch.bfloat16), torch.zeros(1).expand(2**24 + 1))
    assert remembered(criterion.harmonizer) == [2**24 + 1]


# The late spike


@pytest.mark.parametrize("momentum", [0.5, 0.75, 0.9])
def test_a_regions_first_examples_after_long_weigh_one_over_one_minus_alpha_too_much_and_no_more(momentum):
    harmonizer = Harmonizer(bins=2, momentum=momentum)
    for _ in range(30):
        harmonizer(norms(1000, 0))
    late = norms(1000, 5)
    own = Harmonizer(bins=2)(late)[-1].item()
    assert harmonizer(late)[-1].item() == pytest.approx(own / (1 - momentum), rel=1e-6)
    assert own < harmonizer(late)[-1].item() < own / (1 - momentum)  # and it subsides


def test_max_weight_caps_the_spike():
    harmonizer = Harmonizer(bins=2, momentum=0.9, max_weight=20.0)
    for _ in range(30):
        harmonizer(norms(999, 0))
    beta = 1000 * harmonizer(norms(999, 1))
    assert beta[-1].item() == pytest.approx(20)
    assert beta[0].item() == pytest.approx(1000 / 2 / 999)
