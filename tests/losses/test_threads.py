"""Work is shared by torch's threads, done once each, and its failures come back."""

import multiprocessing
import os
import threading

import pytest
import torch

from ghmdet.losses.kernels import threads
from ghmdet.losses.kernels.threads import over_stretches


@pytest.fixture(params=["torch's team", "a pool"])
def two_threads(request, monkeypatch):
    if request.param == "a pool":
        monkeypatch.setattr(threads, "_torchs_team", lambda: None)
    elif threads._torchs_team() is None:
        pytest.skip("torch's OpenMP library was not found")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 999])
@pytest.mark.usefixtures("two_threads")
def test_every_example_is_worked_on_once_and_in_order(size):
    stretches = over_stretches(lambda start, stop, _: list(range(start, stop)), size, lambda: None, 10)
    assert [i for stretch in stretches for i in stretch] == list(range(size))


@pytest.mark.usefixtures("two_threads")
def test_both_threads_work_and_each_has_its_own():
    made, meeting = [], threading.Barrier(2, timeout=20)

    def work(start, stop, mine):
        if start < 20:
            meeting.wait()  # passes only if two threads are here at once
        return mine

    given = over_stretches(work, 100, lambda: made.append(object()) or made[-1], 10)
    assert len(set(map(id, given[:2]))) == 2
    assert len(made) == 2


@pytest.mark.parametrize("failure", [ValueError, IndexError, KeyboardInterrupt])
@pytest.mark.usefixtures("two_threads")
def test_a_failure_in_any_thread_is_raised(failure):
    def work(start, stop, _):
        if start == 50:
            raise failure("here")

    with pytest.raises(failure, match="here"):
        over_stretches(work, 1000, lambda: None, 10)


def in_a_fork(results) -> None:
    results.put(sum(over_stretches(lambda start, stop, _: stop - start, 1000, lambda: None, 10)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not():
    over_stretches(lambda start, stop, _: None, 1000, lambda: None, 10)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_a_fork, args=(results,))
    child.start()
    assert results.get(timeout=30) == 1000
    child.join(timeout=30)
