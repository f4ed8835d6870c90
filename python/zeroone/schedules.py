"""When something is exchanged. Steps count from 1, once per ``optimizer.step()``.

A schedule is an immutable description; where it stands is part of the optimizer's state. Every
class serves both as ``variance_schedule`` (refreshes of the second moment, dense) and as
``sync_schedule`` (averages of one bit per parameter). An invalid value raises ``ValueError`` when
the schedule is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from zeroone import _core

__all__ = ["Doubling", "EveryStep", "Interval", "LearningRateTied", "Schedule", "Steps"]


class Schedule(Protocol):
    """What the optimizers accept as a schedule."""

    def native(self) -> _core.Schedule:
        """The schedule as the engine knows it."""


class _Checked:
    """Builds the native schedule once at construction: it validates."""

    def __post_init__(self) -> None:
        self.native()

    def native(self) -> _core.Schedule:
        raise NotImplementedError


@dataclass(frozen=True)
class EveryStep(_Checked):
    """Every step; with ``until``, up to and including that one.

    As a variance schedule it has points after ``until``, too, a power of two and about t / 16 steps
    apart. They serve rows and modules whose first gradient comes late, and cost nothing where there
    are none.
    """

    until: int | None = None

    def native(self) -> _core.Schedule:
        return _core.every_step(self.until)


@dataclass(frozen=True)
class Interval(_Checked):
    """At step 1, and then ``interval`` steps after the last time."""

    interval: int

    def native(self) -> _core.Schedule:
        return _core.interval(self.interval)


@dataclass(frozen=True)
class Doubling(_Checked):
    """Gaps of ``2 ** (j // kappa)`` steps after event j = 0, 1, ...; none after step ``until``.

    About ``kappa * log2(T / kappa + 1)`` events in T steps (arXiv 2202.06009, section 5). As a
    variance schedule its points go on after ``until`` for rows and modules whose first gradient
    comes late, and cost nothing where there are none.
    """

    kappa: int = 16
    until: int | None = None

    def native(self) -> _core.Schedule:
        return _core.doubling(self.kappa, self.until)


@dataclass(frozen=True)
class LearningRateTied(_Checked):
    """Gaps of ``min(max_interval, 2 ** floor(log2(peak / lr)))``: they grow as the rate falls.

    Where the learning rate has risen since the last time the gap is 1, so a warm-up synchronises
    every step, and a constant learning rate does so for ever. The gap never exceeds
    ``max_interval``. Of several parameter groups the one with the largest lr / peak decides.
    """

    max_interval: int = 16

    def native(self) -> _core.Schedule:
        return _core.learning_rate_tied(self.max_interval)


@dataclass(frozen=True)
class Steps(_Checked):
    """At these steps, which must be positive and increasing.

    The first step of all is a refresh whatever the variance schedule says.
    """

    steps: Sequence[int]

    def native(self) -> _core.Schedule:
        return _core.steps(list(self.steps))
