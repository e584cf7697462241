"""Settings, shapes and dtypes that are refused, and with which sentence: what was expected, what came."""

import functools
import math

import pytest
import torch

from ghmdet import GHMC, GHMR, Harmonizer, SoftmaxGHMC
from ghmdet.functional import (
    asl1_loss,
    ghmc_loss,
    ghmr_loss,
    gradient_density,
    harmonize,
    region_counts,
    softmax_ghmc_loss,
)

NAN = math.nan

everywhere = pytest.mark.usefixtures("any_implementation")

X = torch.zeros(4, 3)
DENSE = torch.zeros(4, 3)
LABELS = torch.tensor([0, 1, 2, -1])
CLASSES = torch.tensor([0, 1, 2, 0])
G = torch.tensor([0.1, 0.2, 0.9])


def table(rows):
    """A row is what is given or done, the error, and its sentence; the sentence names the test."""
    return pytest.mark.parametrize(
        ("given", "error", "sentence"), rows, ids=[row[-1].replace("\\", "") for row in rows]
    )


# Settings: the same sentence wherever the same setting can be given.

MODULES = {"GHMC": GHMC, "GHMR": GHMR, "SoftmaxGHMC": SoftmaxGHMC, "Harmonizer": Harmonizer}
FUNCTIONS = {
    "ghmc_loss": functools.partial(ghmc_loss, X, DENSE),
    "ghmr_loss": functools.partial(ghmr_loss, X, DENSE),
    "softmax_ghmc_loss": functools.partial(softmax_ghmc_loss, X, CLASSES),
    "harmonize": functools.partial(harmonize, G, G),
}


def setting(**given):
    return given


@pytest.mark.parametrize("taker", [*MODULES, *FUNCTIONS])
@table(
    [
        (setting(bins=0), ValueError, r"bins must be at least 1, got 0"),
        (setting(bins=-3), ValueError, r"bins must be at least 1, got -3"),
        (setting(bins=2.5), TypeError, r"bins must be an integer, got 2\.5"),
        (setting(bins="30"), TypeError, r"bins must be an integer, got '30'"),
        (setting(bins=True), TypeError, r"bins must be an integer, got True"),
        (setting(bins=None), TypeError, r"bins must be an integer, got None"),
        (setting(max_weight=0), ValueError, r"max_weight must be above 0.*got 0"),
        (setting(max_weight=-1.5), ValueError, r"max_weight must be above 0.*got -1\.5"),
        (setting(max_weight=NAN), ValueError, r"max_weight must be above 0.*got nan"),
        (setting(max_weight="3"), TypeError, r"max_weight must be a number.*got '3'"),
        (setting(density="windows"), ValueError, r"density must be .*'regions'.*'exact'.*got 'windows'"),
        (setting(density=None), ValueError, r"density must be .*'regions'.*'exact'.*got None"),
        (setting(normalizer="sum"), ValueError, r"normalizer must be .*'regions'.*'occupied'.*got 'sum'"),
        (setting(density="exact", normalizer="occupied"), ValueError, r"occupied.*exact"),
    ]
)
def test_a_setting_out_of_its_range_is_refused_by_all_who_take_it(taker, given, error, sentence):
    with pytest.raises(error, match=sentence):
        (MODULES | FUNCTIONS)[taker](**given)


@pytest.mark.parametrize("module", MODULES)
@table(
    [
        (setting(momentum=1), ValueError, r"momentum must be in \[0, 1\), got 1"),
        (setting(momentum=-0.1), ValueError, r"momentum must be in \[0, 1\), got -0\.1"),
        (setting(momentum=NAN), ValueError, r"momentum must be in \[0, 1\), got nan"),
        (setting(momentum="0.75"), TypeError, r"momentum must be a number.*got '0\.75'"),
        (setting(momentum=None), TypeError, r"momentum must be a number.*got None"),
        (setting(sync="nccl"), TypeError, r"sync must be .*got 'nccl'"),
    ]
)
def test_a_modules_setting_out_of_its_range_is_refused(module, given, error, sentence):
    with pytest.raises(error, match=sentence):
        MODULES[module](**given)


@table(
    [
        (lambda: GHMR(mu=0), ValueError, r"mu must be above 0.*got 0"),
        (lambda: GHMR(mu=-0.02), ValueError, r"mu must be above 0.*got -0\.02"),
        (lambda: GHMR(mu=NAN), ValueError, r"mu must be above 0.*got nan"),
        (lambda: GHMR(mu="0.02"), TypeError, r"mu must be a number.*got '0\.02'"),
        (lambda: ghmr_loss(X, DENSE, mu=0.0), ValueError, r"mu must be above 0.*got 0\.0"),
        (lambda: asl1_loss(X, mu=-1), ValueError, r"mu must be above 0.*got -1"),
        (lambda: gradient_density(G, epsilon=0), ValueError, r"epsilon must be above 0.*got 0"),
        (lambda: gradient_density(G, epsilon=-0.1), ValueError, r"epsilon must be above 0.*got -0\.1"),
        (lambda: gradient_density(G, epsilon="0.1"), TypeError, r"epsilon must be a number.*got '0\.1'"),
        (lambda: gradient_density(G, epsilon=0.1, method="fast"), ValueError, r"method.*'exact'.*'histogram'.*'fast'"),
        (lambda: region_counts(G, bins=0), ValueError, r"bins must be at least 1, got 0"),
        (lambda: region_counts(G, bins=3.0), TypeError, r"bins must be an integer, got 3\.0"),
        (lambda: GHMC(class_dim=1.5), TypeError, r"class_dim must be an integer, got 1\.5"),
        (lambda: GHMC(class_dim=None), TypeError, r"class_dim must be an integer, got None"),
        (lambda: ghmc_loss(X, LABELS, class_dim="last"), TypeError, r"class_dim must be an integer, got 'last'"),
        (lambda: SoftmaxGHMC(ignore_index=None), TypeError, r"ignore_index must be an integer, got None"),
        (lambda: SoftmaxGHMC(ignore_index=0.5), TypeError, r"ignore_index must be an integer, got 0\.5"),
        (lambda: softmax_ghmc_loss(X, CLASSES, ignore_index="no"), TypeError, r"ignore_index must be an integer, got"),
    ]
)
def test_a_losss_own_setting_out_of_its_range_is_refused(given, error, sentence):
    with pytest.raises(error, match=sentence):
        given()


def test_settings_behind_the_star_have_names():
    for call in (lambda: GHMC(30, 0.75, "exact"), lambda: GHMR(0.02, 10, 0.75, "exact"), lambda: region_counts(G, 3)):
        with pytest.raises(TypeError, match="positional"):
            call()


# Shapes and dtypes


BOTH_SHAPES = r"targets must .*\(4, 3\).*\(4,\)"


@everywhere
@table(
    [
        (lambda: ghmc_loss(X.long(), DENSE), TypeError, r"inputs must be a floating-point tensor, got torch\.int64"),
        (lambda: ghmc_loss([0.0], DENSE), TypeError, r"inputs must be a tensor, got list"),
        (lambda: ghmc_loss(X, [0, 1]), TypeError, r"targets must be a tensor, got list"),
        (lambda: ghmc_loss(X, X[:, :2]), ValueError, BOTH_SHAPES + r".*got \(4, 2\)"),
        (lambda: ghmc_loss(X, X.T), ValueError, BOTH_SHAPES + r".*got \(3, 4\)"),
        (lambda: ghmc_loss(X, X[:, :1]), ValueError, BOTH_SHAPES + r".*got \(4, 1\)"),
        (lambda: ghmc_loss(X, LABELS[:3]), ValueError, BOTH_SHAPES + r".*got \(3,\)"),
        (lambda: ghmc_loss(X, LABELS, class_dim=0), ValueError, r"\(4, 3\).*\(3,\).*got \(4,\)"),
        (lambda: ghmc_loss(X, LABELS, class_dim=2), ValueError, r"class_dim must .*\(4, 3\), got 2"),
        (lambda: ghmc_loss(X, LABELS, class_dim=-3), ValueError, r"class_dim must .*\(4, 3\), got -3"),
        (lambda: ghmc_loss(X, X[:, 0]), TypeError, r"targets .*\(4,\).*integer.*got torch\.float32"),
        (lambda: ghmc_loss(X, X[:, 0].bool()), TypeError, r"targets .*\(4,\).*integer.*got torch\.bool"),
        (lambda: ghmc_loss(X, DENSE.cfloat()), TypeError, r"targets must .*got torch\.complex64"),
        (lambda: ghmc_loss(X, DENSE.clone().requires_grad_()), ValueError, r"targets must not require a gradient"),
        (lambda: ghmr_loss(X, X[:, 0]), ValueError, r"targets must .*\(4, 3\), got \(4,\)"),
        (lambda: ghmr_loss(X, X.T), ValueError, r"targets must .*\(4, 3\), got \(3, 4\)"),
        (lambda: ghmr_loss(X.int(), X), TypeError, r"inputs must be a floating-point tensor, got torch\.int32"),
        (lambda: ghmr_loss(X, None), TypeError, r"targets must be a tensor, got NoneType"),
        (lambda: softmax_ghmc_loss(X, DENSE), ValueError, r"targets must .*\(4, 3\).*\(4,\), got \(4, 3\)"),
        (lambda: softmax_ghmc_loss(X, CLASSES[:3]), ValueError, r"targets must .*\(4, 3\).*\(4,\), got \(3,\)"),
        (lambda: softmax_ghmc_loss(X, X[:, 0]), TypeError, r"targets .*\(4,\).*class indices.*got torch\.float32"),
        (lambda: softmax_ghmc_loss(X.long(), CLASSES), TypeError, r"inputs must be a floating-point tensor, got"),
        (lambda: softmax_ghmc_loss(X.sum(), CLASSES[0]), ValueError, r"inputs?.*\(\)"),
        (lambda: Harmonizer()(G.long()), TypeError, r"gradient_norm must be a floating-point tensor, got torch\.int64"),
        (lambda: Harmonizer()([0.5]), TypeError, r"gradient_norm must be a tensor, got list"),
        (lambda: harmonize(X, G), ValueError, r"gradient_norm must .*\(4, 3\), got \(3,\)"),
        (lambda: harmonize(G.long(), G), TypeError, r"loss must be a floating-point tensor, got torch\.int64"),
        (
            lambda: gradient_density(G > 0, epsilon=0.1),
            TypeError,
            r"g must be a floating-point tensor, got",
        ),
        (lambda: gradient_density(0.5, epsilon=0.1), TypeError, r"g must be a tensor, got float"),
        (lambda: region_counts(CLASSES, bins=3), TypeError, r"g must be a floating-point tensor, got torch\.int64"),
        (lambda: asl1_loss(CLASSES), TypeError, r"d must be a floating-point tensor, got torch\.int64"),
    ]
)
def test_wrong_shapes_and_dtypes_are_refused(given, error, sentence):
    with pytest.raises(error, match=sentence):
        given()


# Every one of these has examples of shape (4, 3).
TAKERS = {
    "GHMC": functools.partial(ghmc_loss, X, DENSE),
    "GHMC with class indices": functools.partial(ghmc_loss, X, LABELS),
    "GHMR": functools.partial(ghmr_loss, X, DENSE),
    "SoftmaxGHMC": functools.partial(softmax_ghmc_loss, torch.zeros(4, 5, 3), torch.zeros(4, 3, dtype=torch.long)),
    "harmonize": functools.partial(harmonize, X, X),
}
VALID_TAKERS = TAKERS | {
    "Harmonizer": functools.partial(Harmonizer(), X),
    "gradient_density": functools.partial(gradient_density, X, epsilon=0.1),
    "region_counts": functools.partial(region_counts, X, bins=3),
}


@everywhere
@pytest.mark.parametrize("taker", VALID_TAKERS)
@table(
    [
        (torch.ones(4, 3), TypeError, r"valid must be a bool tensor, got torch\.float32"),
        (torch.ones(4, 3, dtype=torch.uint8), TypeError, r"valid must be a bool tensor, got torch\.uint8"),
        ([True], TypeError, r"valid must be a tensor, got list"),
        (torch.ones(5, dtype=torch.bool), ValueError, r"valid must .*\(4, 3\), got \(5,\)"),
        (torch.ones(3, 4, dtype=torch.bool), ValueError, r"valid must .*\(4, 3\), got \(3, 4\)"),
        (torch.ones(2, 4, 3, dtype=torch.bool), ValueError, r"valid must .*\(4, 3\), got \(2, 4, 3\)"),
    ]
)
def test_valid_is_a_bool_tensor_that_fits_the_examples(taker, given, error, sentence):
    with pytest.raises(error, match=sentence):
        VALID_TAKERS[taker](valid=given)


@everywhere
@pytest.mark.parametrize("taker", TAKERS)
@table(
    [
        (torch.ones(4, 3, dtype=torch.long), TypeError, r"weight must be a floating-point tensor, got torch\.int64"),
        (torch.ones(4, 3, dtype=torch.bool), TypeError, r"weight must be a floating-point tensor, got torch\.bool"),
        (2.0, TypeError, r"weight must be a tensor, got float"),
        (torch.ones(5), ValueError, r"weight must .*\(4, 3\), got \(5,\)"),
        (torch.ones(3, 4), ValueError, r"weight must .*\(4, 3\), got \(3, 4\)"),
        (torch.ones(2, 4, 3), ValueError, r"weight must .*\(4, 3\), got \(2, 4, 3\)"),
        (torch.ones(4, 3).requires_grad_(), ValueError, r"weight must not require a gradient.*detach"),
    ]
)
def test_weight_is_a_floating_point_tensor_that_fits_the_examples(taker, given, error, sentence):
    with pytest.raises(error, match=sentence):
        TAKERS[taker](weight=given)


@pytest.mark.parametrize("name", ["valid", "weight"])
def test_the_sentence_names_what_the_shape_must_fit(name):
    given = {name: torch.ones(5, dtype=torch.bool if name == "valid" else torch.float32)}
    with pytest.raises(ValueError, match=r"the targets' shape \(4,\).*the inputs' shape \(4, 3\), got \(5,\)"):
        TAKERS["GHMC with class indices"](**given)
    with pytest.raises(ValueError, match=r"the targets' shape \(4, 3\), got \(5,\)"):
        TAKERS["SoftmaxGHMC"](**given)


def test_only_class_indices_let_valid_and_weight_stand_for_positions():
    for given in ({"valid": torch.ones(4, dtype=torch.bool)}, {"weight": torch.ones(4)}):
        assert ghmc_loss(X, LABELS, **given).isfinite()
        with pytest.raises(ValueError, match=r"\(4, 3\), got \(4,\)"):
            ghmc_loss(X, DENSE, **given)
