"""Under a compiler's trace and on fake tensors the losses are the same formulas, with nothing read from a device."""

import copy
import shutil

import pytest
import torch
from cases import LOSSES, each_loss
from torch._subclasses.fake_tensor import FakeTensorMode

import ghmdet
from ghmdet.functional import gradient_density, region_counts
from ghmdet.losses.kernels import implementation


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@each_loss
@pytest.mark.parametrize("density", ["regions", "exact"])
def test_fake_tensors_pass_through_every_loss(loss, density):
    with FakeTensorMode():
        criterion = loss.build(bins=10, density=density)
        inputs, targets = loss.sample(20)
        inputs.requires_grad_()
        valid, weight = torch.ones(targets.shape, dtype=torch.bool), torch.ones(targets.shape)
        value = criterion(inputs, targets, valid, weight)
        value.backward()
        criterion.eval()(inputs, targets)
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert (inputs.grad.shape, inputs.grad.dtype) == (inputs.shape, torch.float32)


def test_fake_tensors_have_no_values_to_check():
    with FakeTensorMode():
        wild = torch.full((20,), 7.0)
        ghmdet.GHMC()(wild, wild)
        ghmdet.GHMC()(torch.zeros(20, 3), torch.full((20,), 99))
        ghmdet.SoftmaxGHMC()(torch.zeros(20, 3), torch.full((20,), 99))
        ghmdet.Harmonizer()(wild)
        assert region_counts(wild, bins=10).shape == (10,)
        for method in ("exact", "histogram"):
            assert gradient_density(wild, epsilon=0.1, method=method).shape == (20,)


def test_fake_tensors_shapes_are_checked_all_the_same():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"\(20, 3\)"):
        ghmdet.GHMC()(torch.zeros(20, 3), torch.zeros(20, 4))


def assert_compiled_is_eager(loss, backend, density="regions"):
    eager = loss.build(bins=10, momentum=0.5, density=density)
    shadow = copy.deepcopy(eager)
    compiled = torch.compile(shadow, fullgraph=True, backend=backend)
    for _ in range(3):  # the moving average advances in both
        inputs, targets = loss.sample(20)
        valid, weight = torch.rand(targets.shape) < 0.8, torch.rand(targets.shape)
        found = []
        for criterion in (eager, compiled):
            x = inputs.clone().requires_grad_()
            with implementation("plain"):
                value = criterion(x, targets, valid, weight)
            value.backward()
            found.append((value.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(shadow.state_dict(), eager.state_dict(), rtol=1e-12, atol=0)


@each_loss
def test_a_compiled_loss_is_the_eager_one_with_its_gradient_and_its_memory(loss):
    assert_compiled_is_eager(loss, "aot_eager")


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch's inductor needs a C++ compiler"
)
def test_machine_code_from_inductor_is_the_eager_one():
    assert_compiled_is_eager(LOSSES["GHMC with class indices"], "inductor")


@each_loss
def test_a_compiled_fine_histogram_is_the_eager_one(loss):
    assert_compiled_is_eager(loss, "aot_eager", density="exact")


@each_loss
def test_compiled_evaluation_leaves_the_memory_alone(loss):
    criterion = loss.build(bins=10)
    criterion(*loss.sample(20))
    criterion.eval()
    before = copy.deepcopy(criterion.state_dict())
    inputs, targets = loss.sample(20)
    value = torch.compile(criterion, fullgraph=True, backend="aot_eager")(inputs, targets)
    assert value.item() == pytest.approx(criterion(inputs, targets).item(), rel=1e-6)
    torch.testing.assert_close(criterion.state_dict(), before, rtol=0, atol=0)
