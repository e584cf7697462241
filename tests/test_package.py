"""What the package promises before anything of it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ghmdet

SOURCE = Path(ghmdet.__file__).parent

# The losses train with torch alone: everything else that a default installation brings is made impossible to import.
WITH_TORCH_ALONE = """
import sys
for name in ("numba", "llvmlite", "numpy", "torchvision", "matplotlib", "triton"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")  # torch says that numpy is missing
import torch, ghmdet

logits = torch.zeros(4, 3, requires_grad=True)
for loss in (
    ghmdet.GHMC()(logits, torch.tensor([0, -1, 2, 1])),
    ghmdet.GHMC(density="exact")(logits, torch.ones(4, 3)),
    ghmdet.GHMR()(logits, torch.ones(4, 3)),
    ghmdet.SoftmaxGHMC()(logits, torch.tensor([0, 1, 2, 1])),
    ghmdet.losses.FocalLoss()(logits, torch.tensor([0, -1, 2, 1])),
    ghmdet.Harmonizer()(torch.rand(5)).sum(),
):
    assert loss.isfinite()
    loss.requires_grad and loss.backward()
print("trained", torch.__version__)
"""


def test_the_losses_need_torch_alone():
    done = subprocess.run([sys.executable, "-c", WITH_TORCH_ALONE], capture_output=True, text=True)
    assert done.stdout.startswith("trained"), done.stderr


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, ghmdet; print(sorted({'torch', 'numpy', 'numba', 'torchvision', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", ghmdet.__all__)
def test_every_public_name_is_there(name):
    assert getattr(ghmdet, name) is not None
    assert name in dir(ghmdet)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ghmdet' has no attribute 'GHM'"):
        ghmdet.GHM  # noqa: B018


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted((SOURCE / "losses").rglob("*.py")), ids=lambda path: path.stem)
def test_the_losses_import_nothing_else_of_ghmdet(path):
    ours = {name for name in imported(path) if name.split(".")[0] == "ghmdet"}
    assert all(name == "ghmdet.losses" or name.startswith("ghmdet.losses.") for name in ours)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_source_file_has_at_most_three_hundred_lines(path):
    assert len(path.read_text().splitlines()) <= 300
