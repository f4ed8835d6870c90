"""On another number of ranks: the mean residual is kept, and the run is that of the plain twin."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import plain_twin
import torch
import trial
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plain_twin import Options, Twin, Vector
from threads import World

import zeroone
from zeroone.schedules import Doubling, EveryStep, Interval, LearningRateTied

numel = st.integers(0, 40) | st.sampled_from([2049, 5000])
shapes = st.lists(st.lists(numel, min_size=1, max_size=3), min_size=1, max_size=2)
variances = st.one_of(st.builds(Doubling, st.integers(1, 3)), st.just(EveryStep(2)))
syncs = st.one_of(st.builds(Interval, st.integers(1, 5)), st.just(LearningRateTied(4)))


def mean(vectors: list[Vector]) -> Vector:
    total = np.zeros(vectors[0].shape)
    for vector in vectors:
        total = total + vector
    return (total / len(vectors)).astype(np.float32)


def redistributed(old: Twin, world: int, options: list[Options]) -> Twin:
    """The twin of `world` ranks that goes on from `old`."""
    new = copy.deepcopy(old)
    new.world, new.bytes_sent, new.kinds = world, 0, []
    if world == old.world:
        return new
    for slab, o in zip(new.slabs, options, strict=True):
        slab.layout = plain_twin.Layout(slab.layout.sizes, world)
        slab.m, slab.u, slab.worker_error = (
            [mean(vectors)] * world for vectors in (slab.m, slab.u, slab.worker_error)
        )
        x = np.float32(slab.p) * slab.a - new._quotient(slab, slab.u[0], 1.0, o)
        slab.x = [x if slab.pending else slab.a.copy()] * world
    return new


def residual(twin: Twin) -> list[Vector]:
    """E of every group, in float64."""
    return [
        np.mean([e.astype(float) for e in slab.worker_error], 0) + slab.server_error
        for slab in twin.slabs
    ]


@settings(
    derandomize=True,
    max_examples=25,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
@given(
    sizes=shapes,
    of=st.integers(1, 5),
    on=st.sampled_from([1, 2, 3, 5, 8]),
    stop=st.integers(0, 12),
    variance=variances,
    sync=syncs,
    decay=st.sampled_from([1.0, 0.8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_merged_state_goes_on_as_the_twin(
    sizes: list[list[int]],
    of: int,
    on: int,
    stop: int,
    variance: Any,
    sync: Any,
    decay: float,
    dtype: torch.dtype,
) -> None:
    def plan(t: int) -> list[Options]:
        return [Options(lr=1e-3 * decay**t, weight_decay=0.1 * g) for g in range(len(sizes))]

    def start(rank: int, communicator: Any, world: int) -> trial.Trial:
        def make(groups: Any, **arguments: Any) -> Any:
            optimizer = zeroone.ZeroOneAdam(groups, **arguments)
            if world > 1:
                optimizer._to_attach = communicator
            return optimizer

        return trial.Trial(
            make,
            plain_twin.zero_one_adam(variance, sync),
            plan,
            [[(n,) for n in group] for group in sizes],
            rank=rank,
            world=world,
            dtype=dtype,
            variance_schedule=variance,
            sync_schedule=sync,
        )

    def saves(rank: int, communicator: Any) -> tuple[Any, Twin]:
        ours = start(rank, communicator, of).run(stop)
        return copy.deepcopy(ours.optimizer.state_dict()), ours.twin

    saved = World(of).run(saves)
    merged = zeroone.checkpoint.merge([state for state, _ in saved])
    old = saved[0][1]

    def goes_on(rank: int, communicator: Any) -> Twin:
        ours = start(rank, communicator, on)
        ours.optimizer.load_state_dict(merged)
        ours.twin = redistributed(old, on, plan(stop))
        ours.t = stop
        at_first = copy.deepcopy(ours.twin)
        ours.compare()
        ours.run(6)
        ours.sync()
        return at_first

    for new in World(on).run(goes_on):
        for was, is_now, slab in zip(residual(old), residual(new), old.slabs, strict=True):
            rounded = np.linalg.norm(np.mean([e.astype(float) for e in slab.worker_error], 0))
            assert np.linalg.norm(was - is_now) <= 2**-24 * rounded
