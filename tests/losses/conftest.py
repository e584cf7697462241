"""What the tests of the losses share: the oracle within reach, the same random numbers, every implementation."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from ghmdet.losses.kernels import implementation

sys.path.insert(0, str(Path(__file__).parent))  # for `import oracle`


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=["numba", "torch", "plain"])
def any_implementation(request):
    """The test runs once on each way the losses can be computed."""
    if request.param == "numba":
        pytest.importorskip("numba")
    with implementation(request.param):
        yield request.param


@pytest.fixture(params=["numba", "torch"])
def fused(request):
    """The name of each implementation that must repeat the plain formulas' numbers."""
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


@pytest.fixture
def threads():
    """Sets how many threads torch may use, for the test's length."""
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        yield torch.set_num_threads
