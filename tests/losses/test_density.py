"""How dense the gradient norms lie: by windows around each example, and by unit regions."""

import math

import oracle
import pytest
import torch

from ghmdet.functional import gradient_density, region_counts

METHODS = ["exact", "histogram"]

# Gradient norms that sit where a comparison can go wrong. Eighths are exact in binary, and so are their windows' ends.
ADVERSARIAL = {
    "all the same": [0.3] * 50,
    "all zero": [0.0] * 50,
    "all one": [1.0] * 50,
    "both ends": [0.0] * 20 + [1.0] * 30,
    "on the edges of eight regions": [k / 8 for k in range(9)] * 3,
    "a step beside the edges": [k / 8 + d for k in range(1, 8) for d in (-1e-5, 0.0, 1e-5)],
    "one alone far from the crowd": [0.01] * 99 + [0.7],
}


def random_norms(n=200):
    return torch.rand(n, dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
def test_three_examples_worked_out_by_hand(method):
    g = torch.tensor([0.50, 0.52, 0.90])
    # windows of length 0.1: the first two see each other, 2 / 0.1; the third is alone, 1 / 0.1
    torch.testing.assert_close(gradient_density(g, epsilon=0.1, method=method), torch.tensor([20.0, 20.0, 10.0]))


@pytest.mark.parametrize("method", METHODS)
def test_at_the_ends_only_the_windows_part_inside_counts(method):
    g = torch.tensor([0.0, 1.0, 0.96875])
    # ε = 1/4: l(0) = l(1) = 1/8, and l(31/32) = 1/8 + 1/32
    expected = torch.tensor([1 / 0.125, 2 / 0.125, 2 / 0.15625])
    torch.testing.assert_close(gradient_density(g, epsilon=0.25, method=method), expected)


def test_a_window_is_closed_below_and_open_above():
    g = torch.tensor([0.25, 0.50])  # each on the other's end
    torch.testing.assert_close(gradient_density(g, epsilon=0.5), torch.tensor([1 / 0.5, 2 / 0.5]))


@pytest.mark.parametrize("epsilon", [1.0, 0.25, 1 / 30, 0.013])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_density_is_the_slow_loops_on_random_norms(epsilon, dtype):
    g = random_norms().to(dtype)
    expected = [oracle.gradient_density(one, g.tolist(), epsilon) for one in g.tolist()]
    torch.testing.assert_close(gradient_density(g, epsilon=epsilon), torch.tensor(expected, dtype=dtype))


@pytest.mark.parametrize("epsilon", [1.0, 0.5, 0.25, 0.125])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_density_is_the_slow_loops_on_adversarial_norms(name, epsilon):
    g = torch.tensor(ADVERSARIAL[name], dtype=torch.float64)
    expected = [oracle.gradient_density(one, g.tolist(), epsilon) for one in g.tolist()]
    torch.testing.assert_close(gradient_density(g, epsilon=epsilon), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_the_density_has_the_norms_shape_and_at_least_single_precision(method):
    g = torch.rand(2, 3, 4)
    for given, returned in [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        density = gradient_density(g.to(given), epsilon=0.1, method=method)
        assert (density.shape, density.dtype) == (g.shape, returned)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_valid_is_neither_counted_nor_dense(method):
    g, valid = random_norms(), torch.rand(200) < 0.7
    alone = gradient_density(g[valid], epsilon=0.1, method=method)
    among = gradient_density(torch.where(valid, g, math.nan), epsilon=0.1, method=method, valid=valid)
    torch.testing.assert_close(among[valid], alone, rtol=0, atol=0)
    assert (among[~valid] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_valid_broadcasts(method):
    g, rows = torch.rand(4, 5), torch.tensor([[True], [False], [True], [True]])
    expected = gradient_density(g, epsilon=0.2, valid=rows.expand(4, 5), method=method)
    torch.testing.assert_close(gradient_density(g, epsilon=0.2, valid=rows, method=method), expected)


@pytest.mark.parametrize("method", METHODS)
def test_no_example_has_no_density(method):
    assert gradient_density(torch.zeros(0), epsilon=0.1, method=method).shape == (0,)
    assert gradient_density(torch.tensor(0.5), epsilon=0.1, method=method).item() == pytest.approx(10)


@pytest.mark.parametrize("method", METHODS)
def test_the_density_is_a_number_and_not_a_function_to_differentiate(method):
    assert not gradient_density(random_norms().requires_grad_(), epsilon=0.1, method=method).requires_grad


def test_a_million_examples_need_no_million_by_million_comparisons():
    g = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    inner = gradient_density(g, epsilon=0.100001)[100_000:-100_000]  # an odd number of steps: no one on a window's end
    torch.testing.assert_close(inner, torch.full_like(inner, 1e6), rtol=1e-6, atol=0)


# The fine histogram: at most 1e-3 relative on the loss Σ L / GD, where the interface says so.


def apart(candidates, epsilon, gap):
    """Those of the candidates that lie at least `gap` from the ends of each other's windows."""
    kept = []
    for g in candidates:
        if all(abs(abs(g - other) - epsilon / 2) > gap for other in kept):
            kept.append(g)
    return kept


@pytest.mark.parametrize("epsilon", [1.0, 0.5, 0.1, 1 / 30])
@pytest.mark.parametrize("skew", [1, 4])
def test_the_histogram_is_within_a_thousandth_where_no_one_is_near_a_windows_end(epsilon, skew):
    norms = apart(random_norms(150).pow(skew).tolist() + [0.0, 1.0], epsilon, gap=1 / 4000)
    found = gradient_density(torch.tensor(norms, dtype=torch.float64), epsilon=epsilon, method="histogram")
    expected = torch.tensor([oracle.gradient_density(g, norms, epsilon) for g in norms], dtype=torch.float64)
    assert len(norms) > 30
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def with_some_everywhere(g):
    """A hundredth of the examples uniform, so that no window is nearly empty."""
    g[: len(g) // 100] = torch.rand(len(g) // 100)
    return g


SMOOTHLY_SPREAD = {
    "an early detector's": lambda n: with_some_everywhere((torch.randn(n) * 1.5 - 4.5).sigmoid()),
    "a converged detector's": lambda n: with_some_everywhere((torch.randn(n) * 2 - 6).sigmoid()),
    "an untrained network's": lambda n: (torch.randn(n) * 0.1).sigmoid(),
    "uniform": torch.rand,
    "beta(2, 5)": lambda n: torch.distributions.Beta(2.0, 5.0).sample((n,)),
    "beta(5, 1)": lambda n: torch.distributions.Beta(5.0, 1.0).sample((n,)),
    "easy and hard": lambda n: torch.cat([torch.rand(n // 2) ** 3, 1 - torch.rand(n // 2) ** 3]),
}


@pytest.mark.parametrize("bins", [10, 30])
@pytest.mark.parametrize("name", SMOOTHLY_SPREAD)
def test_the_histogram_is_within_a_thousandth_for_100_000_smoothly_spread_examples(name, bins):
    for _ in range(5):
        g = SMOOTHLY_SPREAD[name](100_000).double().clamp(0, 1 - 1e-7)
        cross_entropy = -torch.log1p(-g)
        by_definition = (cross_entropy / gradient_density(g, epsilon=1 / bins)).sum().item()
        by_histogram = (cross_entropy / gradient_density(g, epsilon=1 / bins, method="histogram")).sum().item()
        assert by_histogram == pytest.approx(by_definition, rel=1e-3)


def test_a_thin_tail_needs_a_million_examples_for_the_same_bound():
    """Where a window holds one or two examples, a neighbour within a cell of its end costs up to half of a weight."""
    g = (torch.randn(10**6) * 1.5 - 4.5).sigmoid().double()
    cross_entropy = -torch.log1p(-g)
    by_definition = (cross_entropy / gradient_density(g, epsilon=1 / 30)).sum().item()
    by_histogram = (cross_entropy / gradient_density(g, epsilon=1 / 30, method="histogram")).sum().item()
    assert by_histogram == pytest.approx(by_definition, rel=1e-3)


# Unit regions


def test_regions_are_closed_below_and_the_last_one_holds_g_of_one():
    g = torch.tensor([0.0, 0.249, 0.25, 0.5, 0.99, 1.0])
    counts = region_counts(g, bins=4)
    assert (counts.tolist(), counts.dtype) == ([2, 1, 1, 2], torch.int64)


@pytest.mark.parametrize("bins", [1, 2, 10, 30, 1000])
def test_region_counts_are_the_slow_loops_on_random_norms(bins):
    g = random_norms()
    assert region_counts(g, bins=bins).tolist() == oracle.region_counts(g.tolist(), bins)


@pytest.mark.parametrize("bins", [1, 2, 8, 64])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_region_counts_are_the_slow_loops_on_adversarial_norms(name, bins):
    norms = ADVERSARIAL[name]
    assert region_counts(torch.tensor(norms), bins=bins).tolist() == oracle.region_counts(norms, bins)


@pytest.mark.parametrize("bins", [3, 10, 30, 49])
def test_on_an_edge_that_binary_cannot_hold_an_example_falls_to_either_side_but_nowhere_else(bins):
    for j in range(1, bins):
        counts = region_counts(torch.tensor([j / bins]), bins=bins)
        assert counts.nonzero().item() in (j - 1, j)


def test_region_counts_leave_out_what_is_not_valid():
    g = torch.tensor([0.1, math.nan, 0.9, 0.2])
    assert region_counts(g, bins=2, valid=torch.tensor([True, False, True, True])).tolist() == [2, 1]
    assert region_counts(g, bins=2, valid=torch.zeros(4, dtype=torch.bool)).tolist() == [0, 0]
    assert region_counts(torch.zeros(0), bins=3).tolist() == [0, 0, 0]


def test_region_counts_take_any_shape_and_type():
    g = torch.rand(2, 3, 4)
    expected = region_counts(g.double().flatten(), bins=8)
    assert torch.equal(region_counts(g.double(), bins=8), expected)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(region_counts(g.to(dtype), bins=8), region_counts(g.to(dtype).double(), bins=8))


def test_counts_do_not_stop_where_single_precision_stops():
    g = torch.tensor(0.3).expand(2**24 + 3)  # 16,777,219 has no float32
    assert region_counts(g, bins=2).tolist() == [2**24 + 3, 0]
