"""What must hold for any examples: their order is nothing, ignored ones are nothing, and regions weigh alike."""

import math

import pytest
import torch
from cases import each_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from ghmdet import Harmonizer
from ghmdet.functional import gradient_density, harmonize, region_counts

modest = settings(deadline=None, derandomize=True, max_examples=25)
norms = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60)
bins = st.integers(1, 40)
rows = st.integers(1, 30)
seeds = st.integers(0, 2**32 - 1)
densities = st.sampled_from(["regions", "exact"])


def sampled(loss, n, seed):
    torch.manual_seed(seed)
    inputs, targets = loss.sample(n)
    return inputs.requires_grad_(), targets


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@each_loss
@modest
@given(rows=rows, seed=seeds, bins=bins, density=densities)
def test_permuting_examples_changes_nothing(loss, rows, seed, bins, density):
    inputs, targets = sampled(loss, rows, seed)
    shuffled = torch.randperm(rows)
    criterion = loss.build(bins=bins, density=density, momentum=0.0)
    straight, permuted = criterion(inputs, targets), criterion(inputs[shuffled], targets[shuffled])
    assert_same(permuted, straight)
    assert_same(*(torch.autograd.grad(value, inputs)[0] for value in (permuted, straight)))


@each_loss
@modest
@given(rows=rows, ignored=rows, seed=seeds, bins=bins, density=densities, junk=st.sampled_from([0.0, 7.0, math.nan]))
def test_adding_ignored_examples_changes_nothing(loss, rows, ignored, seed, bins, density, junk):
    inputs, targets = sampled(loss, rows, seed)
    more = torch.full((ignored, *inputs.shape[1:]), junk)
    labels = targets[:1].expand(ignored, *targets.shape[1:])
    place = torch.randperm(rows + ignored)
    valid = (
        (torch.arange(rows + ignored) < rows)[place]
        .reshape(-1, *[1] * (targets.dim() - 1))
        .expand_as(torch.cat([targets, labels]))
    )
    criterion = loss.build(bins=bins, density=density, momentum=0.0)
    alone = criterion(inputs, targets)
    among = criterion(torch.cat([inputs, more])[place], torch.cat([targets, labels])[place], valid)
    assert_same(among, alone)
    assert_same(*(torch.autograd.grad(value, inputs)[0] for value in (among, alone)))


@modest
@given(norms=norms, bins=bins)
def test_a_regions_beta_times_its_count_is_n_over_m(norms, bins):
    g = torch.tensor(norms)
    beta = len(norms) * Harmonizer(bins=bins)(g)
    each_with_its_region = [
        (region_counts(one[None], bins=bins).argmax().item(), weight) for one, weight in zip(g, beta.tolist())
    ]
    for region, count in enumerate(region_counts(g, bins=bins).tolist()):
        inside = [weight for j, weight in each_with_its_region if j == region]
        assert len(inside) == count
        assert inside == pytest.approx([len(norms) / bins / count for _ in inside], rel=1e-6)


@modest
@given(norms=norms, bins=bins)
def test_so_the_betas_of_all_add_up_to_n_over_m_for_each_region_that_is_not_empty(norms, bins):
    g = torch.tensor(norms)
    occupied = (region_counts(g, bins=bins) > 0).sum().item()
    paper, authors = (Harmonizer(bins=bins, normalizer=n)(g).sum().item() for n in ("regions", "occupied"))
    assert paper == pytest.approx(occupied / bins, rel=1e-6)
    assert authors == pytest.approx(1, rel=1e-6)


@modest
@given(norms=norms, bins=bins, cap=st.floats(0.1, 50))
def test_a_cap_bounds_every_beta_and_lowers_no_other(norms, bins, cap):
    g = torch.tensor(norms)
    free, capped = (len(norms) * Harmonizer(bins=bins, max_weight=limit)(g) for limit in (None, cap))
    torch.testing.assert_close(capped, free.clamp(max=cap))


@modest
@given(norms=norms, bins=bins)
def test_every_valid_example_is_counted_once(norms, bins):
    assert region_counts(torch.tensor(norms), bins=bins).sum().item() == len(norms)


@modest
@given(norms=norms, epsilon=st.floats(0.001, 1), method=st.sampled_from(["exact", "histogram"]))
def test_a_density_lies_between_one_and_all_examples_over_the_shortest_window(norms, epsilon, method):
    density = gradient_density(torch.tensor(norms).double(), epsilon=epsilon, method=method)
    assert (density >= (1 - 1e-9) / epsilon).all()
    assert (density <= (1 + 1e-9) * len(norms) / (epsilon / 2)).all()


@modest
@given(norms=norms, bins=bins, factor=st.floats(0.001, 1000), density=densities)
def test_the_harmonized_sum_is_linear_in_the_loss(norms, bins, factor, density):
    g, loss = torch.tensor(norms), torch.linspace(1, 2, len(norms))
    once, scaled = (harmonize(loss * f, g, bins=bins, density=density).item() for f in (1.0, factor))
    assert scaled == pytest.approx(factor * once, rel=1e-5)
    by_weight = harmonize(loss, g, bins=bins, density=density, weight=torch.tensor(factor)).item()
    assert by_weight == pytest.approx(scaled, rel=1e-5)
