"""Work on all cores, with the threads that torch has already."""

from __future__ import annotations

import collections
import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

__all__ = ["over_stretches"]

_PROCESS = os.getpid()


def over_stretches(work: Callable[[int, int, Any], Any], size: int, own: Callable[[], Any], length: int) -> list[Any]:
    """`work(start, stop, own())` over `size` examples in stretches of `length`, by as many threads as torch uses.

    Each thread makes its own `own()` and takes the next stretch when it is done with one. The results come in order.
    """
    if size <= length:
        return [work(0, size, own())]
    starts = range(0, size, length)
    results: list[Any] = [None] * len(starts)
    pending = collections.deque(enumerate(starts))
    failures: list[BaseException] = []

    def take() -> tuple[int, int] | None:
        try:
            return pending.popleft()
        except IndexError:
            return None

    def drain(_: Any = None) -> None:
        try:
            mine = own()
            for at, start in iter(take, None):
                results[at] = work(start, min(size, start + length), mine)
        except BaseException as failure:  # a keyboard interrupt too: it must not vanish in a thread
            failures.append(failure)

    threads = min(torch.get_num_threads(), len(starts))
    if threads == 1:
        drain()
    elif (team := _torchs_team()) is not None and os.getpid() == _PROCESS:
        team(_CALLBACK(drain), None, threads, 0)
    else:
        running = [_pool(os.getpid(), threads - 1).submit(drain) for _ in range(threads - 1)]
        drain()
        for helper in running:
            helper.result()
    if failures:
        raise failures[0]
    return results


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _torchs_team() -> Any:
    """OpenMP's `GOMP_parallel` from the library that torch computes with; None where that is not to be found.

    After an operation torch's threads wait for the next one by spinning, for some five milliseconds, on the very cores
    that other threads would need: the losses took a third longer on a pool of their own. In a forked process that team
    does not exist, as for torch itself.
    """
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
        home = str(Path(torch.__file__).parent)
        (library,) = {path for path in mapped if path.startswith(home) and Path(path).name.startswith("libgomp")}
        return ctypes.CDLL(library).GOMP_parallel
    except (OSError, ValueError, AttributeError):  # no such system, no single such library, no such function
        return None


@functools.lru_cache(maxsize=1)
def _pool(process: int, helpers: int) -> ThreadPoolExecutor:
    """Threads of our own, anew in a forked process, which inherits none."""
    return ThreadPoolExecutor(helpers, thread_name_prefix="ghmdet")
