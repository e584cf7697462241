"""How long the losses take, as ratios measured in one run.

    python benchmarks/losses.py [--positions 120000] [--classes 80] [--rounds 9] [--device cuda]
                                [--json FILE] [--show FILE]

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
EXACT, FOCAL, LOOP = "GHM-C exact, index targets", "torchvision's focal loss", "a loop over regions"
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
                times[name].append(round(milliseconds, 4))
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
            EXACT: training_step(lambda x: exact(x, index), logits),
            FOCAL: training_step(lambda x: sigmoid_focal_loss(x, dense, reduction="sum"), logits),
            LOOP: training_step(lambda x: region_loop(x, dense), logits),
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
        rounds * 10,
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


def ratios(times: dict[str, list[float]], base: str) -> list[str]:
    """Each candidate's median, and its ratio to the base with the spread over rounds, as rows of a table."""
    rows = [f"| | ms | of {base} | round by round |", "| --- | --- | --- | --- |"]
    median = statistics.median(times[base])
    for name, values in times.items():
        tenths = statistics.quantiles([a / b for a, b in zip(values, times[base])], n=10)
        own = statistics.median(values)
        rows.append(f"| {name} | {own:.3g} | {own / median:.2f} | {tenths[0]:.2f} to {tenths[-1]:.2f} |")
    return rows


def classification_rows(times: dict[str, list[float]], size: int) -> list[str]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours, copied = medians["GHM-C, index targets"], medians["copy"]
    return [
        *ratios(times, "cross-entropy"),
        "",
        f"GHM-C with index targets: {ours / medians[FOCAL]:.3f} of torchvision's focal loss, "
        f"{ours / medians[LOOP]:.3f} of the loop over regions; exact {medians[EXACT] / ours:.2f} of regions. "
        f"A copy runs at {2 * size / copied / 1e6:.0f} GB/s: the limit is {1.5 * copied:.2f} ms, "
        f"GHM-C is at {ours / copied / 1.5:.1f} times that.",
        "",
    ]


def describe(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    shape = f"{results['positions']:,} x {results['classes']} logits"
    lines = [f"{shape}, forward and backward, {results['machine']}, torch {results['torch']}.", ""]
    for title, part in results["parts"].items():
        size = results["positions"] * results["classes"] * (2 if "bfloat16" in title else 4)
        lines += [f"**{title}**", "", *classification_rows(part["classification"], size)]
        if "boxes" in part:
            lines += ["4,000 boxes:", "", *ratios(part["boxes"], "smooth L1"), ""]
    lines.append(f"Memory beyond logits and gradient: {100 * results['memory']:.1f} % of the logits.")
    if "growth" in results:
        small, large = results["growth"].values()
        growth = f"{small:.2f} ns of a million, {large:.2f} ns of a hundred million: {large / small:.2f} times"
        lines.append(f"An example takes {growth}.")
    return "\n".join(lines)


def on_cpu(asked: argparse.Namespace) -> dict[str, Any]:
    model = next((r for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")), ":")
    results: dict[str, Any] = {"machine": f"{torch.get_num_threads()} threads of{model.split(':')[1]}"}
    results["parts"] = {
        "allocator as it comes": in_own_process("times", {}),
        "allocator's thresholds raised": in_own_process("times", RAISED),
    }
    results["memory"] = in_own_process("memory", {})
    results["growth"] = in_own_process("growth", {})
    return results


def on_gpu(asked: argparse.Namespace) -> dict[str, Any]:
    parts = {}
    for dtype in (torch.float32, torch.bfloat16):
        times = classification(asked.positions, asked.classes, asked.rounds, "cuda", dtype)
        parts[str(dtype).removeprefix("torch.")] = {"classification": times}
    parts["float32"]["boxes"] = boxes(4_000, asked.rounds, "cuda")
    logits = torch.zeros(asked.positions, asked.classes, device="cuda", requires_grad=True)
    index, criterion = torch.full((asked.positions,), -1, device="cuda"), GHMC().cuda()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    criterion(logits, index).backward()
    memory = (torch.cuda.max_memory_allocated() - held) / (4 * logits.numel()) - 1
    return {"machine": torch.cuda.get_device_name(), "parts": parts, "memory": memory}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--positions", type=int, default=120_000)
    ask.add_argument("--classes", type=int, default=80)
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    ask.add_argument("--json", type=Path, help="also write all times there")
    ask.add_argument("--show", type=Path, help="measure nothing, print an earlier run's file")
    ask.add_argument("--part", choices=["times", "growth", "memory"], help=argparse.SUPPRESS)
    asked = ask.parse_args()
    if asked.rounds < 7:
        ask.error(f"--rounds must be at least 7 for a median that holds, got {asked.rounds}")
    if asked.show:
        print(describe(json.loads(asked.show.read_text())))
    elif asked.part == "times":
        by_class = classification(asked.positions, asked.classes, asked.rounds, "cpu")
        print(json.dumps({"classification": by_class, "boxes": boxes(4_000, asked.rounds, "cpu")}))
    elif asked.part == "growth":
        print(json.dumps(growth(asked.rounds)))
    elif asked.part == "memory":
        print(json.dumps(memory(asked.positions, asked.classes)))
    else:
        results = on_gpu(asked) if asked.device == "cuda" else on_cpu(asked)
        results |= {"positions": asked.positions, "classes": asked.classes, "torch": torch.__version__}
        if asked.json:
            asked.json.write_text(json.dumps(results))
        print(describe(results))


if __name__ == "__main__":
    main()
