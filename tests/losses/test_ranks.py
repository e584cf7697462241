"""Two processes, one of them without a positive, train as one process on the joined batch does.

The file is also the script that each rank runs.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ghmdet.losses import ASL1, GHMC, GHMR, OHEM, CrossEntropy, FocalLoss, SmoothL1, SoftmaxGHMC

IMAGES, ANCHORS, CLASSES = 5, 40, 6
SPLIT = (3, 2)  # images of each rank; those of the second have no object
STEPS = 3

CLASSIFIERS = {
    "GHM-C": GHMC,
    "GHM-C occupied": lambda: GHMC(normalizer="occupied"),
    "GHM-C bounded": lambda: GHMC(max_weight=3.0),
    "GHM-C exact": lambda: GHMC(density="exact"),
    "cross-entropy": CrossEntropy,
    "focal": FocalLoss,
    "OHEM": lambda: OHEM(keep=9),
    "softmax": SoftmaxGHMC,
}
BOX_LOSSES = {"GHM-R": GHMR, "smooth L1": SmoothL1, "ASL1": ASL1}


def batches():
    rng = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        features = torch.randn(IMAGES, ANCHORS, 8, generator=rng)
        classes = torch.randint(-1, CLASSES, (IMAGES, ANCHORS), generator=rng)
        classes[SPLIT[0] :] = -1
        valid = torch.rand(IMAGES, ANCHORS, generator=rng) > 0.2
        yield features, classes, valid


def boxes():
    left = torch.arange(ANCHORS) * 4.0
    return torch.stack([left, left * 0, left + 10, left * 0 + 10], 1)


def classify(name, criterion, outputs, classes, valid):
    if name == "softmax":
        return criterion(outputs.transpose(1, 2), classes.clamp(min=0), valid)
    more = {"boxes": boxes()} if name == "OHEM" else {"levels": [30, 10]} if name == "cross-entropy" else {}
    return criterion(outputs, classes, valid, **more)


def regress(criterion, outputs, classes, valid):
    positive = (classes >= 0) & valid
    return criterion(outputs[positive][:, :4], torch.zeros(int(positive.sum()), 4))


def trained(parallel, part) -> dict[str, torch.Tensor]:
    """The weights after a few steps with each loss, on the images of `part`."""
    result = {}
    for name, make in {**CLASSIFIERS, **BOX_LOSSES}.items():
        torch.manual_seed(0)
        model = nn.Linear(8, CLASSES)
        wrapped = DistributedDataParallel(model) if parallel else model
        criterion = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for features, classes, valid in batches():
            outputs = wrapped(features[part])
            if name in CLASSIFIERS:
                loss = classify(name, criterion, outputs, classes[part], valid[part])
            else:
                loss = regress(criterion, outputs, classes[part], valid[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result[name] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return result


def run_as_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    first = sum(SPLIT[:rank])
    result = trained(True, slice(first, first + SPLIT[rank]))
    reductions = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, **rest: reductions.append(tensor.numel()) or reduce(tensor, **rest)
    GHMC()(torch.zeros(4, 5, requires_grad=True), torch.zeros(4).long())
    result["all-reduced"] = torch.tensor(reductions)
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder)]) for rank in (0, 1)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def joined():
    return trained(False, slice(None))


@pytest.mark.parametrize("name", [*CLASSIFIERS, *BOX_LOSSES])
def test_two_ranks_train_the_weights_of_one_process(ranks, joined, name):
    for rank in ranks:
        torch.testing.assert_close(rank[name], joined[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*CLASSIFIERS, *BOX_LOSSES])
def test_the_losses_of_the_comparison_did_move_the_weights(joined, name):
    torch.manual_seed(0)
    start = torch.cat([p.detach().reshape(-1) for p in nn.Linear(8, CLASSES).parameters()])
    assert (joined[name] - start).abs().max() > 1e-3


def test_a_call_reduces_its_counts_once_and_nothing_else(ranks):
    assert [rank["all-reduced"].tolist() for rank in ranks] == [[30], [30]]


if __name__ == "__main__":
    run_as_rank(int(sys.argv[1]), Path(sys.argv[2]))
