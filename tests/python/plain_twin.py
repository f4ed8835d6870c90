"""0/1 Adam, 1-bit Adam and AdamW once more, in numpy, all ranks in one object, to be read.

Written from the specification (2202.06009 as the project fixes it) and docs/arithmetic.md. Every
numpy operation on float32 arrays rounds once, so the library must give the same bytes. Of the
library only the schedules' fields are used: they are the description of a problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeroone import schedules

f32 = np.float32
Vector = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
# Of one rank: [group][tensor]; None is a gradient that does not exist.
Gradients = Sequence[Sequence[Vector | None]]

NEVER = 2**63 - 1
PIECE = 2048
HEADER = 40


@dataclass
class Options:
    """A parameter group's settings in one step."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    maximize: bool = False


@dataclass
class Recipe:
    variance_schedule: schedules.Schedule
    sync_schedule: schedules.Schedule
    scale: str = "l1"
    bias_correction: bool = True
    sums_momentum: bool = False  # 1-bit Adam: u sums m, lr' comes after the average
    compressed: bool = True  # False: nothing is ever averaged by one bit, and v is never held
    dense_wire: str = "fp32"


def zero_one_adam(
    variance_schedule: schedules.Schedule | None = None,
    sync_schedule: schedules.Schedule | None = None,
    scale: str = "l1",
    bias_correction: bool = True,
    dense_wire: str = "fp32",
) -> Recipe:
    return Recipe(
        variance_schedule or schedules.Doubling(kappa=16),
        sync_schedule or schedules.LearningRateTied(max_interval=16),
        scale,
        bias_correction,
        dense_wire=dense_wire,
    )


def one_bit_adam(
    warmup_steps: int, scale: str = "l1", bias_correction: bool = True, dense_wire: str = "fp32"
) -> Recipe:
    warmup = schedules.EveryStep(until=warmup_steps)
    every = schedules.EveryStep()
    return Recipe(warmup, every, scale, bias_correction, sums_momentum=True, dense_wire=dense_wire)


def adamw(bias_correction: bool = True, dense_wire: str = "fp32") -> Recipe:
    every = schedules.EveryStep()
    return Recipe(every, every, "l1", bias_correction, compressed=False, dense_wire=dense_wire)


@dataclass
class Position:
    """Where a schedule stands."""

    schedule: Any
    next: int = 1
    index: int = 0
    peak: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.schedule, schedules.Steps):
            self.next = min(self.schedule.steps, default=NEVER)

    @property
    def until(self) -> int:
        until: int | None = getattr(self.schedule, "until", None)
        return NEVER if until is None else until

    def reached(self, t: int) -> bool:
        return t >= self.next

    def due(self, t: int) -> bool:
        return self.reached(t) and t <= self.until

    def observe(self, lr: list[float]) -> None:
        self.peak += [0.0] * (len(lr) - len(self.peak))
        self.peak = [max(pair) for pair in zip(self.peak, lr, strict=True)]

    def advance(self, t: int, lr: list[float]) -> None:
        schedule = self.schedule
        if isinstance(schedule, schedules.EveryStep):
            # After `until` a point every t / 16 steps, in powers of two.
            self.next = t + (1 if t < self.until else 2 ** int(math.log2(max(1, t // 16))))
        elif isinstance(schedule, schedules.Interval):
            self.next = t + schedule.interval
        elif isinstance(schedule, schedules.Doubling):
            self.next = t + 2 ** (self.index // schedule.kappa)
        elif isinstance(schedule, schedules.Steps):
            self.next = min((step for step in schedule.steps if step > t), default=NEVER)
        else:
            self.next = t + self._tied_gap(schedule.max_interval, lr)
        self.index += 1
        self.last = list(lr)

    def _tied_gap(self, longest: int, lr: list[float]) -> int:
        if any(now > before for now, before in zip(lr, self.last, strict=False)):
            return 1
        moved = [(now, peak) for now, peak in zip(lr, self.peak, strict=True) if peak > 0]
        if not moved:
            return 1
        falls = [peak / now for now, peak in moved if now > 0]
        if not falls:
            return longest
        exponent = math.frexp(min(falls))[1] - 1  # floor(log2), exactly
        return min(longest, 2 ** min(exponent, 60))


@dataclass(frozen=True)
class Block:
    """The part of one tensor that lies in one chunk."""

    chunk: int  # where the chunk begins
    begin: int
    end: int

    def pieces(self) -> list[slice]:
        """Cut at the multiples of PIECE counted from the start of the chunk."""
        first = self.chunk + (self.begin - self.chunk) // PIECE * PIECE + PIECE
        cuts = [self.begin, *range(first, self.end, PIECE), self.end]
        return [slice(*pair) for pair in pairwise(cuts)]


class Layout:
    """How a vector of these tensors is cut into chunks and blocks."""

    def __init__(self, sizes: Sequence[int], world: int) -> None:
        self.sizes = list(sizes)
        self.n = sum(sizes)
        self.chunk = 8 * -(-self.n // (8 * world))  # L
        ends = np.cumsum([0, *sizes]).tolist()
        self.tensors = [slice(*pair) for pair in pairwise(ends)]
        self.chunks: list[slice] = []
        self.blocks: list[Block] = []
        self.most_blocks = 0
        for rank in range(world):
            begin, end = (min(self.n, j * self.chunk) for j in (rank, rank + 1))
            self.chunks.append(slice(begin, end))
            blocks = [
                Block(begin, max(t.start, begin), min(t.stop, end))
                for t in self.tensors
                if max(t.start, begin) < min(t.stop, end)
            ]
            self.most_blocks = max(self.most_blocks, len(blocks))
            self.blocks += blocks

    @property
    def one_bit_section(self) -> int:
        return 4 * self.most_blocks + self.chunk // 8


def piece_sum(terms: Vector) -> np.float32:
    """16 lanes, halved."""
    padded = np.zeros(-(-terms.size // 16) * 16, f32)
    padded[: terms.size] = terms
    lanes = np.zeros(16, f32)
    for row in padded.reshape(-1, 16):
        lanes = lanes + row
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return lanes[0]


def decoded(layout: Layout, born: Flags, kind: str, b: Vector) -> Vector:
    """The sign code there and back: +scale or -scale per block, 0 where not born."""
    terms = np.abs(b) if kind == "l1" else b * b
    result = np.zeros_like(b)
    for block in layout.blocks:
        here = slice(block.begin, block.end)
        count = int(born[here].sum())
        if count == 0:
            continue
        mean = sum((float(piece_sum(terms[piece])) for piece in block.pieces()), 0.0) / count
        scale = f32(mean if kind == "l1" else math.sqrt(mean))
        result[here] = np.where(born[here], np.where(b[here] < 0, -scale, scale), f32(0))
    return result


def one_bit_mean(
    layout: Layout,
    born: Flags,
    kind: str,
    rho: np.float32,
    z: Sequence[Vector],
    worker_error: list[Vector],
    server_error: Vector,
) -> tuple[Vector, list[Vector], Vector]:
    """The mean of z over the ranks through the sign code, and the new residuals.

    ``server_error`` is of all chunks: rank j holds that of chunk j.
    """
    zero = f32(0)
    new_errors = []
    total: Vector | None = None
    for own, error in zip(z, worker_error, strict=True):
        b = np.where(born, own + rho * error, zero)
        sent = decoded(layout, born, kind, b)
        new_errors.append(b - sent)
        total = sent if total is None else total + sent
    assert total is not None
    c = np.where(born, total / f32(len(z)) + rho * server_error, zero)
    result = decoded(layout, born, kind, c)
    return result, new_errors, c - result


@dataclass
class Slab:
    """One parameter group. What is equal on all ranks is there once."""

    layout: Layout
    a: Vector
    v: Vector
    server_error: Vector
    m: list[Vector]  # from here on [rank]
    u: list[Vector]
    worker_error: list[Vector]
    x: list[Vector]
    t: int = 0
    k: int = 0
    pending: int = 0
    s: float = 0.0  # S
    s_prev: float = 0.0
    p: float = 1.0  # P
    frozen_tensors: list[int] = field(default_factory=list)

    @property
    def frozen(self) -> Flags:
        flags = np.zeros(self.a.size, bool)
        for index in self.frozen_tensors:
            flags[self.layout.tensors[index]] = True
        return flags

    def floor(self) -> Vector:
        """For each coordinate the mean of v over its tensor's born ones; 0 where there are none."""
        result = np.zeros_like(self.v)
        for tensor in self.layout.tensors:
            blocks = [b for b in self.layout.blocks if tensor.start <= b.begin < tensor.stop]
            pieces = [piece for block in blocks for piece in block.pieces()]
            total = sum((float(piece_sum(self.v[piece])) for piece in pieces), 0.0)
            born = int((self.v[tensor] > 0).sum())
            mean = f32(total / born) if born else f32(0)
            result[tensor] = mean if np.isfinite(mean) else f32(0)
        return result


class Twin:
    """All ranks. ``groups[g][i]`` are the values that tensor i of group g starts from."""

    def __init__(self, recipe: Recipe, groups: Sequence[Sequence[Vector]], world: int) -> None:
        self.recipe = recipe
        self.world = world
        self.t = 0
        self.last_sync = 0
        self.refresh_position = Position(recipe.variance_schedule)
        self.sync_position = Position(recipe.sync_schedule)
        self.slabs: list[Slab] = []
        self.kinds: list[str] = []
        self.bytes_sent = 0
        self.births_due = False
        for group in groups:
            self.add_group(group)

    def add_group(self, tensors: Sequence[Vector]) -> None:
        a = np.concatenate([np.zeros(0, f32), *(tensor.reshape(-1) for tensor in tensors)])
        zero = np.zeros_like(a)

        def per_rank(value: Vector) -> list[Vector]:
            return [value.copy() for _ in range(self.world)]

        self.slabs.append(
            Slab(
                Layout([tensor.size for tensor in tensors], self.world),
                a,
                zero.copy(),
                zero.copy(),
                per_rank(zero),
                per_rank(zero),
                per_rank(zero),
                per_rank(a),
            )
        )

    @property
    def pending(self) -> bool:
        return any(slab.pending > 0 for slab in self.slabs)

    def tensor(self, rank: int, group: int, index: int) -> Vector:
        """x of one tensor, flat, in fp32."""
        slab = self.slabs[group]
        return slab.x[rank][slab.layout.tensors[index]]

    @np.errstate(all="ignore")
    def step(
        self,
        gradients: Sequence[Gradients],
        options: Sequence[Options],
        frozen: Sequence[tuple[int, int]] = (),
        max_norm: float = math.inf,
    ) -> str:
        """``gradients[rank]``; returns what the step was: refresh, sync, local or skipped.

        ``frozen`` are (group, tensor).
        """
        lr = [o.lr for o in options]
        t = self.t + 1
        point = (t == 1 or self.refresh_position.reached(t)) and not self.pending
        held = t > 1 and t > self.refresh_position.until
        refresh = point and (not held or self.births_due)
        moves = self.pending or any(rate != 0 for rate in lr)
        sync = not refresh and moves and self.sync_position.due(t)

        flat = [
            [self._flat(*group) for group in zip(self.slabs, groups, options, strict=True)]
            for groups in gradients
        ]
        inside, before = self.pending, [slab.frozen_tensors for slab in self.slabs]
        if not inside and (refresh or sync):
            self._freeze(frozen)
        for groups in flat:
            for slab, g in zip(self.slabs, groups, strict=True):
                g[slab.frozen] = 0
        finite = [all(np.isfinite(g).all() for g in groups) for groups in flat]
        if not any(finite) and (refresh or sync or self.world == 1):
            for slab, tensors in zip(self.slabs, before, strict=True):
                slab.frozen_tensors = tensors
            self.count_headers()
            self.kinds.append("skipped")
            return "skipped"
        for groups, good in zip(flat, finite, strict=True):
            if not good:
                groups[:] = [np.zeros_like(g) for g in groups]

        if not refresh:
            flat = [self._clipped(groups, max_norm) for groups in flat]

        self.t = t
        for position in (self.refresh_position, self.sync_position):
            position.observe(lr)
        if refresh:
            offered = [
                [self._offer(slab, r, g) for slab, g in zip(self.slabs, groups, strict=True)]
                for r, groups in enumerate(flat)
            ]
            means = self._clipped(
                [self._dense_mean(list(z)) for z in zip(*offered, strict=True)],
                max_norm,
                mean=True,
            )
        for index, (slab, o) in enumerate(zip(self.slabs, options, strict=True)):
            slab.t += 1
            own = [groups[index] for groups in flat]
            if refresh:
                self._refresh(slab, means[index], [groups[index] for groups in offered], o, held)
            elif o.lr != 0:
                self._local(slab, own, o)
        if sync:
            self._sync_all(options)
        if sync and inside:
            self._freeze(frozen)
        kind = "refresh" if refresh else "sync" if sync else "local"
        if refresh:
            self.births_due = False
        if point:
            self.refresh_position.advance(t, lr)
        if refresh or sync:
            self.count(refresh)
            self._synchronised(lr)
        self.kinds.append(kind)
        return kind

    @np.errstate(all="ignore")
    def sync(self, options: Sequence[Options], frozen: Sequence[tuple[int, int]] = ()) -> bool:
        """A sync by call; False if nothing was pending."""
        if not self.pending:
            return False
        for position in (self.refresh_position, self.sync_position):
            position.observe([o.lr for o in options])
        self._sync_all(options)
        self._freeze(frozen)
        self.count(dense=False)
        self._synchronised([o.lr for o in options])
        return True

    def _freeze(self, frozen: Sequence[tuple[int, int]]) -> None:
        for g, slab in enumerate(self.slabs):
            slab.frozen_tensors = sorted(i for group, i in frozen if group == g)

    def adopt(self, group: int, index: int, values: Sequence[Vector]) -> None:
        """The caller wrote ``values[rank]`` (equal, if nothing is pending) to one tensor."""
        slab = self.slabs[group]
        here = slab.layout.tensors[index]
        slab.a[here] = values[0].reshape(-1) / f32(slab.p)
        for rank, value in enumerate(values):
            slab.u[rank][here] = 0
            slab.x[rank][here] = value.reshape(-1)

    # --- parts of a step -----------------------------------------------------------------------

    def count(self, dense: bool) -> None:
        """Counts what a rank sends in a round."""
        layouts = [slab.layout for slab in self.slabs]
        of_dense = 4 if self.recipe.dense_wire == "fp32" else 2
        sections = sum(of_dense * x.chunk if dense else x.one_bit_section for x in layouts)
        self.bytes_sent += 2 * (self.world - 1) * (HEADER + sections)

    def count_headers(self) -> None:
        """Counts what a rank sends in a round that the headers end before anything else is sent."""
        self.bytes_sent += (self.world - 1) * HEADER

    def _synchronised(self, lr: list[float]) -> None:
        self.sync_position.advance(self.t, lr)
        self.last_sync = self.t

    @staticmethod
    def _flat(slab: Slab, tensors: Sequence[Vector | None], o: Options) -> Vector:
        """The gradient to descend along. What is missing counts as 0, never -0."""
        flat = np.zeros_like(slab.a)
        for here, tensor in zip(slab.layout.tensors, tensors, strict=True):
            if tensor is not None:
                flat[here] = -tensor.reshape(-1) if o.maximize else tensor.reshape(-1)
        return flat

    def _lr(self, slab: Slab, o: Options) -> float:
        """lr'"""
        return o.lr / (1 - o.betas[0] ** slab.t) if self.recipe.bias_correction else o.lr

    def _quotient(self, slab: Slab, z: Vector, s: float, o: Options) -> Vector:
        """q(z, s) = [[s * z] / D] where born, else 0."""
        corrected = self.recipe.bias_correction and slab.k > 0
        correction = 1 / (1 - o.betas[1] ** slab.k) if corrected else 1.0
        d = np.sqrt(slab.v * f32(correction)) + f32(o.eps)
        return np.where(slab.v > 0, (f32(s) * z) / d, f32(0))

    @staticmethod
    def _momentum(m: Vector, g: Vector, o: Options) -> Vector:
        return f32(o.betas[0]) * m + f32(1 - o.betas[0]) * g

    @staticmethod
    def _kept(m: Vector, g: Vector) -> Vector:
        """What a coordinate that is not born keeps in the slot of m: its last gradient."""
        return np.where(g != 0, g, m)

    def _offer(self, slab: Slab, rank: int, g: Vector) -> Vector:
        """What a rank puts into a refresh."""
        offered = g
        if self.recipe.compressed:
            offered = np.where(slab.v > 0, g, self._kept(slab.m[rank], g))
        return np.where(slab.frozen, f32(0), offered)

    def _through_wire(self, values: Vector) -> Vector:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.recipe.dense_wire)
        if dtype is None:
            return values
        rounded: Vector = torch.from_numpy(values).to(dtype).float().numpy()
        return rounded

    def _dense_mean(self, offered: list[Vector]) -> Vector:
        mean = self._through_wire(offered[0])
        for z in offered[1:]:
            mean = mean + self._through_wire(z)
        return self._through_wire(mean / f32(self.world))

    def _clipped(self, vectors: list[Vector], max_norm: float, mean: bool = False) -> list[Vector]:
        """Of a ``mean`` the norm is that of born coordinates, if there are any."""
        if max_norm == math.inf:
            return vectors
        counts = [~slab.frozen for slab in self.slabs]
        if mean and self.recipe.compressed and any((slab.v > 0).any() for slab in self.slabs):
            counts = [c & (slab.v > 0) for slab, c in zip(self.slabs, counts, strict=True)]
        trained = [v[c].astype(np.float64) for v, c in zip(vectors, counts, strict=True)]
        norm = math.sqrt(sum(float(v @ v) for v in trained))
        factor = f32(min(1.0, max_norm / (norm + 1e-6)))
        return [factor * v for v in vectors]

    def _refresh(
        self, slab: Slab, mean: Vector, offered: list[Vector], o: Options, held: bool
    ) -> None:
        frozen, floor, old = slab.frozen, slab.floor(), slab.v
        beta2 = o.betas[1]
        slab.k += not held or slab.k == 0
        later = f32(beta2) * old + f32(1 - beta2) * (mean * mean)
        if held:
            later = old
        born = old > 0 if self.recipe.compressed else np.ones_like(frozen)
        own = f32(1 - beta2**slab.k) * (mean * mean)
        first = np.where(mean != 0, np.maximum(own, floor), f32(0))
        standstill = f32(1)
        if self.recipe.bias_correction and not held and slab.k > 1:
            standstill = f32((1 - beta2**slab.k) / (1 - beta2 ** (slab.k - 1)))
        slab.v = np.where(frozen, old * standstill, np.where(born, later, first))
        ms = []
        for m, z in zip(slab.m, offered, strict=True):
            newborn = np.where(slab.v > 0, f32(1 - o.betas[0]) * mean, z)
            new = np.where(born, self._momentum(m, mean, o), newborn)
            ms.append(np.where(frozen, m, new))
        decay = f32(1 - o.lr * o.weight_decay)
        a = decay * slab.a - self._quotient(slab, ms[0], self._lr(slab, o), o)
        slab.a = np.where(frozen, slab.a, a)
        slab.m = ms
        slab.x = [np.where(frozen, x, slab.a) for x in slab.x]

    def _sync_all(self, options: Sequence[Options]) -> None:
        active = [slab for slab in self.slabs if slab.pending > 0]
        for slab, o in zip(self.slabs, options, strict=True):
            if slab.pending > 0:
                self._sync(slab, o)
        self.births_due = self.recipe.compressed and any(
            bool((m[(slab.v == 0) & ~slab.frozen] != 0).any()) for slab in active for m in slab.m
        )

    def _local(self, slab: Slab, gradients: list[Vector], o: Options) -> None:
        lr = self._lr(slab, o)
        weight, eta = (1.0, lr) if self.recipe.sums_momentum else (lr, 1.0)
        slab.pending += 1
        slab.s += weight
        slab.p *= 1 - o.lr * o.weight_decay
        frozen = slab.frozen
        for rank, g in enumerate(gradients):
            m, kept = self._momentum(slab.m[rank], g, o), self._kept(slab.m[rank], g)
            slab.m[rank] = np.where(frozen, slab.m[rank], np.where(slab.v > 0, m, kept))
            moved = slab.u[rank] + f32(weight) * slab.m[rank]
            slab.u[rank] = np.where((slab.v > 0) & ~frozen, moved, f32(0))
            x = f32(slab.p) * slab.a - self._quotient(slab, slab.u[rank], eta, o)
            slab.x[rank] = np.where(frozen, slab.x[rank], x)

    def _sync(self, slab: Slab, o: Options) -> None:
        eta = self._lr(slab, o) if self.recipe.sums_momentum else 1.0
        rho = min(1.0, slab.s / slab.s_prev) if slab.s_prev > 0 else 1.0
        frozen = slab.frozen
        moving = (slab.v > 0) & ~frozen
        before = [*slab.worker_error, slab.server_error]
        u_bar, slab.worker_error, slab.server_error = one_bit_mean(
            slab.layout,
            moving,
            self.recipe.scale,
            f32(rho),
            slab.u,
            slab.worker_error,
            slab.server_error,
        )
        for error, old in zip([*slab.worker_error, slab.server_error], before, strict=True):
            error[frozen] = old[frozen] * f32(rho)
        a = f32(slab.p) * slab.a - self._quotient(slab, u_bar, eta, o)
        slab.a = np.where(frozen, slab.a, a)
        slab.m = [np.where(moving, u_bar / f32(slab.s), m) for m in slab.m]
        slab.u = [np.zeros_like(slab.a) for _ in slab.u]
        slab.x = [np.where(frozen, x, slab.a) for x in slab.x]
        slab.s_prev, slab.s, slab.p, slab.pending = slab.s, 0.0, 1.0, 0
