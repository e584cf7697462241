"""The examples: short, and each learns what it says."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
# what each must at least add to its number; seen: 0.65, 0.82, 0.60
LEAST_GAIN = {"multilabel": 0.4, "segmentation": 0.5, "torchvision_retinanet": 0.25}


@pytest.fixture
def one_thread():
    """Small tensors, so that a second thread only costs; and the same numbers on every machine's core count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LEAST_GAIN)


@pytest.mark.parametrize("name", LEAST_GAIN)
def test_an_example_is_under_forty_lines_and_says_what_one_sees(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) < 40
    assert source.startswith('"""')


@pytest.mark.parametrize("name", LEAST_GAIN)
def test_an_example_learns(name, capsys, one_thread):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", last).groups())
    assert after > before + LEAST_GAIN[name], last


def test_the_retinanet_head_takes_a_picture_without_an_object_and_fits_torchvisions_own_model():
    from torchvision.models.detection import retinanet_resnet50_fpn

    import ghmdet

    head = runpy.run_path(str(EXAMPLES / "torchvision_retinanet.py"))["Head"](256, 9, 91)
    head.ghmc, head.ghmr = ghmdet.GHMC(), ghmdet.GHMR()
    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, head=head, min_size=64, max_size=64)
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    full = {"boxes": torch.tensor([[8.0, 8.0, 50.0, 60.0]]), "labels": torch.tensor([3])}
    losses = model.train()(list(torch.rand(2, 3, 64, 64)), [empty, full])
    assert all(loss.isfinite() and loss > 0 for loss in losses.values())
    losses = model(list(torch.rand(2, 3, 64, 64)), [empty, empty])
    assert losses["classification"] > 0
    assert losses["bbox_regression"] == 0
    assert losses["bbox_regression"].requires_grad
