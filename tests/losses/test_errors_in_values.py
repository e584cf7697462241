"""Values out of range: refused where they can be seen at no cost, and never without a trace elsewhere."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ghmdet import GHMC, GHMR, Harmonizer, SoftmaxGHMC
from ghmdet.functional import ghmc_loss, ghmr_loss, gradient_density, harmonize, region_counts, softmax_ghmc_loss

NAN, INF = math.nan, math.inf

everywhere = pytest.mark.usefixtures("any_implementation")

X = torch.zeros(4, 3)
G = torch.tensor([0.1, 0.2, 0.9])
KEPT = torch.tensor([False, True, True, True])


def first(value, like: Tensor) -> Tensor:
    """A tensor of zeros with this value in front."""
    changed = torch.zeros_like(like, dtype=torch.int64 if isinstance(value, int) else torch.float32)
    changed.view(-1)[0] = value
    return changed


DENSE_RULE = r"targets must be in \[0, 1\].*got "
INDEX_RULE = r"class indices must be in \[0, 3\).*-1.*got "
NORM_RULE = r"gradient norm must be in \[0, 1\].*got "
REFUSED = [
    (lambda: ghmc_loss(X, first(1.5, X)), DENSE_RULE + r"1\.5"),
    (lambda: ghmc_loss(X, first(-0.25, X)), DENSE_RULE + r"-0\.25"),
    (lambda: ghmc_loss(X, first(INF, X)), DENSE_RULE + "inf"),
    (lambda: ghmc_loss(X, first(2, X)), DENSE_RULE + "2"),
    (lambda: ghmc_loss(X, first(-1, X)), DENSE_RULE + "-1"),
    (lambda: ghmc_loss(X.double(), first(1.5, X)), DENSE_RULE + r"1\.5"),
    (lambda: ghmc_loss(X.half(), first(1.5, X)), DENSE_RULE + r"1\.5"),
    (lambda: ghmc_loss(X, first(3, KEPT)), INDEX_RULE + "3"),
    (lambda: ghmc_loss(X, first(-2, KEPT)), INDEX_RULE + "-2"),
    (lambda: ghmc_loss(X, first(10**12, KEPT)), INDEX_RULE + "1000000000000"),
    (lambda: ghmc_loss(X, first(3, KEPT), valid=first(1, X).bool()), INDEX_RULE + "3"),
    (lambda: softmax_ghmc_loss(X, first(3, KEPT)), r"class indices must be in \[0, 3\).*-100.*got 3"),
    (lambda: softmax_ghmc_loss(X, first(-1, KEPT)), r"class indices must be in \[0, 3\).*-100.*got -1"),
    (lambda: softmax_ghmc_loss(X, first(-100, KEPT), ignore_index=255), r"\[0, 3\).*255.*got -100"),
    (lambda: Harmonizer()(first(1.25, G)), NORM_RULE + r"1\.25"),
    (lambda: Harmonizer()(first(-0.5, G)), NORM_RULE + r"-0\.5"),
    (lambda: harmonize(G, first(INF, G)), NORM_RULE + "inf"),
    (lambda: gradient_density(first(1.25, G), epsilon=0.1), NORM_RULE + r"1\.25"),
    (lambda: gradient_density(first(1.25, G), epsilon=0.1, method="histogram"), NORM_RULE + r"1\.25"),
    (lambda: region_counts(first(-0.5, G), bins=3), NORM_RULE + r"-0\.5"),
]


@everywhere
@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[row[1].replace("\\", "") for row in REFUSED])
def test_a_value_out_of_range_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@everywhere
@pytest.mark.parametrize("targets", [first(1.5, X), first(3, KEPT)], ids=["dense targets", "class indices"])
def test_a_refused_call_leaves_the_state_alone(targets):
    criterion = GHMC()
    with pytest.raises(ValueError, match=r"\[0, "):
        criterion(X, targets)
    assert next(criterion.buffers()).sum() == 0


@everywhere
@pytest.mark.parametrize("wrong", [7, -7, 10**12, 1.5, -1.5, INF])
def test_a_value_out_of_range_does_no_harm_where_it_is_not_valid(wrong):
    kept = KEPT.unsqueeze(1)
    assert ghmc_loss(X, first(wrong, X), valid=kept) == ghmc_loss(X, X, valid=kept)
    if isinstance(wrong, int):
        right = first(0, KEPT)
        assert ghmc_loss(X, first(wrong, KEPT), valid=KEPT) == ghmc_loss(X, right, valid=KEPT)
        assert ghmc_loss(X, first(wrong, KEPT), valid=kept) == ghmc_loss(X, right, valid=KEPT)
        assert softmax_ghmc_loss(X, first(wrong, KEPT), valid=KEPT) == softmax_ghmc_loss(X, right, valid=KEPT)
    else:
        assert torch.equal(Harmonizer()(first(wrong, G), KEPT[:3]), Harmonizer()(first(0.0, G), KEPT[:3]))
        assert region_counts(first(wrong, G), bins=2, valid=KEPT[:3]).tolist() == [2, 0]


NOT_A_NUMBER = {
    "a logit": lambda: ghmc_loss(first(NAN, X), X),
    "a logit with class indices": lambda: ghmc_loss(first(NAN, X), first(1, KEPT)),
    "a dense target": lambda: ghmc_loss(X, first(NAN, X)),
    "a logit's weight": lambda: ghmc_loss(X, X, weight=first(NAN, X)),
    "a box": lambda: ghmr_loss(first(NAN, X), X),
    "a box's target": lambda: ghmr_loss(X, first(NAN, X)),
    "a box's weight": lambda: ghmr_loss(X + 1, X, weight=first(NAN, X)),
    "a logit of a softmax": lambda: softmax_ghmc_loss(first(NAN, X), first(1, KEPT)),
    "a weight of a softmax": lambda: softmax_ghmc_loss(X, first(1, KEPT), weight=first(NAN, KEPT.float())),
    "a loss of one's own": lambda: harmonize(first(NAN, G), G),
    "a norm of one's own": lambda: harmonize(G, first(NAN, G)),
    "a norm": lambda: Harmonizer()(first(NAN, G)).sum(),
    "a norm's density": lambda: gradient_density(first(NAN, G), epsilon=0.1)[0],
    "a norm's density by the histogram": lambda: gradient_density(first(NAN, G), epsilon=0.1, method="histogram")[0],
}


@everywhere
@pytest.mark.parametrize("place", NOT_A_NUMBER)
def test_nan_passes_the_checks_and_makes_the_loss_non_finite(place):
    assert not NOT_A_NUMBER[place]().isfinite()


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("infinite", [INF, -INF])
def test_an_infinite_logit_makes_the_loss_non_finite_also_on_the_right_side(infinite, dtype):
    x = first(infinite, X).to(dtype)
    for target in (0.0, 0.5, 1.0):
        assert not ghmc_loss(x, first(target, X)).isfinite()
    for label in (-1, 0, 1):
        assert not ghmc_loss(x, first(label, KEPT)).isfinite(), f"class {label}"
    assert not ghmr_loss(x, X).isfinite()


@pytest.mark.parametrize("infinite", [INF, -INF])
@pytest.mark.parametrize("label", [0, 1], ids=["of the true class", "of another class"])
def test_an_infinite_logit_makes_the_softmax_loss_non_finite(label, infinite):
    assert not softmax_ghmc_loss(first(infinite, X), first(label, KEPT)).isfinite()


# Where values are not looked at: under a compiler, and on tensors that have none.


@pytest.fixture
def compiled():
    torch.compiler.reset()
    yield lambda criterion: torch.compile(criterion, backend="eager", fullgraph=True)
    torch.compiler.reset()


@pytest.mark.parametrize("loss", [GHMC, SoftmaxGHMC])
def test_under_a_compiler_an_index_out_of_range_makes_the_loss_non_finite(compiled, loss):
    criterion, x = compiled(loss()), torch.randn(4, 3, requires_grad=True)
    right = torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(criterion(x, right), loss()(x, right))
    for wrong in (3, -2, 10**12, -(10**12)):
        assert not criterion(x, first(wrong, KEPT)).isfinite(), wrong
        ignored = criterion(x, first(wrong, KEPT), KEPT)
        ignored.backward()
        assert ignored.isfinite(), wrong


@pytest.mark.parametrize("criterion", [GHMC(), GHMR(), SoftmaxGHMC()], ids=lambda loss: type(loss).__name__)
def test_under_a_compiler_shapes_are_checked_all_the_same(compiled, criterion: nn.Module):
    with pytest.raises(Exception, match=r"targets must .*\(4, 3\).*got \(3, 4\)"):
        compiled(criterion)(X, X.T)


def test_fake_tensors_have_no_values_to_refuse():
    with FakeTensorMode():
        x = torch.zeros(4, 3)
        for criterion, targets in (
            (GHMC(), torch.full((4,), 99)),
            (GHMC(), torch.full((4, 3), 1.5)),
            (SoftmaxGHMC(), torch.full((4,), 99)),
        ):
            assert criterion(x, targets).shape == ()
        assert Harmonizer()(torch.full((5,), 1.5)).shape == (5,)
