"""Numbers in the documents come from recorded results."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["losses-cpu", "losses-h200"])
def test_the_page_on_speed_shows_the_recorded_times(name):
    command = [sys.executable, "benchmarks/losses.py", "--show", f"results/speed/{name}.json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() in (ROOT / "docs/speed.md").read_text()
