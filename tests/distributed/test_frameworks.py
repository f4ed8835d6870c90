"""The recipes for Accelerate, Trainer and Lightning run under the real packages, and resume."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import launch
import pytest
import torch

import zeroone
from zeroone.schedules import Doubling, Interval

RECIPES = Path(__file__).parents[2] / "recipes"
LINE = re.compile(
    r"rank (\d): .*?(\d+) steps, (\d+) refreshes, (\d+) syncs, ([\d.]+) bits per parameter and "
    r"step, parameters (\w{16})"
)


def run_recipe(recipe: str, ranks: int, output: Path, *arguments: str) -> tuple[list[int], str]:
    """[steps, refreshes, syncs] and the digest of the parameters, which all ranks share."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks)),
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
    assert sorted(rank for rank, *_ in lines) == [str(rank) for rank in range(ranks)], printed
    (rest,) = {tuple(rest) for _, *rest in lines}  # the same on all ranks
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
    counts, whole = run_recipe(recipe, 2, tmp_path)
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

    counts, resumed = run_recipe(recipe, 2, tmp_path, "--resume")
    assert counts[0] == 16
    assert resumed == whole


def prepares() -> None:
    """Weights that were loaded after construction survive `prepare`, which loads the optimizer's
    own state; and its wrappers train as the plain model and optimizer do."""
    warnings.simplefilter("default")  # what these packages warn of is theirs
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    modules, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(torch.nn.Linear(4, 2))
        optimizers.append(
            zeroone.ZeroOneAdam(
                modules[-1].parameters(), variance_schedule=Doubling(2), sync_schedule=Interval(3)
            )
        )
        modules[-1].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    model, optimizer = accelerator.prepare(modules[1], optimizers[1])
    zeroone.local_gradients(model)
    assert all(bool((p == 1).all()) for p in modules[1].parameters())
    torch.manual_seed(1 + accelerator.process_index)
    for t in range(20):
        x = torch.randn(3, 4)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        (modules[0](x).square().mean() / 2).backward()
        if t % 2 == 1:
            optimizers[0].step()
            optimizers[0].zero_grad()
        for mine, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            assert torch.equal(mine, theirs), t
    assert optimizers[1].stats.steps == 10


def test_accelerate_prepares_an_optimizer() -> None:
    launch.run_ranks(prepares, 2)
