"""The losses with a memory: the paper's moving average of the counts, and their sum over ranks.

`Harmonizer` is the mechanism. GHM-C, GHM-R and the softmax form are a loss and a gradient norm on top of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ghmdet.losses import checks
from ghmdet.losses.binary import binary_harmonized
from ghmdet.losses.density import harmonizing_weights
from ghmdet.losses.ranks import Sync, check_sync, number_of_ranks, sum_over_ranks
from ghmdet.losses.residual import residual_harmonized
from ghmdet.losses.softmax import softmax_harmonized
from ghmdet.losses.weighting import cells_of, check_settings, harmonized_sum, norm_weights

__all__ = ["GHMC", "GHMR", "Harmonizer", "SoftmaxGHMC"]


class Harmonizer(nn.Module):
    """Weights that harmonize any loss per example: 1 / GD(g) for each gradient norm g in [0, 1].

    The counts of examples are smoothed over calls, S ← αS + (1 − α)R for every unit region (equation 12), starting
    from the first call's counts. They change only in training mode with gradients enabled; in evaluation the stored
    ones are used, and the call's own where none is stored. Under `sync` a training call sums its counts over ranks
    and the weights are W / GD, so that DDP's mean of W gradients is the gradient of one process on the joined batch.

    Args:
        bins: M, the number of unit regions; 1 / bins is the window's length for density="exact".
        momentum: α in [0, 1); 0 for no average.
        density: "regions", or "exact" for the paper's definition by windows around each g, from a fine histogram.
        normalizer: "regions" multiplies the counts by M as the paper does, "occupied" by the number of regions that
            hold an example of this call, as the authors' released code does.
        sync: sum counts over the default process group, where there is one; False for none; or a process group.
        max_weight: the largest β = N / GD(g) allowed; None is the paper's mechanism, which has no bound. Small data and
            short trainings need one: 10 to 30 is where to start. A bound makes the loss smaller, so weigh it up.

    `smoothed_counts` is S, float64: one count a unit region, or one a cell of the fine histogram.

    Shapes: `harmonizer(gradient_norm, valid)` returns weights in the shape of the norms, 0 where not valid, detached.

    >>> harmonizer = Harmonizer(bins=2, momentum=0.0)
    >>> harmonizer(torch.tensor([0.1, 0.2, 0.3, 0.9]))  # three examples share a region, one has the other
    tensor([0.1667, 0.1667, 0.1667, 0.5000])
    """

    smoothed_counts: Tensor

    def __init__(
        self,
        bins: int = 30,
        momentum: float = 0.75,
        *,
        density: str = "regions",
        normalizer: str = "regions",
        sync: Sync = True,
        max_weight: float | None = None,
    ) -> None:
        super().__init__()
        check_settings(bins, density, normalizer, max_weight)
        checks.check_momentum(momentum)
        check_sync(sync)
        self.bins = int(bins)
        self.momentum = float(momentum)
        self.density = density
        self.normalizer = normalizer
        self.sync = sync
        self.max_weight = None if max_weight is None else float(max_weight)
        self.cells = cells_of(bins, density)
        self.register_buffer("smoothed_counts", torch.zeros(self.cells, dtype=torch.float64))

    def forward(self, gradient_norm: Tensor, valid: Tensor | None = None) -> Tensor:
        return norm_weights(gradient_norm, valid, self.cells, self.table)

    def harmonize(
        self, loss: Tensor, gradient_norm: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Σᵢ wᵢ Lᵢ / GD(gᵢ) over the valid examples. What stands in other places is kept out, NaN included."""
        return harmonized_sum(loss, gradient_norm, valid, weight, self.cells, self.table)

    def table(self, counts: Tensor) -> Tensor:
        """The weights for this call's counts, int64 (cells,); in training, one step of the moving average."""
        ranks = number_of_ranks(self.sync)
        advance = self.training and torch.is_grad_enabled()
        if advance:
            self._advance(sum_over_ranks(counts, self.sync))
        else:
            counts = counts * ranks  # nothing is communicated: the other ranks are taken to be like this one
        return harmonizing_weights(
            counts,
            self.smoothed_counts,
            # a training call's counts are in S already; in evaluation S may have faded to less than an example leaves
            least_stored=0.0 if advance else (1 - self.momentum) / 2,
            bins=self.bins,
            density=self.density,
            normalizer=self.normalizer,
            max_weight=self.max_weight,
            ranks=ranks,
        )

    @torch.no_grad()
    def _advance(self, counts: Tensor) -> None:
        held, found = self.smoothed_counts, counts.to(self.smoothed_counts.dtype)
        rate = 1 - self.momentum * held.any().to(held.dtype)  # S = αS + (1 − α)R; the first examples seen make S = R
        held.lerp_(found, rate * found.any())  # no example on any rank: S stays

    def reset(self) -> None:
        """Forgets the moving average; the next training call starts it anew."""
        self.smoothed_counts.zero_()

    def extra_repr(self) -> str:
        shown = f"bins={self.bins}, momentum={self.momentum}, density={self.density!r}, normalizer={self.normalizer!r}"
        return shown + (f", max_weight={self.max_weight}" if self.max_weight is not None else "")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Harmonizer:
        """Moves with `.to(device)`, but keeps float64 under `.half()` and `.float()`: counts pass float16's 65,504 and
        float32's 2²⁴. Where a device has no float64, float32 holds them to 6e-8."""
        held = self.smoothed_counts
        device = fn(held.new_empty(0, dtype=torch.float32)).device
        if held.is_meta:
            held = torch.zeros_like(held, device=device)
        self.smoothed_counts = held.to(device, torch.float32 if device.type == "mps" else torch.float64)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + "smoothed_counts"
        loaded = state_dict.get(key)
        if isinstance(loaded, Tensor) and loaded.shape != self.smoothed_counts.shape:
            warnings.warn(
                f"{key} holds {loaded.numel()} cells, this loss counts in {self.cells} "
                f"(bins={self.bins}, density={self.density!r}); its moving average starts anew",
                stacklevel=2,
            )
            state_dict = {**state_dict, key: torch.zeros_like(self.smoothed_counts)}
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Harmonized(nn.Module):
    """A loss that holds its harmonizer: what the three losses share."""

    def __init__(self, harmonizer: Harmonizer) -> None:
        super().__init__()
        self.harmonizer = harmonizer

    def reset(self) -> None:
        """Forgets the moving average of the counts."""
        self.harmonizer.reset()


class GHMC(_Harmonized):
    """GHM-C, harmonized binary cross-entropy: Σᵢ CE(pᵢ, pᵢ*) / GD(gᵢ), g = |p − p*|, p = sigmoid(x) (equation 8).

    `criterion(inputs, targets, valid=None, weight=None)` returns a scalar, float32, or float64 for float64 inputs.

    - inputs: logits of any shape; every one is an example. float16 and bfloat16 are read as they are.
    - targets: the inputs' shape, 0/1 or soft values between; or the shape without `class_dim`, integer class indices
      with -1 for "no class here" (background).
    - valid: bool, which examples count. weight: float, scales single examples' loss after harmonizing. Both broadcast
      to the inputs; with index targets they may have the targets' shape and stand for whole positions.

    Args:
        class_dim: the classes' dimension of the inputs, for index targets.

    The other arguments are `Harmonizer`'s: `bins` regions of g, their `momentum`, and above all `max_weight`, without
    which a short training from scratch learns slowly.

    >>> criterion = GHMC(bins=30)
    >>> logits = torch.randn(8, 100, 80, requires_grad=True)  # images, anchors, classes
    >>> labels = torch.randint(-1, 80, (8, 100))  # -1: background
    >>> criterion(logits, labels).backward()
    """

    def __init__(
        self,
        bins: int = 30,
        momentum: float = 0.75,
        *,
        density: str = "regions",
        normalizer: str = "regions",
        class_dim: int = -1,
        sync: Sync = True,
        max_weight: float | None = None,
    ) -> None:
        checks.check_integer("class_dim", class_dim)
        super().__init__(
            Harmonizer(bins, momentum, density=density, normalizer=normalizer, sync=sync, max_weight=max_weight)
        )
        self.class_dim = class_dim

    def forward(
        self, inputs: Tensor, targets: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        h = self.harmonizer
        return binary_harmonized(inputs, targets, valid, weight, self.class_dim, h.cells, h.table)


class GHMR(_Harmonized):
    """GHM-R, harmonized box regression: Σᵢ ASL1(dᵢ) / GD(gᵢ), d = inputs − targets, g = |d| / √(d² + μ²) (eq. 19).

    `criterion(inputs, targets, valid=None, weight=None)` returns a scalar. Inputs and targets are box deltas (N, 4) or
    any equal shapes; each coordinate is an example. `valid` and `weight` broadcast to them.

    Args:
        mu: μ, where ASL1 turns from quadratic to linear; the paper's 0.02 is for RetinaNet's unscaled deltas.

    The other arguments are `Harmonizer`'s.
    """

    def __init__(
        self,
        mu: float = 0.02,
        bins: int = 10,
        momentum: float = 0.75,
        *,
        density: str = "regions",
        normalizer: str = "regions",
        sync: Sync = True,
        max_weight: float | None = None,
    ) -> None:
        checks.check_mu(mu)
        super().__init__(
            Harmonizer(bins, momentum, density=density, normalizer=normalizer, sync=sync, max_weight=max_weight)
        )
        self.mu = float(mu)

    def forward(
        self, inputs: Tensor, targets: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        h = self.harmonizer
        return residual_harmonized(inputs, targets, valid, weight, self.mu, h.cells, h.table)

    def extra_repr(self) -> str:
        return f"mu={self.mu}"


class SoftmaxGHMC(_Harmonized):
    """Harmonized cross-entropy for mutually exclusive classes: Σᵢ −log p_y / GD(1 − p_y), p = softmax over dim 1.

    One position is one example. Its gradient norm is g = 1 − p_y, half the L1 norm of the gradient p − y with regard
    to the logits: 0 where the true class is certain, 1 where it is excluded.

    `criterion(inputs, targets, valid=None, weight=None)` returns a scalar; shapes are those of
    `torch.nn.cross_entropy`: inputs (N, C, …), targets (N, …) integer classes, `ignore_index` where none;
    `valid` and `weight` have the targets' shape or broadcast to it.

    The other arguments are `Harmonizer`'s.
    """

    def __init__(
        self,
        bins: int = 30,
        momentum: float = 0.75,
        *,
        ignore_index: int = -100,
        density: str = "regions",
        normalizer: str = "regions",
        sync: Sync = True,
        max_weight: float | None = None,
    ) -> None:
        checks.check_integer("ignore_index", ignore_index)
        super().__init__(
            Harmonizer(bins, momentum, density=density, normalizer=normalizer, sync=sync, max_weight=max_weight)
        )
        self.ignore_index = ignore_index

    def forward(
        self, inputs: Tensor, targets: Tensor, valid: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        h = self.harmonizer
        return softmax_harmonized(inputs, targets, valid, weight, self.ignore_index, h.cells, h.table)
