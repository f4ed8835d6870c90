"""Random models, types, schedules, mishaps and stops: every byte is the plain twin's."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import trial
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plain_twin import Options
from threads import World

import zeroone
from zeroone.schedules import Doubling, EveryStep, Interval, LearningRateTied, Steps

dimension = st.integers(0, 9) | st.sampled_from([64, 65])
shape = st.lists(dimension, max_size=3).map(tuple) | st.just((2100,))
groups = st.lists(st.lists(shape, min_size=1, max_size=4), min_size=1, max_size=3)
dtypes = st.lists(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=1, max_size=3
).map(tuple)
wires = st.sampled_from(["fp32", "bf16", "fp16"])
steps = st.lists(st.integers(1, 24), unique=True).map(lambda x: Steps(sorted(x)))
until = st.none() | st.integers(1, 12)
variances = st.one_of(
    st.builds(Doubling, st.integers(1, 4), until),
    st.builds(EveryStep, st.integers(1, 6)),
    st.builds(Interval, st.integers(1, 6)),
    steps,
)
syncs = st.one_of(
    st.builds(Interval, st.integers(1, 6)),
    st.builds(LearningRateTied, st.integers(1, 5)),
    st.just(EveryStep()),
    steps,
)
scales = st.sampled_from(["l1", "l2"])
algorithms = st.one_of(
    st.fixed_dictionaries(
        {"variance_schedule": variances, "sync_schedule": syncs, "scale": scales}
    ).map(lambda arguments: (trial.zero_one_adam, arguments)),
    st.fixed_dictionaries({"warmup_steps": st.integers(1, 6), "scale": scales}).map(
        lambda arguments: (trial.one_bit_adam, arguments)
    ),
    st.just((trial.adamw, {})),
)


@dataclass(frozen=True)
class Event:
    """What happens at one step, beside it."""

    lr: float = 1e-3
    not_finite: tuple[int, ...] = ()  # ranks, modulo the number of ranks
    frozen: tuple[int, ...] = ()  # tensors, modulo the number of tensors
    max_norm: float | None = None
    sync: bool = False  # by call, after the step
    stop: str = ""  # after it


few = st.lists(st.integers(0, 9), max_size=2).map(tuple)
events = st.lists(
    st.builds(
        Event,
        st.sampled_from([1e-3, 1e-3, 5e-4, 1e-5, 0.0]),
        st.just(()) | few,
        st.just(()) | few,
        st.sampled_from([None, None, None, 1.0, 1e-2]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from(["", "", "", "state", "copy"]),
    ),
    min_size=1,
    max_size=24,
)


@settings(
    derandomize=True,
    max_examples=120,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
@given(
    shapes=groups,
    dtype=dtypes,
    wire=wires,
    algorithm=algorithms,
    bias_correction=st.booleans(),
    ranks=st.integers(1, 4),
    script=events,
    seed=st.integers(0, 99),
)
def test_every_byte_is_the_twins(
    shapes: list[list[tuple[int, ...]]],
    dtype: tuple[torch.dtype, ...],
    wire: str,
    algorithm: tuple[Any, dict[str, Any]],
    bias_correction: bool,
    ranks: int,
    script: list[Event],
    seed: int,
) -> None:
    make, arguments = algorithm

    def plan(t: int) -> list[Options]:
        """Settings of the event; odd groups have others."""
        lr = script[max(0, min(t, len(script)) - 1)].lr
        return [
            Options(lr * (1 + g), (0.8 if g % 2 else 0.9, 0.99), 1e-6, 0.1 * g, g % 2 == 1)
            for g in range(len(shapes))
        ]

    tensors = [(g, i) for g, group in enumerate(shapes) for i in range(len(group))]

    def target(rank: int, communicator: Any) -> None:
        def attached(optimizer: Any) -> Any:
            if ranks > 1:
                optimizer._to_attach = communicator
            return optimizer

        def on_these_ranks(algorithm: Any) -> Any:
            return lambda *a, **k: attached(algorithm(*a, **k))

        ours = make(
            plan,
            shapes,
            rank=rank,
            world=ranks,
            dtype=dtype,
            seed=seed,
            dense_wire=wire,
            bias_correction=bias_correction,
            wrap=on_these_ranks,
            **arguments,
        )
        for event in script:
            ours.step(
                not_finite=sorted({r % ranks for r in event.not_finite}),
                frozen=sorted({tensors[i % len(tensors)] for i in event.frozen}),
                max_norm=event.max_norm,
            )
            if event.sync:
                ours.sync()
            if event.stop == "copy":
                ours.go_on_in_a_copy()
            elif event.stop == "state":
                saved = copy.deepcopy(ours.optimizer.state_dict())
                ours.optimizer.load_state_dict(saved)
        ours.compare()

    World(ranks).run(target)


def test_the_surface_of_the_library_is_what_it_tests() -> None:
    """A new algorithm does not go untested."""
    assert {zeroone.ZeroOneAdam, zeroone.OneBitAdam, zeroone.AdamW} == {
        value
        for value in vars(zeroone).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
