"""Ranks that die or stall: the others are told in time, and nothing has changed."""

import copy
import os
import signal
import time
from collections.abc import Callable
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
from zeroone.schedules import EveryStep, Interval, Steps

LATE = 4.0  # the group's timeout for ranks that come late, in seconds
PATIENT = 20.0  # and for those that die, which the others notice at once
RANKS = 3
DOOMED = 1
DEATHS = {"dies": signal.SIGKILL, "is terminated": signal.SIGTERM}
# Steps: refresh, refresh, local, local, sync.
SCHEDULES = {"variance_schedule": EveryStep(2), "sync_schedule": Interval(3)}
ALGORITHMS: dict[str, tuple[Callable[..., trial.Trial], dict[str, Any]]] = {
    "0/1 Adam": (trial.zero_one_adam, SCHEDULES),
    "1-bit Adam": (trial.one_bit_adam, {"warmup_steps": 2}),
    "AdamW": (trial.adamw, {}),
}


def disturb(operation: str, how: str) -> None:
    """The next call of the operation on this rank kills the process, or comes too late."""
    wrapped = getattr(distributed._ProcessGroupOperations, operation)

    def disturbed(self: Any, *arguments: int) -> None:
        setattr(distributed._ProcessGroupOperations, operation, wrapped)
        if how in DEATHS:
            os.kill(os.getpid(), DEATHS[how])
        time.sleep(LATE + 3)
        wrapped(self, *arguments)

    setattr(distributed._ProcessGroupOperations, operation, disturbed)


def in_a_round(algorithm: str, operation: str, how: str, done: int, call: str) -> tuple[float, str]:
    """Seconds until the error, and its text."""
    rank = dist.get_rank()
    make, arguments = ALGORITHMS[algorithm]
    ours = make(constant(groups=2), rank=rank, world=RANKS, **arguments).run(done)
    for *_, parameter in ours.tensors():
        parameter.grad = torch.ones_like(parameter)
    if rank == DOOMED:
        disturb(operation, how)
    begin = time.monotonic()
    with pytest.raises(zeroone.CommunicationError) as caught:
        getattr(ours.optimizer, call)()
    seconds = time.monotonic() - begin
    ours.twin.bytes_sent = ours.optimizer.stats.bytes_sent  # some of them in vain
    ours.compare()  # with the state from before the step
    if how == "is late":
        goes_on_in_a_new_group(ours)
    return seconds, str(caught.value)


def goes_on_in_a_new_group(ours: trial.Trial) -> None:
    """All ranks live, but the group's connections are closed for good."""
    begin = time.monotonic()
    with pytest.raises(zeroone.CommunicationError):
        ours.optimizer.step()
    assert time.monotonic() - begin < 1
    saved = copy.deepcopy(ours.optimizer.state_dict())  # before a new one broadcasts parameters
    fresh = zeroone.ZeroOneAdam(
        [{"params": group} for group in ours.parameters],
        process_group=dist.new_group(range(RANKS)),
        **SCHEDULES,
    )
    fresh.load_state_dict(saved)
    ours.optimizer = fresh
    ours.twin.bytes_sent = ours._taken = 0  # statistics start at zero there
    assert ours.step() == "sync"
    ours.run(5)


@pytest.mark.parametrize(
    ("algorithm", "operation", "how", "done", "call", "step"),
    [
        ("0/1 Adam", "all_to_all", "dies", 4, "step", 5),  # in a sync
        ("0/1 Adam", "all_gather", "dies", 4, "step", 5),
        ("0/1 Adam", "all_gather", "dies", 1, "step", 2),  # in a refresh
        ("0/1 Adam", "all_to_all", "dies", 3, "sync", 3),  # in a sync by call
        ("0/1 Adam", "all_to_all", "is terminated", 4, "step", 5),
        ("0/1 Adam", "all_to_all", "is late", 4, "step", 5),
        ("1-bit Adam", "all_gather", "dies", 4, "step", 5),  # in a sync
        ("AdamW", "all_gather", "dies", 4, "step", 5),
    ],
)
def test_one_rank_fails(
    algorithm: str, operation: str, how: str, done: int, call: str, step: int
) -> None:
    ends = launch.run_ranks(
        in_a_round,
        RANKS,
        *(algorithm, operation, how, done, call),
        timeout=PATIENT if how in DEATHS else LATE,
        dies=[DOOMED] if how in DEATHS else [],
        death=DEATHS.get(how, signal.SIGKILL),
    )
    for rank, end in enumerate(ends):
        if rank == DOOMED:
            continue
        seconds, said = end
        assert f"{operation} of " in said
        assert f"failed on rank {rank} of {RANKS}" in said
        assert f"step {step}:" in said
        assert said.count("step ") == 1
        assert seconds < PATIENT / 3 if how in DEATHS else LATE - 1 < seconds < LATE + 3


def at_different_rounds() -> str:
    """Rank 0 comes to a sync, rank 1 to a refresh: messages of another size."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = zeroone.ZeroOneAdam(
        [parameter], variance_schedule=Steps([1, 2, 4]), sync_schedule=EveryStep()
    )
    parameter.grad = torch.ones(1000)
    for _ in range(2):
        optimizer.step()
    before = everything(optimizer)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.0  # on this rank alone: nothing to send
        optimizer.step()
        assert optimizer.stats.rounds == 2
        optimizer.param_groups[0]["lr"] = 1e-3
        before = everything(optimizer)
    with pytest.raises(zeroone.Error) as caught:
        optimizer.step()
    assert everything(optimizer) == before
    return str(caught.value)


def test_ranks_at_different_rounds_are_told_so() -> None:
    """Whoever's fault it is, the process must not be aborted under the program."""
    for said in launch.run_ranks(at_different_rounds, 2, timeout=LATE):
        assert "step" in said


def in_another_order(calls: tuple[str, str]) -> tuple[str, float]:
    """Each rank makes a call of its own, inside an interval: what it was told, and how late."""
    rank = dist.get_rank()
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=2, **SCHEDULES).run(4)
    for *_, parameter in ours.tensors():
        parameter.grad = torch.ones_like(parameter)
    optimizer = ours.optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    before = everything(optimizer)
    begin = time.monotonic()
    call: Callable[[], object] = {
        "consolidated": optimizer.consolidated().__enter__,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
    }.get(calls[rank]) or getattr(optimizer, calls[rank])
    with pytest.raises(zeroone.Error) as caught:
        call()
    assert everything(optimizer) == before
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (("step", "sync"), "rank 0 has a sync at step 5, rank 1 has sync() called at step 4"),
        (("sync", "consolidated"), "sync() called at step 4, rank 1 has consolidated() called"),
        (("step", "check_replicas"), ""),
        (("load_state_dict", "sync"), ""),
    ],
)
def test_calls_in_another_order(calls: tuple[str, str], words: str) -> None:
    for said, seconds in launch.run_ranks(in_another_order, 2, calls, timeout=LATE):
        assert words in said
        assert seconds < LATE + 3


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
