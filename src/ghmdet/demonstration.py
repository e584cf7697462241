"""The mechanism without data, network or training: what three losses make of one and the same batch.

`python -m ghmdet.demonstration [--out DIR]` simulates the classification examples of a converged detector, takes the
gradient of cross-entropy, focal loss and GHM-C by autograd, prints who contributes how much, and draws one figure.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

import ghmdet

REGIONS = 30  # M, the paper's number of unit regions
LOSSES = ("cross-entropy", "focal loss", "GHM-C")  # focal: γ = 2; its α weighs classes, not g, and is left out
COLOURS = ("#777777", "#E69F00", "#0072B2")  # Okabe and Ito's: apart for colour-blind eyes too
ARROW = {"arrowstyle": "-", "color": "#777777"}


def converged_detector() -> tuple[Tensor, Tensor]:
    """Logits and 0/1 targets as the paper's Figure 2 shows them: a flood of easy negatives, few positives, and more
    very hard examples than medium ones, which training does not remove."""
    groups = (  # count, target, mean and deviation of the logit
        (3_200_000, 0, -6.5, 1.5),  # plain background
        (32_000, 0, -2.5, 1.8),  # background that looks like an object
        (10_000, 1, 2.0, 1.8),  # objects
        (2_000, 0, 4.5, 1.0),  # objects that nobody labelled
        (2_000, 1, -4.5, 1.0),  # labels where nothing can be seen
    )
    generator = torch.Generator().manual_seed(0)
    logits = [mean + deviation * torch.randn(count, generator=generator) for count, _, mean, deviation in groups]
    return torch.cat(logits), torch.cat([torch.full((count,), float(target)) for count, target, _, _ in groups])


def gradient_norms(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """|∂L/∂x| of every example under each loss, float64, scaled to one total for all losses: that of cross-entropy."""

    def focal(x: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = sigmoid_focal_loss(x, t, alpha=-1, gamma=2, reduction="sum")
        return loss

    losses: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        torch.nn.BCEWithLogitsLoss(reduction="sum"),
        focal,
        ghmdet.GHMC(bins=REGIONS),
    )
    norms = []
    for loss in losses:
        x = logits.clone().requires_grad_()
        norms.append(torch.autograd.grad(loss(x, targets), x)[0].double().abs())
    return {name: norm * (norms[0].sum() / norm.sum()) for name, norm in zip(LOSSES, norms)}


def by_region(g: Tensor, norms: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The number of examples in each unit region, and what each loss's gradient norms add up to there."""
    counts = ghmdet.functional.region_counts(g, bins=REGIONS)
    region = (g * REGIONS).long().clamp(max=REGIONS - 1)
    sums = {name: torch.zeros(REGIONS).double().index_add(0, region, norm) for name, norm in norms.items()}
    return counts, sums


def table(counts: Tensor, sums: dict[str, Tensor], rows: int = 10) -> str:
    """Examples and shares of the total gradient, a few unit regions to a row; then what it shows."""
    lines = [
        "A simulated batch of a converged detector. Who contributes how much of the gradient, by gradient norm",
        f"g = |p - p*|, {REGIONS // rows} of {REGIONS} unit regions a row:",
        "",
        f"{'g':>10}{'examples':>13}" + "".join(f"{name:>16}" for name in LOSSES),
    ]
    shares = {name: (100 * total / total.sum()).view(rows, -1).sum(1).tolist() for name, total in sums.items()}
    for row, count in enumerate(counts.view(rows, -1).sum(1).tolist()):
        cells = "".join(f"{shares[name][row]:>14.1f} %" for name in LOSSES)
        lines.append(f"{row / rows:.1f} to {(row + 1) / rows:.1f}{count:>13,}{cells}")
    first, last = ({name: f"{share[row]:.0f} %" for name, share in shares.items()} for row in (0, -1))
    ce, focal, ghmc = LOSSES
    lines += [
        "",
        f"Cross-entropy spends {first[ce]} of the gradient on the easiest tenth, focal loss {last[focal]} on the",
        f"hardest, most of it outliers that training does not remove. GHM-C gives them {first[ghmc]} and {last[ghmc]}.",
    ]
    return "\n".join(lines)


def figure(counts: Tensor, sums: dict[str, Tensor]) -> Figure:
    """The paper's Figure 1: how g is distributed, what one example contributes, what all examples near g contribute."""
    drawn = Figure(figsize=(13, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    distribution, one, all_near = drawn.subplots(1, 3)
    edges = torch.linspace(0, 1, REGIONS + 1).tolist()
    centres = [(left + right) / 2 for left, right in itertools.pairwise(edges)]
    distribution.stairs((100 * counts / counts.sum()).tolist(), edges, fill=True, color="#BDBDBD", baseline=1e-9)
    for name, colour in zip(LOSSES, COLOURS):
        one.plot(centres, (sums[name] / counts).tolist(), color=colour, linewidth=2.4, label=name)
        all_near.stairs(
            (100 * sums[name] / sums[name].sum()).tolist(), edges, color=colour, linewidth=2.4, baseline=None
        )
    panels = (
        (distribution, "Almost every example is easy", "examples in each unit region, %", (1e-3, 100)),
        (one, "What one example contributes", "gradient norm, one total for all losses", (1e-3, 20)),
        (all_near, "What all of them contribute", "share of the total gradient, %", (0, None)),
    )
    for axes, title, label, limits in panels:
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
        axes.set_xlabel("gradient norm g = |p − p*|, easy to hard", fontsize=11)
        axes.set_ylabel(label, fontsize=11)
        axes.set_xlim(0, 1)
        if limits[0]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(*limits)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    distribution.annotate("easy negatives", (0.02, 40), (0.12, 40), va="center", arrowprops=ARROW)
    distribution.annotate("outliers", (0.98, 0.06), (0.88, 0.06), va="center", ha="right", arrowprops=ARROW)
    drawn.legend(loc="outside upper center", ncols=len(LOSSES), frameon=False, fontsize=12)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ghmdet.demonstration", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demonstration"), metavar="DIR", help="(%(default)s)")
    out: Path = parser.parse_args(arguments).out

    logits, targets = converged_detector()
    g = (logits.sigmoid() - targets).abs()
    counts, sums = by_region(g, gradient_norms(logits, targets))
    print(table(counts, sums))
    out.mkdir(parents=True, exist_ok=True)
    drawn = figure(counts, sums)
    print()
    for suffix in ("png", "svg"):
        drawn.savefig(out / f"harmonizing.{suffix}", dpi=150)
        print(f"figure: {out / f'harmonizing.{suffix}'}")


if __name__ == "__main__":
    main()
