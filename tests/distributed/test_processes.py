"""What shows in a process of its own only: instruction sets, the exit, memory."""

import os
import re
import subprocess
import sys
from typing import Any

import launch
import pytest
import torch
import trial
from every_rank_trajectory import drops_and_zeros
from trial import bits, constant

import zeroone
from zeroone import schedules


def train_for_bytes() -> tuple[str, list[bytes]]:
    ours = trial.zero_one_adam(
        drops_and_zeros,
        variance_schedule=schedules.Doubling(2),
        sync_schedule=schedules.Interval(3),
        scale="l2",
    ).run(25)
    low = trial.zero_one_adam(
        constant(groups=2), dtype=torch.bfloat16, sync_schedule=schedules.Interval(2)
    ).run(25)
    state = [x for t in (ours, low) for s in t.optimizer.state.values() for x in s.values()]
    parameters = [p for t in (ours, low) for *_, p in t.tensors()]
    return zeroone.instruction_set(), list(map(bits, [*state, *parameters]))


def instruction_set() -> str:
    return zeroone.instruction_set()


def test_instruction_sets_give_the_same_bytes() -> None:
    names = zeroone.available_instruction_sets()
    assert "scalar" in names
    assert len(names) > 1, "this machine has no vector instructions"
    ends = {}
    for name in names:
        ((used, ends[name]),) = launch.run_ranks(
            train_for_bytes, 1, init=False, environment={"ZEROONE_INSTRUCTION_SET": name}
        )
        assert used == name
    assert all(end == ends["scalar"] for end in ends.values())
    assert launch.run_ranks(instruction_set, 1, init=False) == [names[0]] != ["scalar"]


def with_unknown_instruction_set() -> str:
    with pytest.raises(ValueError, match="instruction set") as caught:
        zeroone.instruction_set()
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with pytest.raises(ValueError, match="instruction set"):
        zeroone.ZeroOneAdam([parameter]).step()
    assert torch.equal(parameter, torch.ones(3))
    return str(caught.value)


def test_unknown_instruction_set() -> None:
    (said,) = launch.run_ranks(
        with_unknown_instruction_set,
        1,
        init=False,
        environment={"ZEROONE_INSTRUCTION_SET": "altivec"},
    )
    assert "'altivec'" in said
    assert all(name in said for name in zeroone.available_instruction_sets())


# Trains a model of two million parameters and exits, with objects of every kind still alive. One
# page is 4 KiB; the peak says more than the present, as it also shows what was freed again.
PROGRAM = """
import resource, torch, zeroone
from zeroone import schedules

model = torch.nn.Linear(2000, 1000)
optimizer = zeroone.ZeroOneAdam(
    model.parameters(),
    variance_schedule=schedules.Doubling(8),
    sync_schedule=schedules.Interval(4),
)
collective = zeroone.OneBitAllReduce(100_000)
values = torch.randn(100_000)
generator = torch.Generator().manual_seed(0)
for p in model.parameters():
    p.grad = torch.randn(p.shape, generator=generator)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

def train(steps):
    for _ in range(steps):
        optimizer.step()
        optimizer.state_dict()
        collective.reduce_(values)

train(20)
before = peak()
train(200)
print("grown by", peak() - before, "KiB in", optimizer.stats.rounds, "rounds")
try:
    zeroone.ZeroOneAdam(model.parameters(), lr=-1)
except ValueError as error:
    kept = error
"""


def test_memory_stays_and_the_exit_is_clean() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | launch.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # in particular no "nanobind: leaked"
    found: Any = re.search(r"grown by (\d+) KiB in (\d+) rounds", done.stdout)
    assert int(found[2]) > 80
    assert int(found[1]) < 4000, done.stdout  # half the size of one vector
