"""What every file needs: the plain twin, and under torchrun the process group."""

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import zeroone
from zeroone.schedules import Doubling, Interval

if TYPE_CHECKING:
    from trial import Trial

# The plain twin, in every process that this one starts too.
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))


# Every algorithm with settings that bring all its kinds of step within nine steps.
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeroOneAdam": {"variance_schedule": Doubling(2), "sync_schedule": Interval(3)},
    "OneBitAdam": {"warmup_steps": 4},
    "AdamW": {},
}
KINDS = {
    "ZeroOneAdam": {"refresh", "sync", "local"},
    "OneBitAdam": {"refresh", "sync"},
    "AdamW": {"refresh"},
}


@pytest.fixture(params=SETTINGS)
def algorithm(request: pytest.FixtureRequest) -> str:
    """The name of an optimizer; all of them in turn."""
    name: str = request.param
    return name


@pytest.fixture
def kinds(algorithm: str) -> set[str]:
    """The kinds of step that it has."""
    return KINDS[algorithm]


@pytest.fixture
def optimizer_of(algorithm: str) -> Callable[..., Any]:
    """Makes it of parameters."""
    return partial(getattr(zeroone, algorithm), **SETTINGS[algorithm])


@pytest.fixture
def trial_of(algorithm: str, world: int, rank: int) -> Callable[..., "Trial"]:
    """Makes a trial of it, with few tensors, from a plan for two groups."""
    import trial

    make = {
        "ZeroOneAdam": trial.zero_one_adam,
        "OneBitAdam": trial.one_bit_adam,
        "AdamW": trial.adamw,
    }[algorithm]
    settings = {"rank": rank, "world": world, **SETTINGS[algorithm]}
    return partial(make, **{"shapes": [[(50, 45), ()], [(13,), (0, 3)]], **settings})


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of ranks. Under torchrun only; an unanswered collective fails after 30 s."""
    assert "RANK" in os.environ, "run this file by torchrun, as test_torchrun.py does"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    # Results may not depend on the number of threads, so let it differ.
    torch.set_num_threads(1 + dist.get_rank() % 2)
    yield dist.get_world_size()
    if not request.session.testsfailed:  # else the others are elsewhere
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def rank(world: int) -> int:
    return dist.get_rank()
