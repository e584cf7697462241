"""`python -m ghmdet.demonstration`: what `make demo` shows, without data and without a network."""

import re
import subprocess
import sys

import pytest
import torch

from ghmdet import demonstration


@pytest.fixture(scope="module")
def batch():
    logits, targets = demonstration.converged_detector()
    g = (logits.sigmoid() - targets).abs()
    return demonstration.by_region(g, demonstration.gradient_norms(logits, targets))


def test_the_command_prints_a_table_and_says_where_its_figure_is(tmp_path):
    command = [sys.executable, "-m", "ghmdet.demonstration", "--out", "a/b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.isascii(), "a terminal may know no other letters"
    rows = re.findall(r"^(\d\.\d) to (\d\.\d) +([\d,]+)((?: +\d+\.\d %){3})$", done.stdout, re.MULTILINE)
    assert len(rows) == 10
    for column in range(3):
        assert sum(float(row[3].split("%")[column]) for row in rows) == pytest.approx(100, abs=0.5)
    files = [tmp_path / name for name in re.findall(r"^figure: (.+)$", done.stdout, re.MULTILINE)]
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in files[1].read_text(encoding="utf-8")


def test_the_simulated_examples_are_those_of_the_papers_second_figure(batch):
    counts, _ = batch
    assert counts[0] > 0.9 * counts.sum(), "easy negatives"
    assert counts[-1] > 5 * counts[15:-5].max(), "more very hard examples than medium ones"
    assert counts.min() > 30


def test_cross_entropy_goes_to_easy_negatives_focal_loss_to_outliers_and_ghmc_to_neither(batch):
    _, sums = batch
    cross_entropy, focal, ghmc = (total / total.sum() for total in sums.values())
    assert cross_entropy[0] > 0.3
    assert focal[-1] > 0.3
    assert ghmc.max() < 0.1


def test_a_unit_region_gets_a_share_of_ghmcs_gradient_in_proportion_to_its_mean_norm(batch):
    """Each region has the weight 1 / M, so what its examples contribute together is their mean gradient norm / M."""
    counts, sums = batch
    mean_norm = sums["cross-entropy"] / counts
    torch.testing.assert_close(sums["GHM-C"] / sums["GHM-C"].sum(), mean_norm / mean_norm.sum(), rtol=1e-4, atol=0)
