"""Ranks that die or stall: the others are told in time, and nothing has changed."""

import os
import signal
import time
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
import trial
from every_rank_trajectory import everything
from trial import constant

import zeroone
from zeroone import distributed
from zeroone.schedules import EveryStep, Interval

TIMEOUT = 4.0
RANKS = 3
DOOMED = 1
# Steps: refresh, refresh, local, local, sync.
SCHEDULES = {"variance_schedule": EveryStep(2), "sync_schedule": Interval(3)}


def disturb(operation: str, how: str) -> None:
    """The next call of the operation on this rank kills the process, or comes too late."""
    wrapped = getattr(distributed._ProcessGroupOperations, operation)

    def disturbed(self: Any, *arguments: int) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT + 3)
        wrapped(self, *arguments)

    setattr(distributed._ProcessGroupOperations, operation, disturbed)


def in_a_round(operation: str, how: str, done: int, call: str) -> tuple[float, str]:
    """Seconds until the error, and its text."""
    rank = dist.get_rank()
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=RANKS, **SCHEDULES).run(done)
    before = everything(ours.optimizer)
    for *_, parameter in ours.tensors():
        parameter.grad = torch.ones_like(parameter)
    if rank == DOOMED:
        disturb(operation, how)
    begin = time.monotonic()
    with pytest.raises(zeroone.CommunicationError) as caught:
        getattr(ours.optimizer, call)()
    seconds = time.monotonic() - begin
    assert everything(ours.optimizer) == before
    return seconds, str(caught.value)


@pytest.mark.parametrize(
    ("operation", "how", "done", "call", "step"),
    [
        ("all_to_all", "dies", 4, "step", 5),  # in a sync
        ("all_gather", "dies", 4, "step", 5),
        ("all_gather", "dies", 1, "step", 2),  # in a refresh
        ("all_to_all", "dies", 3, "sync", 3),  # in a sync by call
        ("all_to_all", "is late", 4, "step", 5),
    ],
)
def test_one_rank_fails(operation: str, how: str, done: int, call: str, step: int) -> None:
    ends = launch.run_ranks(
        in_a_round,
        RANKS,
        *(operation, how, done, call),
        timeout=TIMEOUT,
        dies=[DOOMED] if how == "dies" else [],
    )
    for rank, end in enumerate(ends):
        if rank == DOOMED:
            continue
        seconds, said = end
        assert f"{operation} of " in said
        assert f"failed on rank {rank} of {RANKS}" in said
        assert f"step {step}:" in said
        assert said.count("step ") == 1
        # A dead rank's connections are closed, a late one's time out.
        assert seconds < (2 if how == "dies" else TIMEOUT + 2), said
        assert how == "dies" or seconds > TIMEOUT - 1


def appears_later(steps: int) -> str:
    """Local steps are not averaged in hindsight."""
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = zeroone.ZeroOneAdam([parameter])
    parameter.grad = torch.full((5,), 1.0 + int(os.environ["RANK"]))
    for _ in range(steps):
        optimizer.step()
    dist.init_process_group("gloo")
    try:
        optimizer.step()
    except RuntimeError as error:
        assert optimizer.stats.steps == steps > 0
        return str(error)
    assert optimizer.stats.bytes_sent > 0 or dist.get_world_size() == 1
    return ""


def test_process_group_that_appears_later() -> None:
    said = launch.run_ranks(appears_later, 2, 1, init=False)
    assert all("process group of several ranks appeared after the first step" in s for s in said)
    assert launch.run_ranks(appears_later, 2, 0, init=False) == ["", ""]
    assert launch.run_ranks(appears_later, 1, 1, init=False) == [""]
