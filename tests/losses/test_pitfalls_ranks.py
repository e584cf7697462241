"""Row 5 of the defects, nothing summed across ranks: here two ranks give what one process gives on the joined batch.

The tests' own process is rank 0; the file is also the script that rank 1 runs.
"""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ghmdet import GHMC, functional

SHARES = [(8, 0), (6, 2), (3, 5)]  # each call's examples on rank 0 and rank 1; at first one of them has none


def calls() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(len(SHARES), 8, 3, generator=rng, dtype=torch.float64)
    return [(each * (2 + i), torch.arange(8) % 4 - 1) for i, each in enumerate(logits)]


def trained(criterion: GHMC, batches) -> dict[str, list]:
    """Losses, and gradients of a parameter that all logits share, the way a data-parallel model's is shared."""
    seen: dict[str, list] = {"loss": [], "gradient": []}
    for logits, labels in batches:
        bias = torch.zeros(3, dtype=logits.dtype, requires_grad=True)
        loss = criterion(logits + bias, labels)
        loss.backward()
        seen["loss"].append(loss.item())
        seen["gradient"].append(bias.grad)
    return seen | {"state": next(criterion.buffers())}


def share_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [(logits.split(sizes)[rank], labels.split(sizes)[rank]) for (logits, labels), sizes in zip(calls(), SHARES)]


def seen_by(rank: int, folder: Path) -> dict:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        criterion, by_group, alone = GHMC(bins=5), GHMC(bins=5, sync=dist.group.WORLD), GHMC(bins=5, sync=False)
        seen = {"together": trained(criterion, share_of(rank))}
        seen["by group"] = trained(by_group, share_of(rank))
        seen["alone"] = trained(alone, share_of(rank)[1:])
        if rank == 0:  # and the other rank does nothing meanwhile
            criterion.eval()(*share_of(rank)[0])
            with torch.no_grad():
                criterion.train()(*share_of(rank)[0])
            seen["state after validation"] = next(criterion.buffers())
        return seen
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    other = subprocess.Popen([sys.executable, __file__, str(folder)])
    try:
        own = seen_by(0, folder)
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
    return [own, torch.load(folder / "seen.pt", weights_only=True)]


def mean(ranks, how: str, what: str) -> list[Tensor]:
    return [torch.as_tensor((a + b) / 2) for a, b in zip(*(rank[how][what] for rank in ranks))]


@pytest.mark.parametrize("how", ["together", "by group"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_pitfall_05_the_mean_over_ranks_is_one_process_on_the_joined_batch(ranks, how, what):
    joined = [torch.as_tensor(each) for each in trained(GHMC(bins=5), calls())[what]]
    torch.testing.assert_close(mean(ranks, how, what), joined, rtol=1e-5, atol=1e-7)


def test_pitfall_05_every_rank_holds_the_state_of_the_joined_batch(ranks):
    joined = trained(GHMC(bins=5), calls())["state"]
    for rank in ranks:
        torch.testing.assert_close(rank["together"]["state"], joined)


def test_pitfall_05_harmonizing_alone_is_another_loss_and_still_there_to_ask_for(ranks):
    for rank, seen in enumerate(ranks):
        assert seen["alone"]["loss"][0] == pytest.approx(functional.ghmc_loss(*share_of(rank)[1], bins=5).item())
    assert mean(ranks, "alone", "loss")[0] != pytest.approx(functional.ghmc_loss(*calls()[1], bins=5).item(), rel=0.05)


def test_pitfall_05_validation_on_one_rank_waits_for_nobody_and_changes_nothing(ranks):
    torch.testing.assert_close(ranks[0]["state after validation"], ranks[0]["together"]["state"], rtol=0, atol=0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.save(seen_by(1, folder), folder / "seen.pt")
