"""The recipes for Accelerate, Trainer and Lightning run under the real packages, and resume."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import launch
import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes"
LINE = re.compile(
    r"rank (\d): .*?(\d+) steps, (\d+) refreshes, (\d+) syncs, ([\d.]+) bits per parameter and "
    r"step, parameters (\w{16})"
)


def run(recipe: str, output: Path, *arguments: str) -> tuple[list[int], str]:
    """[steps, refreshes, syncs] and the digest of the parameters, which all ranks share."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(RECIPES / recipe), "--output", str(output), *arguments),
    ]
    done = subprocess.run(
        command,
        env=os.environ | launch.ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    lines = LINE.findall(printed)
    assert sorted(rank for rank, *_ in lines) == ["0", "1"], printed
    (rest,) = {tuple(rest) for _, *rest in lines}  # the same on both ranks
    return [int(count) for count in rest[:3]], rest[-1]


@pytest.mark.parametrize(
    ("recipe", "saved"),
    [
        ("with_accelerate.py", "optimizer.rank{}.pt"),
        ("with_trainer.py", "checkpoint-16/optimizer.rank{}.pt"),
        ("with_lightning.py", "epoch=0.ckpt.rank{}"),
    ],
)
def test_recipe(recipe: str, saved: str, tmp_path: Path) -> None:
    counts, whole = run(recipe, tmp_path)
    steps, refreshes, syncs = counts
    assert steps == 32
    assert refreshes > 0
    assert syncs > 0
    assert refreshes + syncs < steps  # the others sent nothing

    # Saved inside an interval, where the ranks differ: their gradients were not averaged.
    pending = []
    for rank in range(2):
        states: Any = torch.load(tmp_path / saved.format(rank))
        state = (states[0] if isinstance(states, list) else states)["state"][0]
        (accumulated,) = (state[key] for key in state if key.startswith("accumulated"))
        pending.append(accumulated)
    assert pending[0].any()
    assert not torch.equal(*pending)

    counts, resumed = run(recipe, tmp_path, "--resume")
    assert counts[0] == 16
    assert resumed == whole
