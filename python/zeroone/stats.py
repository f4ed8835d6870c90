"""What an optimizer has done so far, in numbers, and whether it pays."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

__all__ = ["ResidualNorms", "Stats", "log_stats"]

_logger = logging.getLogger("zeroone")

# Rounds, the first not counted, before anything is said of their speed. Refreshes get rare.
_ENOUGH_REFRESHES = 8
_ENOUGH_SYNCS = 32
# Nobody changes the optimizer for less than a tenth.
_CLEARLY = 1.1
# Steps between checks: intervals often begin at 1 and grow, and an early verdict would be unfair.
_CHECKED_EVERY = 256


@dataclass(frozen=True)
class Stats:
    """A snapshot; all counts start at zero in every process (they are not part of the state).

    Bytes are those this rank handed to the network in rounds, headers and padding included.
    ``str(stats)`` is a summary of one line.
    """

    parameters: int
    """Elements of all parameters."""
    steps: int
    """Steps taken, skipped ones not included."""
    rounds: int
    """Exchanges: refreshes and syncs."""
    refreshes: int
    """Exact (dense) exchanges of the gradient."""
    syncs: int
    """Compressed exchanges."""
    alike_refreshes: int
    """Refreshes in which all ranks sent the same gradient, not zero: ``step`` warns of it."""
    skipped_steps: int
    """Steps in which no rank had a finite gradient: nothing was changed."""
    nonfinite_gradients: int
    """Steps in which this rank's gradient was not finite and counted as zero."""
    bytes_sent: int
    bytes_received: int
    dense_bytes: int
    """What averaging the gradients in fp32 would have sent: 8 n (W - 1) / W per step."""
    mean_bytes_sent: int
    """By ``consolidated()``; no part of ``bytes_sent``, nor a round."""
    setup_bytes_sent: int
    """Parameters that this rank broadcast at construction."""
    bits_per_parameter_step: float
    """32 bytes_sent / dense_bytes: 32 for dense fp32 averaging, about 1 for a one-bit round."""
    local_seconds: float
    """Local steps."""
    encode_seconds: float
    exchange_seconds: float
    """In collectives, waiting for other ranks and the server's part of the work included."""
    commit_seconds: float
    refresh_seconds: float
    """Of all these, in refreshes but the first, which also connects and touches new memory."""
    sync_seconds: float
    """The same of syncs."""
    elapsed_seconds: float
    """From the begin of the first step to the end of the last, all that the program did in between
    included."""

    @property
    def less_than_fp32(self) -> float:
        """How many times less was sent than averaging the gradients in fp32 would have; nan where
        nothing was sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else math.nan

    @property
    def less_than_fp16(self) -> float:
        """The same for averaging in fp16 or bf16, which sends half of it."""
        return self.less_than_fp32 / 2

    @property
    def dense_step_seconds(self) -> float:
        """Mean time of a refresh: what a step with dense averaging, in the type of ``dense_wire``,
        takes on this link, without forward and backward pass. nan on one rank, and before 9
        refreshes.

        A dense step that sends while the backward pass still runs hides some of it.
        """
        if not self.dense_bytes or self.refreshes <= _ENOUGH_REFRESHES:
            return math.nan
        return self.refresh_seconds / (self.refreshes - 1)

    @property
    def step_seconds(self) -> float:
        """Mean time of this optimizer's steps so far, comparable to :attr:`dense_step_seconds`:
        (refreshes x mean refresh + syncs x mean sync + local_seconds) / steps. nan where that is
        nan, and before 33 syncs."""
        if self.syncs <= _ENOUGH_SYNCS:
            return math.nan
        refreshes = self.refreshes * self.dense_step_seconds
        syncs = self.syncs * self.sync_seconds / (self.syncs - 1)
        return (refreshes + syncs + self.local_seconds) / self.steps

    @property
    def dense_is_faster(self) -> bool:
        """Whether dense averaging would clearly have been faster so far: 1.1 times
        :attr:`dense_step_seconds` is less than :attr:`step_seconds`. False while either is
        unknown."""
        return _CLEARLY * self.dense_step_seconds < self.step_seconds

    def __str__(self) -> str:
        if not self.steps:
            return "no step yet"
        text = f"{self.steps} steps, "
        if not self.dense_bytes:
            text += "nothing sent: one rank"
        else:
            text += (
                f"{self.rounds} rounds, {_bytes(self.bytes_sent)} sent: "
                f"{_times(self.less_than_fp32)} fp32, {_times(self.less_than_fp16)} fp16 averaging"
            )
        text += f"; {_seconds(self.elapsed_seconds / (self.steps + self.skipped_steps))} per step"
        if self.dense_bytes:
            text += f", {self.exchange_seconds / self.elapsed_seconds:.0%} of it in exchanges"
        return text


@dataclass(frozen=True)
class ResidualNorms:
    """l2 norms of what this rank still owes to the others; 0 where an algorithm has no residual."""

    worker_error: float
    """Of what the code lost of this rank's vectors."""
    server_error: float
    """Of what it lost of the chunk that this rank averages."""


class ScalarWriter(Protocol):
    """What :func:`log_stats` writes to, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Takes one number."""


class _Reporting(Protocol):
    @property
    def stats(self) -> Stats: ...
    def residual_norms(self) -> ResidualNorms: ...


def log_stats(writer: ScalarWriter, optimizer: _Reporting, step: int) -> None:
    """Writes all statistics of ``optimizer`` as scalars ``zeroone/...`` of step ``step``.

    They are the fields of :class:`Stats`, its ``less_than_fp32``, ``dense_step_seconds`` and
    ``step_seconds``, and the :class:`ResidualNorms` as ``worker_error_norm`` and
    ``server_error_norm``; what is not known yet is left out. The norms read all residuals (4 bytes
    per parameter and more): write every hundred steps rather than every step.
    """
    stats, norms = optimizer.stats, optimizer.residual_norms()
    scalars = asdict(stats) | {
        "less_than_fp32": stats.less_than_fp32,
        "dense_step_seconds": stats.dense_step_seconds,
        "step_seconds": stats.step_seconds,
        "worker_error_norm": norms.worker_error,
        "server_error_norm": norms.server_error,
    }
    for name, value in scalars.items():
        if not math.isnan(value):
            writer.add_scalar(f"zeroone/{name}", value, step)


class Watch:
    """Measures the time from the first step on, and warns once where dense would be faster."""

    def __init__(self) -> None:
        self.elapsed_seconds = 0.0
        self._begin: float | None = None
        self._steps = 0
        self._warned = False

    def step_begins(self) -> None:
        if self._begin is None:
            self._begin = time.perf_counter()

    def step_ended(self, stats: Callable[[], Stats]) -> None:
        assert self._begin is not None
        self.elapsed_seconds = time.perf_counter() - self._begin
        self._steps += 1
        if self._warned or self._steps % _CHECKED_EVERY:
            return
        now = stats()
        if now.dense_is_faster:
            self._warned = True
            _logger.warning(
                "dense averaging would be faster on this link: so far a step of this optimizer "
                "takes %s in the mean, and a refresh, which is what a dense step does, %s (forward "
                "and backward pass not included)",
                _seconds(now.step_seconds),
                _seconds(now.dense_step_seconds),
            )


def _times(ratio: float) -> str:
    """A ratio in words: what was sent less than ..."""
    if f"{ratio:.1f}" == "1.0":
        return "as much as"
    return f"{ratio:.1f} times less than" if ratio > 1 else f"{1 / ratio:.1f} times more than"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"
