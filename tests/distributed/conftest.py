"""What every file needs: the plain twin, and under torchrun the process group."""

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# The plain twin, in every process that this one starts too.
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))


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
