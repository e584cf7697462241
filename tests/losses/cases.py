"""Each loss as the tests see it: how it is built and called, and what the oracle makes of the same examples."""

from collections.abc import Callable
from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ghmdet

MU = 0.02


@dataclass(frozen=True)
class Loss:
    build: Callable[..., nn.Module]  # settings → criterion(inputs, targets, valid, weight)
    sample: Callable[[int], tuple[Tensor, Tensor]]  # n → inputs and targets of n rows
    examples: Callable[[list, list], list]  # rows of inputs and targets → the oracle's examples, one after another
    unharmonized: Callable[[Tensor, Tensor], Tensor]  # the mean of the loss as torch has it
    at: Callable[[Tensor], tuple[Tensor, Tensor]]  # gradient norms (n,) → n rows of inputs and targets that have them


class OwnLoss(nn.Module):
    """A loss that a user brings: half the squared error, whose gradient's size is the error itself."""

    def __init__(self, **settings):
        super().__init__()
        self.harmonizer = ghmdet.Harmonizer(**settings)

    def forward(self, inputs, targets, valid=None, weight=None):
        error = inputs - targets
        return self.harmonizer.harmonize(error.square() / 2, error.abs(), valid, weight)


def with_index_as_dense(rows, classes):
    return [[float(k == c) for k in range(len(row))] for row, c in zip(rows, classes)]


def binary_examples(rows, targets):
    return [oracle.binary(x, t) for row, row_targets in zip(rows, targets) for x, t in zip(row, row_targets)]


def mean_from_indices(logits, classes):
    dense = F.one_hot(classes + 1, logits.shape[1] + 1)[:, 1:].to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, dense)


LOSSES = {
    "GHMC with hard targets": Loss(
        build=ghmdet.GHMC,
        sample=lambda n: (torch.randn(n, 3) * 2 - 1, torch.randint(0, 2, (n, 3)).float()),
        examples=binary_examples,
        unharmonized=F.binary_cross_entropy_with_logits,
        at=lambda g: (g.logit()[:, None], torch.zeros(len(g), 1)),
    ),
    "GHMC with soft targets": Loss(
        build=ghmdet.GHMC,
        sample=lambda n: (torch.randn(n, 3) * 2, torch.rand(n, 3)),
        examples=binary_examples,
        unharmonized=F.binary_cross_entropy_with_logits,
        at=lambda g: ((0.25 * (1 - g) + g).logit()[:, None], 0.25 * (1 - g)[:, None]),  # p − p* = g
    ),
    "GHMC with class indices": Loss(
        build=ghmdet.GHMC,
        sample=lambda n: (torch.randn(n, 3) * 2 - 1, torch.randint(-1, 3, (n,))),
        examples=lambda rows, classes: binary_examples(rows, with_index_as_dense(rows, classes)),
        unharmonized=mean_from_indices,
        at=lambda g: (-g.logit()[:, None], torch.zeros(len(g), dtype=torch.long)),  # one class, and it is there
    ),
    "GHMR": Loss(
        build=lambda **settings: ghmdet.GHMR(mu=MU, **settings),
        sample=lambda n: (torch.randn(n, 4) * 0.05, torch.randn(n, 4) * 0.01),
        examples=lambda rows, targets: [
            oracle.box(x - t, MU) for row, row_targets in zip(rows, targets) for x, t in zip(row, row_targets)
        ],
        unharmonized=lambda inputs, targets: (((inputs - targets) ** 2 + MU**2).sqrt() - MU).mean(),
        at=lambda g: ((MU * g / (1 - g * g).sqrt())[:, None], torch.zeros(len(g), 1)),
    ),
    "SoftmaxGHMC": Loss(
        build=ghmdet.SoftmaxGHMC,
        sample=lambda n: (torch.randn(n, 5) * 2, torch.randint(0, 5, (n,))),
        examples=lambda rows, classes: [oracle.softmax(row, c) for row, c in zip(rows, classes)],
        unharmonized=F.cross_entropy,
        at=lambda g: (torch.stack([-g.logit(), torch.zeros_like(g)], 1), torch.zeros(len(g), dtype=torch.long)),
    ),
    "a loss of one's own": Loss(
        build=OwnLoss,
        sample=lambda n: (torch.rand(n, 3), torch.rand(n, 3)),
        examples=lambda rows, targets: [
            ((x - t) ** 2 / 2, abs(x - t), x - t) for row, row_t in zip(rows, targets) for x, t in zip(row, row_t)
        ],
        unharmonized=lambda inputs, targets: ((inputs - targets) ** 2 / 2).mean(),
        at=lambda g: (g[:, None], torch.zeros(len(g), 1)),
    ),
}

each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def off_the_edges(loss, bins, rows, dtype=torch.float32, *, gap=1e-5, window_gap=None):
    """Random rows, none with an example within `gap` of a region's edge, so that rounding moves none across it; with
    `window_gap` none within that of the ends of another's window of length 1 / bins."""
    inputs, targets = loss.sample(rows)
    inputs = inputs.to(dtype)
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    kept, norms = [], []
    for row in range(rows):
        here = [g for _, g, _ in loss.examples(inputs[row : row + 1].tolist(), targets[row : row + 1].tolist())]
        clear = all(abs(g * bins - round(g * bins)) > gap * bins for g in here)
        if window_gap is not None:
            everyone = norms + here
            clear = clear and all(abs(abs(g - o) - 0.5 / bins) > window_gap for g in here for o in everyone)
        if clear:
            kept.append(row)
            norms += here
    return inputs[kept], targets[kept]


def value_and_gradient(criterion, inputs, *others):
    inputs = inputs.clone().requires_grad_()
    value = criterion(inputs, *others)
    value.backward()
    return value.detach(), inputs.grad


def assert_is_the_oracles(loss, gradient, expected, relative, of_each=False):
    """Loss and gradient, the gradient's error measured against its largest entry, or against each entry."""
    total, entries = expected
    entries = torch.tensor(entries, dtype=torch.float64).reshape(gradient.shape)
    torch.testing.assert_close(loss.double().item(), total, rtol=relative, atol=0)
    atol = 0 if of_each else relative * entries.abs().max().item()
    torch.testing.assert_close(gradient.double(), entries, rtol=relative if of_each else 0, atol=atol)
