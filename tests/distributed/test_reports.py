"""Statistics, the warning, profiler ranges and TensorBoard, on real ranks."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

import zeroone
from zeroone.schedules import EveryStep, Interval

Optimizer = zeroone.ZeroOneAdam | zeroone.OneBitAdam | zeroone.AdamW


def trained(optimizer: Optimizer, steps: int) -> Optimizer:
    """Steps with noise as gradients, unlike on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def zero_one_adam(*shapes: tuple[int, ...], refreshes: int, interval: int) -> zeroone.ZeroOneAdam:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(shape))]} for shape in shapes]
    return zeroone.ZeroOneAdam(
        groups, variance_schedule=EveryStep(refreshes), sync_schedule=Interval(interval)
    )


def norms() -> None:
    optimizer = zero_one_adam((300, 300), (), (7,), refreshes=2, interval=3)
    assert optimizer.residual_norms() == zeroone.ResidualNorms(0.0, 0.0)
    trained(optimizer, 9)
    found = optimizer.residual_norms()
    state = optimizer.state_dict()
    rank = dist.get_rank()
    workers = [values[f"worker_error.rank{rank}"] for values in state["state"].values()]
    servers = [group["zeroone"][f"server_error.rank{rank}"] for group in state["param_groups"]]
    for norm, vectors in ((found.worker_error, workers), (found.server_error, servers)):
        whole = torch.cat([vector.flatten() for vector in vectors]).double()
        assert norm > 0
        assert norm == pytest.approx(whole.square().sum().sqrt().item(), rel=1e-12)
    exact = zeroone.AdamW([torch.nn.Parameter(torch.zeros(9))])
    assert trained(exact, 2).residual_norms() == zeroone.ResidualNorms(0.0, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_residual_norms(ranks: int) -> None:
    run_ranks(norms, ranks)


def seconds() -> None:
    """The first round of a kind is not counted; parts add up to less than the whole."""
    optimizer = zero_one_adam((1000,), refreshes=2, interval=3)
    assert str(optimizer.stats) == "no step yet"
    seen = [trained(optimizer, 1).stats for _ in range(9)]
    assert [stats.refreshes for stats in seen] == [1, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [stats.syncs for stats in seen] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert seen[0].refresh_seconds == 0 < seen[1].refresh_seconds == seen[-1].refresh_seconds
    assert seen[6].sync_seconds == 0 < seen[7].sync_seconds == seen[8].sync_seconds
    optimizer.sync()
    last = optimizer.stats
    assert last.syncs == 3
    assert last.sync_seconds > seen[8].sync_seconds
    elapsed = [stats.elapsed_seconds for stats in seen]
    assert elapsed == sorted(set(elapsed))
    stats = seen[-1]
    parts = stats.local_seconds + stats.refresh_seconds + stats.sync_seconds
    assert 0 < parts < stats.elapsed_seconds
    assert str(stats).startswith("9 steps, 4 rounds, ")


def test_seconds() -> None:
    run_ranks(seconds, 2)


def warnings(factor: float) -> list[str]:
    """What is logged if a refresh takes 1 s and a sync, and a local step, `factor` s."""
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.WARNING
            messages.append(record.getMessage())

    logging.getLogger("zeroone").addHandler(Kept())
    measured = zeroone.ZeroOneAdam.stats.fget
    assert measured is not None

    def made_up(self: zeroone.ZeroOneAdam) -> zeroone.Stats:
        stats = measured(self)
        return replace(
            stats,
            refresh_seconds=1.0 * max(0, stats.refreshes - 1),
            sync_seconds=factor * max(0, stats.syncs - 1),
            local_seconds=factor * (stats.steps - stats.refreshes - stats.syncs),
        )

    zeroone.ZeroOneAdam.stats = property(made_up)  # type: ignore[method-assign,assignment]
    optimizer = zero_one_adam((50,), refreshes=9, interval=2)
    trained(optimizer, 255)
    assert messages == []  # not yet
    trained(optimizer, 300)
    assert optimizer.stats.dense_is_faster == (factor > 1)
    return messages


def test_warning_where_dense_would_be_faster() -> None:
    for messages in run_ranks(warnings, 2, 3.0):
        assert len(messages) == 1
        assert "dense averaging would be faster" in messages[0]
        # at step 256: 9 refreshes of 1 s, 247 other steps of 3 s
        assert "takes 2.93 s in the mean" in messages[0]
        assert "does, 1.00 s" in messages[0]
    assert run_ranks(warnings, 2, 0.5) == [[], []]


def profiled() -> None:
    optimizer = zero_one_adam((50,), refreshes=2, interval=3)
    trained(optimizer, 1)  # without a profiler
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trained(optimizer, 5)  # a refresh, two local steps, a sync, a local step
        optimizer.sync()
    events = [event for event in profiler.events() if event.name.startswith("zeroone.")]
    found = Counter(event.name for event in events)
    collectives = {name: found.pop(name) for name in list(found) if name.count(".") == 1}
    assert found == {
        "zeroone.step.refresh": 1,
        "zeroone.step.local": 3,
        "zeroone.step.sync": 1,
    }
    assert collectives.pop("zeroone.sync") == 1
    assert set(collectives) == {"zeroone.all_to_all", "zeroone.all_gather"}
    within = Counter(
        phase.name
        for phase in events
        for event in events
        if event.name in collectives
        and phase.time_range.start <= event.time_range.start
        and event.time_range.end <= phase.time_range.end
        and phase.name not in collectives
    )
    assert set(within) == {"zeroone.step.refresh", "zeroone.step.sync", "zeroone.sync"}
    assert sum(within.values()) == sum(collectives.values())  # every collective in one phase


def test_profiler_shows_phases() -> None:
    run_ranks(profiled, 2)


def written(folder: Path) -> None:
    assert not any("tensorboard" in name for name in sys.modules)  # nothing of ours imports it
    rank = dist.get_rank()
    optimizer = trained(zero_one_adam((50,), refreshes=2, interval=2), 4)
    early: list[str] = []

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            assert step == 4
            assert math.isfinite(value)
            early.append(tag)

    zeroone.log_stats(Writer(), optimizer, 4)
    assert {f"zeroone/{field.name}" for field in fields(zeroone.Stats)} < set(early)
    assert "zeroone/step_seconds" not in early  # not known yet

    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / str(rank)) as writer:
        zeroone.log_stats(writer, optimizer, 100)
        trained(optimizer, 30)
        zeroone.log_stats(writer, optimizer, 200)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / str(rank)))
    events.Reload()
    assert set(early) <= set(events.Tags()["scalars"])

    def values(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(f"zeroone/{name}")]

    assert values("steps") == [(100, 4), (200, 34)]
    assert values("bytes_sent")[1] == (200, optimizer.stats.bytes_sent)
    ratio, norm = optimizer.stats.less_than_fp32, optimizer.residual_norms().worker_error
    assert values("less_than_fp32")[1] == (200, pytest.approx(ratio))
    assert values("worker_error_norm")[1] == (200, pytest.approx(norm))
    assert len(values("server_error_norm")) == 2


def test_tensorboard(tmp_path: Path) -> None:
    run_ranks(written, 2, tmp_path)
