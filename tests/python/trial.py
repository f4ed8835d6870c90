"""A trial: an optimizer of the library beside the plain twin, step by step, bytes compared."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import plain_twin
import torch
from plain_twin import Options, Recipe, Twin, Vector

import zeroone

Shapes = Sequence[Sequence[tuple[int, ...]]]  # [group][tensor]
Plan = Callable[[int], list[Options]]  # the groups' settings at a step
# Odd sizes, a scalar, an empty tensor, several pieces of a scale, several blocks of a chunk.
SHAPES: Shapes = [[(70, 70), (), (0, 3), (13,), (300, 3)], [(2048,), (5,), (1, 1)]]


def constant(lr: float = 1e-3, groups: int = 1, **others: Any) -> Plan:
    return lambda t: [Options(lr=lr, **others) for _ in range(groups)]


def bits(values: torch.Tensor | Vector) -> bytes:
    """Compared as bytes, -0 differs from 0."""
    if isinstance(values, torch.Tensor):
        integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
        return values.detach().flatten().view(integers).numpy().tobytes()
    return values.tobytes()


def counters(saved: dict[str, Any]) -> dict[str, Any]:
    """All scalars of a state dict."""
    own = [group["zeroone"] for group in saved["param_groups"]]
    assert all(group["counters"] == own[0]["counters"] for group in own)
    slabs = [{**group["slab"], "frozen": json.loads(group["slab"]["frozen"])} for group in own]
    return {**own[0]["counters"], "slabs": slabs}


class Trial:
    """One rank of the library, and the twin of all ranks.

    Gradients are noise of unlike sizes plus a part that depends on the parameters, so that an
    error grows. If `late`, an eighth of the coordinates has no gradient before step 4, and others
    none before step 8: they have no second moment. Some ranks have no gradient at all for some
    tensors.
    """

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        recipe: Recipe,
        plan: Plan,
        shapes: Shapes = SHAPES,
        *,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype | tuple[torch.dtype, ...] = torch.float32,
        seed: int = 0,
        late: bool = True,
        **arguments: Any,
    ) -> None:
        self.plan, self.rank, self.world, self.seed = plan, rank, world, seed
        self.late = late
        self.dtypes = dtype if isinstance(dtype, tuple) else (dtype,)  # of the groups, in turn
        self.parameters: list[list[torch.nn.Parameter]] = []
        self._scales: list[list[Vector]] = []
        self.twin = Twin(recipe, [], world)
        for group in shapes:
            self._add(group)
        groups = [
            {"params": parameters, **vars(options)}
            for parameters, options in zip(self.parameters, plan(0), strict=True)
        ]
        self.optimizer: Any = make(groups, **arguments)
        self.t = 0
        self._taken = self._skipped = 0  # steps
        self.compare()

    def add_param_group(self, group: Sequence[tuple[int, ...]], plan: Plan) -> None:
        """`plan` says the settings of all groups from now on."""
        self._add(group)
        self.plan = plan
        options = plan(self.t)[-1]
        self.optimizer.add_param_group({"params": self.parameters[-1], **vars(options)})
        self.compare(whole=False)

    def run(self, steps: int, **extra: Any) -> Trial:
        for _ in range(steps):
            self.step(**extra)
        return self

    def step(
        self,
        not_finite: Sequence[int] = (),
        unborn: bool = False,
        frozen: Sequence[tuple[int, int]] = (),
        max_norm: float | None = None,
    ) -> str:
        """One step of both. The gradients of the ranks `not_finite` have one NaN or infinity, at
        the coordinate of the largest second moment, or at one that has none yet (`unborn`). The
        tensors `frozen`, (group, index), have no gradient and require none."""
        self.t += 1
        options = self.plan(self.t)
        gradients = [self._gradients(rank) for rank in range(self.world)]
        for rank in not_finite:
            self._spoil(gradients[rank], (np.nan, np.inf, -np.inf)[rank % 3], unborn)
        for g, i in frozen:
            for of_rank in gradients:
                of_rank[g][i] = None
        for group, of_group in zip(self.optimizer.param_groups, options, strict=True):
            group.update(vars(of_group))
        for g, i, parameter in self.tensors():
            gradient = gradients[self.rank][g][i]
            parameter.grad = None
            parameter.requires_grad_((g, i) not in frozen)
            if gradient is not None:
                parameter.grad = torch.from_numpy(gradient).to(self.dtype(g))
        if max_norm is not None:
            self.optimizer.clip_grad_norm_(max_norm)
        self.optimizer.step()
        clip = math.inf if max_norm is None else max_norm
        kind = self.twin.step(gradients, options, frozen, clip)
        self._skipped += kind == "skipped"
        self._taken += kind != "skipped"
        self.compare(whole=self.t % 5 == 0)
        return kind

    def go_on_in_a_copy(self) -> None:
        """Statistics start at zero there."""
        self.parameters, self.optimizer = copy.deepcopy((self.parameters, self.optimizer))
        self.twin.bytes_sent = self._taken = self._skipped = 0

    def sync(self) -> bool:
        self.optimizer.sync()
        frozen = [(g, i) for g, i, parameter in self.tensors() if not parameter.requires_grad]
        moved = self.twin.sync(self.plan(self.t), frozen)
        self.compare(whole=False)
        return moved

    def failed(self) -> None:
        """The headers of a round ended it. Nothing has changed but the count of bytes."""
        self.twin.count_headers()
        self.compare()

    def tensors(self) -> Iterator[tuple[int, int, torch.nn.Parameter]]:
        for g, group in enumerate(self.parameters):
            for i, parameter in enumerate(group):
                yield g, i, parameter

    def dtype(self, g: int) -> torch.dtype:
        return self.dtypes[g % len(self.dtypes)]

    def written(self, g: int, i: int) -> torch.Tensor:
        """What the library must have written to a parameter."""
        return torch.from_numpy(self.twin.tensor(self.rank, g, i).copy()).to(self.dtype(g))

    def compare(self, whole: bool = True) -> None:
        """Every byte of this rank's parameters and state, and every scalar.

        If not `whole`, without what state_dict() has to be called for, as that may complete what
        the library has put off; a step must come out right either way.
        """
        saved = self.optimizer.state_dict() if whole else None
        t = f"after step {self.t} ({self.twin.kinds[-1:]}), rank {self.rank}"
        compressed = self.twin.recipe.compressed
        for g, i, parameter in self.tensors():
            slab = self.twin.slabs[g]
            here = slab.layout.tensors[i]
            where = f"{t}: tensor {i} of group {g}"
            assert parameter.dtype == self.dtype(g)
            assert bits(parameter.flatten()) == bits(self.written(g, i)), where
            expected = {
                "exp_avg": slab.m[self.rank],
                "exp_avg_sq": slab.v,
                "anchor": slab.a,
                "accumulated": slab.u[self.rank],
                "worker_error": slab.worker_error[self.rank],
            }
            state = self.optimizer.state[parameter]
            assert set(state) == {"step", *expected} - (set() if compressed else {"worker_error"})
            assert state["step"] == slab.t, where
            for name, values in expected.items():
                if name in state and (whole or name != "accumulated"):
                    assert state[name].dtype == torch.float32
                    assert state[name].shape == parameter.shape
                    assert bits(state[name].flatten()) == values[here].tobytes(), f"{where}: {name}"
        stats = self.optimizer.stats
        assert stats.bytes_sent == stats.bytes_received, t
        assert stats.bytes_sent == self.twin.bytes_sent, t
        assert (stats.steps, stats.skipped_steps) == (self._taken, self._skipped), t
        if saved is None:
            return
        found = counters(saved)
        assert (found["step"], found["last_sync"]) == (self.twin.t, self.twin.last_sync), t
        assert found["births_due"] == self.twin.births_due, t
        for g, (slab, scalars) in enumerate(zip(self.twin.slabs, found["slabs"], strict=True)):
            assert scalars == {
                "step": slab.t,
                "refreshes": slab.k,
                "pending": slab.pending,
                "sum": slab.s,
                "previous_sum": slab.s_prev,
                "decay": slab.p,
                "frozen": slab.frozen_tensors,
            }, f"{t}: group {g}"
            if compressed:
                residual = slab.server_error[slab.layout.chunks[self.rank]]
                own = saved["param_groups"][g]["zeroone"]
                held = own[f"server_error.rank{self.rank}"]  # padded to the longest chunk
                padded = np.pad(residual, (0, held.numel() - residual.size))
                assert bits(held) == padded.tobytes(), f"{t}: server_error of group {g}"

    # --- data ----------------------------------------------------------------------------------

    def _noise(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def _initial(self, group: Sequence[tuple[int, ...]], rank: int) -> list[Vector]:
        """Every rank starts elsewhere; the first one's values must win."""
        g = len(self.parameters)
        noise = self._noise(1, rank, g)
        return [self._rounded(g, noise.standard_normal(shape, np.float32)) for shape in group]

    def _rounded(self, g: int, values: Any) -> Vector:
        tensor = torch.as_tensor(np.asarray(values, np.float32))
        return tensor.to(self.dtype(g)).float().numpy()

    def _add(self, group: Sequence[tuple[int, ...]]) -> None:
        self.twin.add_group(self._initial(group, rank=0))
        values = self._initial(group, self.rank)
        dtype = self.dtype(len(self.parameters))
        self.parameters.append(
            [torch.nn.Parameter(torch.from_numpy(value).to(dtype)) for value in values]
        )
        noise = self._noise(2, len(self._scales))
        self._scales.append(
            [(10 ** noise.uniform(-4, 0, shape)).astype(np.float32) for shape in group]
        )

    def _gradients(self, rank: int) -> list[list[Vector | None]]:
        noise = self._noise(3, self.t, rank)
        gradients: list[list[Vector | None]] = []
        for g, group in enumerate(self.parameters):
            gradients.append([])
            for i, parameter in enumerate(group):
                x = self.twin.tensor(rank, g, i).reshape(parameter.shape)
                scale = self._scales[g][i]
                value = scale * (noise.standard_normal(x.shape, np.float32) + np.float32(0.1) * x)
                late = (scale > 0.32) & (self.t < 4) | (scale < 2e-4) & (self.t < 8)
                value = np.where(late & self.late, np.float32(0), value)
                missing = (self.t + rank + i + g) % 7 == 0 and x.size > 0
                gradients[-1].append(None if missing else self._rounded(g, value))
        return gradients

    def _spoil(self, gradients: list[list[Vector | None]], bad: float, unborn: bool) -> None:
        candidates = []
        for slab, group in zip(self.twin.slabs, gradients, strict=True):
            for here, gradient in zip(slab.layout.tensors, group, strict=True):
                if gradient is not None and gradient.size > 0:
                    v = slab.v[here]
                    at = int(v.argmin() if unborn else v.argmax())
                    candidates.append((-v[at] if unborn else v[at], gradient.reshape(-1), at))
        if candidates:
            moment, gradient, at = max(candidates, key=lambda candidate: candidate[0])
            assert not unborn or moment == 0
            gradient[at] = bad


OF_RECIPE = {
    zeroone.ZeroOneAdam: ("variance_schedule", "sync_schedule", "scale"),
    zeroone.OneBitAdam: ("warmup_steps", "scale"),
    zeroone.AdamW: (),
}


def make(
    algorithm: Any,
    twin: Callable[..., Recipe],
    plan: Plan,
    shapes: Shapes,
    wrap: Callable[[Any], Any] = lambda algorithm: algorithm,
    **arguments: Any,
) -> Trial:
    """`wrap` may put something around the constructor."""
    names = {*OF_RECIPE[algorithm], "bias_correction", "dense_wire"} & arguments.keys()
    recipe = twin(**{name: arguments[name] for name in names})
    return Trial(wrap(algorithm), recipe, plan, shapes, **arguments)


def zero_one_adam(plan: Plan, shapes: Shapes = SHAPES, **arguments: Any) -> Trial:
    return make(zeroone.ZeroOneAdam, plain_twin.zero_one_adam, plan, shapes, **arguments)


def one_bit_adam(plan: Plan, shapes: Shapes = SHAPES, **arguments: Any) -> Trial:
    return make(zeroone.OneBitAdam, plain_twin.one_bit_adam, plan, shapes, **arguments)


def adamw(plan: Plan, shapes: Shapes = SHAPES, **arguments: Any) -> Trial:
    return make(zeroone.AdamW, plain_twin.adamw, plan, shapes, **arguments)
