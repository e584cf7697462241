"""What went wrong with numbers, types and shapes in the widely used implementation, row by row; none of it here."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghmdet import GHMC, GHMR, Harmonizer, SoftmaxGHMC, functional

NAN, INF = math.nan, math.inf

everywhere = pytest.mark.usefixtures("any_implementation")


def stored(criterion: nn.Module) -> Tensor:
    (counts,) = criterion.buffers()
    return counts.clone()


def rare_and_hard(easy: int) -> tuple[Tensor, Tensor]:
    """Negatives near p = 0.01 and one positive at p = 0.05, in half precision."""
    logits, targets = torch.full((easy + 1,), -4.6), torch.zeros(easy + 1)
    logits[-1], targets[-1] = -3, 1
    return logits.half(), targets


@everywhere
def test_pitfall_11_half_precision_logits_get_single_precision_weights():
    logits, targets = rare_and_hard(easy=100_000)
    half, single = logits.requires_grad_(), logits.detach().float().requires_grad_()
    old_weight = torch.tensor(100_001 / 1).to(half.dtype)
    assert old_weight.isinf()

    losses = [functional.ghmc_loss(x, targets) for x in (half, single)]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses)
    for loss in losses:
        (loss * 2**14).backward()
    assert half.grad.dtype == torch.float16
    torch.testing.assert_close(half.grad.float(), single.grad, rtol=2e-3, atol=1e-7)


@everywhere
@pytest.mark.parametrize("factor", [0.5, 10.0, 1000.0])
def test_pitfall_11_half_precision_gradients_scale_with_the_weight(factor):
    logits, targets = rare_and_hard(easy=10)
    plain, weighted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    functional.ghmc_loss(plain, targets).backward()
    functional.ghmc_loss(weighted, targets, weight=torch.tensor(factor)).backward()
    torch.testing.assert_close(weighted.grad, plain.grad * factor, rtol=2e-3, atol=1e-5)


@everywhere
def test_pitfall_11_half_precision_gradients_outlast_a_region_long_empty():
    easy, late = torch.full((1000,), -3.0).half(), torch.full((1000,), -3.0).half()
    late[0] = 5
    criterion = GHMC()
    criterion(late, torch.zeros(1000))
    for _call in range(100):
        x = easy.clone().requires_grad_()
        (criterion(x, torch.zeros(1000)) * 1024).backward()
    expected = 1024 * torch.tensor(-3.0).sigmoid() / (1000 * 30)
    torch.testing.assert_close(x.grad.float(), expected.expand(1000), rtol=2e-2, atol=0)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pitfall_11_autocast_does_not_reach_the_loss(dtype):
    head, features = nn.Linear(4, 3), torch.randn(50, 4)
    labels = torch.arange(50) % 4 - 1
    with torch.autocast("cpu", dtype):
        logits = head(features)
        loss = GHMC()(logits, labels)
    assert logits.dtype == dtype
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, GHMC()(logits.float(), labels), rtol=1e-6, atol=0)


def test_pitfall_11_asl1_of_half_precision_residuals_neither_overflows_nor_vanishes():
    d = torch.tensor([300.0, 0.5, 1e-3]).half()
    expected = (d.double().square() + 0.02**2).sqrt() - 0.02
    torch.testing.assert_close(functional.asl1_loss(d).double(), expected, rtol=5e-3, atol=0)


@everywhere
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double])
def test_pitfall_12_a_converted_module_counts_on(cast):
    n = 70_001
    assert torch.tensor(n).half().isinf()
    assert torch.tensor(n).bfloat16().item() != n
    criterion = cast(GHMC(bins=30))
    assert criterion(torch.zeros(n), torch.zeros(n)).item() == pytest.approx(math.log(2) / 30, rel=1e-5)
    assert stored(cast(criterion)).sum() == n
    assert stored(criterion).dtype in (torch.float32, torch.float64)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pitfall_12_a_fully_wrong_example_costs(dtype):
    last_edge_in_half = torch.tensor(1.0).half() + 1e-6
    assert not torch.tensor(1.0) < last_edge_in_half
    criterion = GHMC(bins=30).half()
    assert criterion(torch.tensor([-100.0], dtype=dtype), torch.ones(1)).item() == pytest.approx(100 / 30, rel=1e-5)
    assert functional.region_counts(torch.ones(1, dtype=dtype), bins=30)[-1] == 1


BOX = torch.tensor([[0.1, -0.2], [0.0, 0.5], [0.3, 0.0], [0.4, 0.1]])
DENSE = torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 0.0], [0.0, 0.0]])
CALLS = {
    "dense targets": (GHMC, DENSE),
    "class indices": (GHMC, torch.tensor([0, 1, -1, 1])),
    "boxes": (GHMR, BOX),
    "softmax": (SoftmaxGHMC, torch.tensor([0, 1, 1, 0])),
}
KEPT = torch.tensor([True, False, True, False])


@everywhere
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("density", ["regions", "exact"])
@pytest.mark.parametrize("call", CALLS)
def test_pitfall_13_what_stands_in_ignored_places_does_no_harm(call, density, poison):
    loss, targets = CALLS[call]
    valid = KEPT if targets.dim() == 1 else KEPT.unsqueeze(1)
    logits, weight = torch.randn(4, 2), torch.rand(4, 1) if targets.dim() == 2 else torch.rand(4)

    def run(logits, targets, weight):
        x = logits.clone().requires_grad_()
        total = loss(density=density)(x, targets, valid, weight)
        total.backward()
        return total.item(), x.grad

    expected, gradient = run(logits, targets, weight)
    logits[~KEPT], weight[~KEPT] = poison, poison
    if targets.is_floating_point():
        targets = targets.clone()
        targets[~KEPT] = poison
    total, after = run(logits, targets, weight)
    assert total == expected
    assert torch.equal(after, gradient)
    assert (after[~KEPT] == 0).all()
    assert (logits * valid.reshape(4, 1)).sum().isnan(), "masked after: 0 · inf"


def test_pitfall_13_a_loss_of_ones_own_is_masked_before_and_not_after():
    loss, g = torch.tensor([1.0, NAN, 3.0, INF]).requires_grad_(), torch.tensor([0.1, NAN, 0.9, INF])
    harmonizer = Harmonizer(bins=2)
    total = harmonizer.harmonize(loss, g, KEPT)
    total.backward()
    assert total == 1 / 2 + 3 / 2
    assert loss.grad.tolist() == [0.5, 0, 0.5, 0]
    assert harmonizer(g, KEPT).tolist() == [0.5, 0, 0.5, 0]
    assert (harmonizer(g, KEPT) * loss).sum().isnan(), "why harmonize() is there"


def test_pitfall_14_small_residuals_do_not_cancel():
    d = torch.tensor([1e-6, -1e-6, 1e-9, 0.02, 5.0])
    exact = (d.double().square() + 0.02**2).sqrt() - 0.02
    cancelled = (d.square() + 0.02**2).sqrt() - 0.02
    assert cancelled[0] == 0
    torch.testing.assert_close(functional.asl1_loss(d)[3:].double(), exact[3:], rtol=1e-6, atol=0)
    torch.testing.assert_close(functional.asl1_loss(d)[:3], d[:3].square() / 0.04, rtol=1e-6, atol=0)


@everywhere
def test_pitfall_14_small_residuals_cost_and_pull():
    d = torch.tensor([1e-6], requires_grad=True)
    loss = GHMR(bins=1, mu=0.02)(d, torch.zeros(1))
    loss.backward()
    assert loss.item() == pytest.approx(1e-12 / 0.04, rel=1e-5)
    assert d.grad.item() == pytest.approx(1e-6 / 0.02, rel=1e-5)


@everywhere
def test_pitfall_15_images_of_logits_take_index_labels():
    logits, labels = torch.randn(2, 5, 4, 3), torch.randint(-1, 5, (2, 4, 3))
    last = GHMC()(logits.permute(0, 2, 3, 1), labels)
    torch.testing.assert_close(GHMC(class_dim=1)(logits, labels), last)
    torch.testing.assert_close(GHMC(class_dim=-3)(logits, labels), last)
    torch.testing.assert_close(GHMC(class_dim=1)(logits.contiguous(memory_format=torch.channels_last), labels), last)


@everywhere
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 3, 4, 5), (1, 2, 1, 2, 3)])
def test_pitfall_15_logits_have_any_shape(shape):
    logits, targets = torch.randn(shape), torch.rand(shape).round()
    flat = functional.ghmc_loss(logits.reshape(-1), targets.reshape(-1), bins=4)
    torch.testing.assert_close(functional.ghmc_loss(logits, targets, bins=4), flat)
    flat = functional.ghmr_loss(logits.reshape(-1), targets.reshape(-1), bins=4)
    torch.testing.assert_close(functional.ghmr_loss(logits, targets, bins=4), flat)


@pytest.mark.parametrize("shape", [(4,), (6, 4), (2, 4, 3), (2, 4, 3, 5)])
def test_pitfall_15_there_is_a_softmax_form_with_cross_entropys_shapes(shape):
    logits = torch.randn(shape)
    labels = torch.randint(4, shape[:1] + shape[2:] if len(shape) > 1 else ())
    torch.testing.assert_close(SoftmaxGHMC(bins=1)(logits, labels), F.cross_entropy(logits, labels))


def test_pitfall_16_other_bins_start_the_average_anew_and_say_so():
    trained, other = nn.ModuleDict({"loss": GHMC(bins=30)}), nn.ModuleDict({"loss": GHMC(bins=10)})
    for criterion in (trained["loss"], other["loss"]):
        criterion(torch.zeros(5), torch.zeros(5))
    with pytest.warns(UserWarning, match=r"30.*10"):
        other.load_state_dict(trained.state_dict())
    assert other["loss"](torch.ones(3), torch.zeros(3)) == GHMC(bins=10)(torch.ones(3), torch.zeros(3))

    plain = nn.Module()
    plain.register_buffer("smoothed", torch.zeros(10))
    with pytest.raises(RuntimeError, match="size mismatch"):
        plain.load_state_dict({"smoothed": torch.zeros(30)})


def test_pitfall_16_another_momentum_goes_on_from_the_same_average():
    trained, resumed = GHMC(momentum=0.75), GHMC(momentum=0.9)
    trained(torch.zeros(5), torch.zeros(5))
    resumed.load_state_dict(trained.state_dict())
    assert torch.equal(stored(resumed), stored(trained))


def test_pitfall_17_counts_pass_the_end_of_single_precision():
    n = 2**24 + 1
    full = torch.tensor(2.0**24)
    assert full + 1 == full
    assert functional.region_counts(torch.zeros(1).expand(n), bins=3).tolist() == [n, 0, 0]
    criterion = GHMC(bins=3)
    criterion(torch.full((1,), -9.0, dtype=torch.bfloat16).expand(n), torch.zeros(1, dtype=torch.bool).expand(n))
    assert stored(criterion).tolist() == [n, 0, 0]


def logits_of(*probabilities: float) -> Tensor:
    return torch.logit(torch.tensor(probabilities))


@everywhere
def test_pitfall_18_five_examples_worked_by_hand():
    # negatives at p = 0.1, 0.2, 0.3 share the lower of two regions; a positive at 0.25 and a negative at 0.9 the upper
    by_hand = -math.log(0.9 * 0.8 * 0.7) / (3 * 2) - math.log(0.25 * 0.1) / (2 * 2)
    loss = GHMC(bins=2)(logits_of(0.1, 0.2, 0.3, 0.25, 0.9), torch.tensor([0, 0, 0, 1, 0]))
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)


@everywhere
def test_pitfall_18_three_residuals_worked_by_hand():
    # √(0.125² + 0.3²) = 0.325 and √(0.4² + 0.3²) = 0.5: norms 0.385 and 0.8, losses 0.025 and 0.2
    loss = GHMR(mu=0.3, bins=2)(torch.tensor([0.125, 0.4, 1.0]), torch.tensor([0.0, 0.0, 1.4]))
    assert loss.item() == pytest.approx(0.025 / (1 * 2) + 2 * 0.2 / (2 * 2), rel=1e-5)


def test_pitfall_18_three_softmaxes_worked_by_hand():
    # p = (3/4, 1/4): one example knows its class, two do not
    loss = SoftmaxGHMC(bins=2)(torch.tensor([[math.log(3), 0.0]] * 3), torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx(math.log(4 / 3) / (1 * 2) + 2 * math.log(4) / (2 * 2), rel=1e-6)


@everywhere
def test_pitfall_18_one_region_is_plain_cross_entropy_and_so_is_its_gradient():
    x, targets = torch.randn(6, 3, requires_grad=True), torch.rand(6, 3)
    losses = functional.ghmc_loss(x, targets, bins=1), F.binary_cross_entropy_with_logits(x, targets)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in losses))


def test_pitfall_18_the_gradient_is_the_losss():
    x, d = torch.randn(2, 8, dtype=torch.float64, requires_grad=True).unbind()
    ones = torch.ones_like(x)
    assert torch.autograd.gradcheck(lambda x: functional.ghmc_loss(x, ones, bins=1), (x,))
    assert torch.autograd.gradcheck(lambda d: functional.ghmr_loss(d, ones, bins=1), (d,))
