"""Runs the files every_rank_*.py under torchrun."""

from pathlib import Path

import launch
import pytest


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank(ranks: int, tmp_path: Path) -> None:
    files = sorted(launch.HERE.glob("every_rank_*.py"))
    printed = launch.torchrun(ranks, files, tmp_path, seconds=240)
    assert "nanobind: leaked" not in printed
