"""How long the losses take, as ratios measured in one run.

    python benchmarks/losses.py [--positions 120000] [--classes 80] [--rounds 9] [--json FILE] [--device cuda]

Every candidate runs forward and backward once a round, in turn, and the median over rounds counts, so that what else
the machine does falls on all alike. The whole is done twice, each time in a process of its own: with the allocator
as it comes, where every big new tensor costs page faults, and with glibc's thresholds raised, where freed memory is
handed out again. "Limit" is the time to move the bytes that must move (logits read twice, gradient written once) at
the bandwidth that a large copy reached in the same rounds.

On a GPU there is one process, the times are the device's own, and the peak of memory is its allocator's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from ghmdet.losses import GHMC, GHMR

RAISED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
Step = Callable[[], Any]


def region_loop(logits: Tensor, targets: Tensor, bins: int = 30) -> Tensor:
    """GHM-C the way the known code computes it: a mask of all examples for each region."""
    g = (logits.sigmoid().detach() - targets).abs()
    edges = torch.linspace(0, 1, bins + 1).tolist()
    edges[-1] += 1e-6
    weights = torch.zeros_like(logits)
    occupied = 0
    for low, high in itertools.pairwise(edges):
        inside = (g >= low) & (g < high)
        number = inside.sum().item()
        if number > 0:
            weights[inside] = logits.numel() / number
            occupied += 1
    return F.binary_cross_entropy_with_logits(logits, targets, weights / occupied, reduction="sum") / logits.numel()


def training_step(loss: Callable[[Tensor], Tensor], inputs: Tensor) -> Step:
    def step() -> None:
        inputs.grad = None
        loss(inputs).backward()

    return step


def timed(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each step in each round, the steps in turn; one round before is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            milliseconds = on_device(step) if device == "cuda" else on_host(step)
            if number:
                times[name].append(milliseconds)
    return times


def on_host(step: Step) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def on_device(step: Step) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def classification(
    positions: int, classes: int, rounds: int, device: str, dtype: torch.dtype = torch.float32
) -> dict[str, list[float]]:
    torch.manual_seed(0)
    logits = (torch.randn(positions, classes, device=device) * 1.5 - 4.5).to(dtype).requires_grad_()
    dense = torch.zeros(positions, classes, device=device, dtype=dtype)
    index = torch.full((positions,), -1, device=device)
    regions, exact = GHMC().to(device), GHMC(density="exact").to(device)
    source, sink = torch.ones_like(dense), torch.ones_like(dense)
    return timed(
        {
            "cross-entropy": training_step(lambda x: F.binary_cross_entropy_with_logits(x, dense), logits),
            "GHM-C, index targets": training_step(lambda x: regions(x, index), logits),
            "GHM-C, dense targets": training_step(lambda x: regions(x, dense), logits),
            "GHM-C exact, index targets": training_step(lambda x: exact(x, index), logits),
            "torchvision's focal loss": training_step(lambda x: sigmoid_focal_loss(x, dense, reduction="sum"), logits),
            "loop over regions": training_step(lambda x: region_loop(x, dense), logits),
            "copy": lambda: sink.copy_(source),
        },
        rounds,
        device,
    )


def boxes(number: int, rounds: int, device: str) -> dict[str, list[float]]:
    inputs = (torch.randn(number, 4, device=device) * 0.2).requires_grad_()
    targets = torch.zeros(number, 4, device=device)
    ghmr = GHMR().to(device)
    return timed(
        {
            "smooth L1": training_step(lambda x: F.smooth_l1_loss(x, targets, beta=1 / 9, reduction="sum"), inputs),
            "GHM-R": training_step(lambda x: ghmr(x, targets), inputs),
        },
        rounds * 40,
        device,
    )


def growth(rounds: int) -> dict[str, float]:
    """Nanoseconds an example of a step on a million and on a hundred million examples."""
    nanoseconds = {}
    for size in (10**6, 10**8):
        logits = (torch.randn(size // 80, 80) * 1.5 - 4.5).requires_grad_()
        index, criterion = torch.full((size // 80,), -1), GHMC()
        step = training_step(lambda x, c=criterion, i=index: c(x, i), logits)
        times = timed({"": step}, rounds * 10 if size == 10**6 else rounds, "cpu")[""]
        nanoseconds[f"{size:.0e}"] = statistics.median(times) * 1e6 / size
        del logits, index, step
    return nanoseconds


def memory(positions: int, classes: int) -> float:
    """The most memory of a step beyond logits and gradient, as a share of the logits, from the kernel's own peak."""
    logits = (torch.randn(positions, classes) - 4.5).requires_grad_()
    index, criterion = torch.full((positions,), -1), GHMC()
    few = (torch.randn(4_000, classes) - 4.5).requires_grad_()
    criterion(few, index[: len(few)]).backward()  # the machine code is loaded, the threads are there
    held = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here the peak counts anew
    criterion(logits, index).backward()
    size = logits.numel() * 4
    return (_status("VmHWM") - held - size) / size


def _status(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def in_own_process(part: str, environment: dict[str, str]) -> Any:
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def show(times: dict[str, list[float]], base: str) -> dict[str, float]:
    """Prints a group's medians, and the ratios to its base with the spread over rounds."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        tenths = statistics.quantiles([a / b for a, b in zip(values, times[base])], n=10)
        spread = f"(round by round {tenths[0]:.3f} to {tenths[-1]:.3f})"
        print(f"  {name:28}{medians[name]:9.3f} ms {medians[name] / medians[base]:7.3f} of {base} {spread}")
    return medians


def show_classification(times: dict[str, list[float]], size: int) -> None:
    medians = show(times, "cross-entropy")
    ours, copied = medians["GHM-C, index targets"], medians["copy"]
    for other in ("torchvision's focal loss", "loop over regions"):
        print(f"  index targets: {ours / medians[other]:.3f} of {other}")
    print(f"  exact: {medians['GHM-C exact, index targets'] / ours:.2f} of regions")
    bandwidth = 2 * size / copied / 1e6
    print(f"  copy at {bandwidth:.1f} GB/s: limit {1.5 * copied:.2f} ms, index targets at {ours / copied / 1.5:.1f} x")


def report_gpu(asked: argparse.Namespace) -> None:
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    print(f"{asked.positions} x {asked.classes} logits on {results['device']}, torch {torch.__version__}")
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\n{dtype}")
        times = classification(asked.positions, asked.classes, asked.rounds, "cuda", dtype)
        show_classification(times, asked.positions * asked.classes * dtype.itemsize)
        results[str(dtype)] = times
    results["boxes"] = boxes(4_000, asked.rounds, "cuda")
    show(results["boxes"], "smooth L1")
    logits = torch.zeros(asked.positions, asked.classes, device="cuda", requires_grad=True)
    index, criterion = torch.full((asked.positions,), -1, device="cuda"), GHMC().cuda()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    criterion(logits, index).backward()
    results["memory"] = (torch.cuda.max_memory_allocated() - held) / (4 * logits.numel()) - 1
    print(f"\nmemory beyond logits and gradient: {100 * results['memory']:.2f} % of the logits")
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--positions", type=int, default=120_000)
    ask.add_argument("--classes", type=int, default=80)
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--no-growth", action="store_true", help="leave out the hundred million examples (1 GB)")
    ask.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    ask.add_argument("--json", type=Path, help="also write all times there")
    ask.add_argument("--part", choices=["times", "growth", "memory"], help=argparse.SUPPRESS)
    asked = ask.parse_args()
    if asked.rounds < 7:
        ask.error(f"--rounds must be at least 7 for a median that holds, got {asked.rounds}")
    if asked.part == "times":
        by_class = classification(asked.positions, asked.classes, asked.rounds, "cpu")
        print(json.dumps({"classification": by_class, "boxes": boxes(4_000, asked.rounds, "cpu")}))
    elif asked.part == "growth":
        print(json.dumps(growth(asked.rounds)))
    elif asked.part == "memory":
        print(json.dumps(memory(asked.positions, asked.classes)))
    elif asked.device == "cuda":
        report_gpu(asked)
    else:
        report(asked)


def report(asked: argparse.Namespace) -> None:
    threads = f"{torch.get_num_threads()} threads"
    print(f"{asked.positions} x {asked.classes} logits, forward and backward, torch {torch.__version__}, {threads}")
    results: dict[str, Any] = {}
    for name, environment in (("as it comes", {}), ("raised", RAISED)):
        print(f"\nallocator {name}")
        results[name] = in_own_process("times", environment)
        medians = show(results[name]["classification"], "cross-entropy")
        ours, copied = medians["GHM-C, index targets"], medians["copy"]
        for other in ("torchvision's focal loss", "loop over regions"):
            print(f"  index targets: {ours / medians[other]:.3f} of {other}")
        print(f"  exact: {medians['GHM-C exact, index targets'] / ours:.2f} of regions")
        bandwidth = 8 * asked.positions * asked.classes / copied / 1e6
        print(
            f"  copy at {bandwidth:.1f} GB/s: limit {1.5 * copied:.2f} ms, index targets at {ours / copied / 1.5:.1f} x"
        )
        show(results[name]["boxes"], "smooth L1")
    results["memory"] = in_own_process("memory", {})
    print(f"\nmemory beyond logits and gradient: {100 * results['memory']:.1f} % of the logits")
    if not asked.no_growth:
        results["growth"] = in_own_process("growth", {})
        small, large = results["growth"].values()
        print(f"an example: {small:.2f} ns of a million, {large:.2f} ns of a hundred million, {large / small:.2f} x")
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
