"""On every rank: what the optimizers compute, byte for byte that of the plain twin."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trial
from plain_twin import Options
from trial import bits, constant

import zeroone
from zeroone import distributed
from zeroone.schedules import Doubling, EveryStep, Interval, LearningRateTied, Steps


def warm_up_and_decay(t: int) -> list[Options]:
    rate = 1e-3 * min(t, 4) / 4 * 0.9 ** max(0, t - 8)
    return [Options(lr=rate), Options(lr=rate / 2, weight_decay=0.1)]


def drops_and_zeros(t: int) -> list[Options]:
    """To 0 now and then, the first step included, and to a thousandth for a while."""
    rate = 0.0 if t in (1, 8, 9, 16) else 1e-6 if 11 <= t <= 15 else 1e-3
    return [Options(lr=rate), Options(lr=2 * rate)]


def unlike_groups(t: int) -> list[Options]:
    return [
        Options(lr=1e-3, weight_decay=0.0),
        Options(lr=3e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, maximize=True),
        Options(lr=0.0 if t % 3 else 1e-4, betas=(0.0, 0.9)),
        Options(lr=0.0, weight_decay=0.0),
    ]


UNLIKE = [[(33, 7), ()], [(4500,), (0,)], [(3,)], [(5, 5)]]
THREE_STEPS = {"variance_schedule": Steps([1, 2, 7]), "sync_schedule": Steps([4, 6, 9, 10, 15, 22])}
ZERO_ONE: dict[str, tuple[trial.Plan, trial.Shapes, dict[str, Any]]] = {
    "defaults": (warm_up_and_decay, trial.SHAPES, {"variance_schedule": Doubling(kappa=2)}),
    "l2": (warm_up_and_decay, trial.SHAPES, {"scale": "l2", **THREE_STEPS}),
    "zeros": (
        drops_and_zeros,
        trial.SHAPES,
        {"variance_schedule": Doubling(1, until=13), "sync_schedule": Interval(3)},
    ),
    "groups": (
        unlike_groups,
        UNLIKE,
        {"variance_schedule": EveryStep(until=5), "sync_schedule": Interval(4), "scale": "l2"},
    ),
    "uncorrected": (
        drops_and_zeros,
        trial.SHAPES,
        {
            "variance_schedule": Interval(5),
            "sync_schedule": LearningRateTied(3),
            "bias_correction": False,
        },
    ),
}


@pytest.mark.parametrize("case", ZERO_ONE)
def test_zero_one_adam(world: int, rank: int, case: str) -> None:
    plan, shapes, arguments = ZERO_ONE[case]
    ours = trial.zero_one_adam(plan, shapes, rank=rank, world=world, **arguments)
    ours.run(24)
    kinds = ours.twin.kinds
    assert min(map(kinds.count, ("refresh", "sync", "local"))) >= 3
    assert any((slab.worker_error[rank] != 0).any() for slab in ours.twin.slabs)
    unborn = [slab.v == 0 for slab in ours.twin.slabs]
    assert any(map(np.any, unborn)) == (case == "l2")
    replicas_equal(ours, pending=kinds[-1] == "local")


def replicas_equal(ours: trial.Trial, pending: bool) -> None:
    """After sync() all ranks have the same parameters, and before it not, if steps are pending."""

    def alike(vector: str | None) -> bool:
        state = ours.optimizer.state
        tensors = [state[p][vector] if vector else p for *_, p in ours.tensors()]
        if vector == "exp_avg":  # where v = 0 it is a gradient of this rank
            tensors = [
                torch.where(state[p]["exp_avg_sq"] > 0, state[p][vector], 0)
                for *_, p in ours.tensors()
            ]
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, b"".join(map(bits, tensors)))
        return len(set(held)) == 1

    assert alike("anchor")
    assert alike("exp_avg_sq")
    assert alike(None) != pending
    assert ours.sync() == pending
    assert alike(None)
    assert alike("exp_avg")
    sent = ours.optimizer.stats.bytes_sent
    assert not ours.sync()
    assert ours.optimizer.stats.bytes_sent == sent
    ours.run(2)  # goes on as the twin does


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(world: int, rank: int, dtype: torch.dtype) -> None:
    """The anchor is fp32 and never rounded: steps smaller than half a unit are not lost."""
    arguments = {"variance_schedule": Doubling(2, until=6), "sync_schedule": Interval(3)}
    ours = trial.zero_one_adam(
        constant(1e-4, groups=2),
        rank=rank,
        world=world,
        dtype=(dtype, torch.float32),  # of the two groups
        **arguments,
    ).run(20)
    assert {"refresh", "sync", "local"} == set(ours.twin.kinds)
    assert [group[0].dtype for group in ours.parameters] == [dtype, torch.float32]
    first = ours.parameters[0][0]
    assert (ours.optimizer.state[first]["anchor"] != first.float()).any()


@pytest.mark.parametrize("scale", ["l1", "l2"])
def test_one_bit_adam(world: int, rank: int, scale: str) -> None:
    ours = trial.one_bit_adam(
        drops_and_zeros, rank=rank, world=world, warmup_steps=7, scale=scale, late=False
    )
    ours.run(20)
    assert ours.twin.kinds == [
        *["refresh"] * 7,
        *["local"] * 2,  # lr is 0: nothing to send
        *["sync"] * 6,
        "local",
        *["sync"] * 4,
    ]


def test_adamw(world: int, rank: int) -> None:
    ours = trial.adamw(unlike_groups, UNLIKE, rank=rank, world=world).run(12)
    assert ours.twin.kinds == ["refresh"] * 12
    assert "worker_error" not in ours.optimizer.state[ours.parameters[0][0]]


def test_adamw_is_that_of_torch(world: int, rank: int) -> None:
    """On the mean gradient, and as long as every coordinate has one."""
    torch.manual_seed(rank)
    ours, theirs = (torch.nn.Parameter(torch.ones(400)) for _ in range(2))
    optimizers = zeroone.AdamW([ours]), torch.optim.AdamW([theirs])
    for _ in range(20):
        ours.grad = torch.randn(400)
        theirs.grad = ours.grad.clone()
        dist.all_reduce(theirs.grad)
        theirs.grad /= world
        for optimizer in optimizers:
            optimizer.step()
    assert (theirs - 1).abs().median() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    chunk = 8 * -(-400 // (8 * world))
    assert optimizers[0].stats.bytes_sent == 20 * 2 * (world - 1) * (40 + 4 * chunk)


def test_fewer_elements_than_ranks(trial_of: Callable[..., trial.Trial], kinds: set[str]) -> None:
    """Chunks are empty, and one rank's whole slab is."""
    ours = trial_of(constant(groups=3), shapes=[[()], [(0,)], [(9,)]])
    ours.run(8)
    assert ours.twin.slabs[0].layout.chunks[-1] == slice(1, 1)
    assert set(ours.twin.kinds) == kinds


@pytest.mark.parametrize("broadcast", [True, False])
def test_where_parameters_start(world: int, rank: int, broadcast: bool) -> None:
    torch.manual_seed(rank if broadcast else 0)
    parameter = torch.nn.Parameter(torch.randn(50))
    zeroone.ZeroOneAdam([parameter], broadcast_parameters=broadcast)
    torch.manual_seed(0)
    assert bits(parameter) == bits(torch.randn(50))


def test_not_finite_on_one_rank_counts_as_zero(
    world: int, rank: int, trial_of: Callable[..., trial.Trial], kinds: set[str]
) -> None:
    ours = trial_of(constant(groups=2))
    for t in range(1, 15):
        ours.step(not_finite=[t // 2 % world] if t % 3 else [])
    assert {kind for t, kind in enumerate(ours.twin.kinds, 1) if t % 3} == kinds  # with a bad rank
    bad = [t // 2 % world for t in range(1, 15) if t % 3]
    assert ours.optimizer.stats.nonfinite_gradients == bad.count(rank)
    assert ours.optimizer.stats.skipped_steps == 0


def test_not_finite_on_all_ranks_leaves_no_trace(
    world: int, trial_of: Callable[..., trial.Trial]
) -> None:
    ours = trial_of(constant(groups=2))
    for _ in range(3):
        for _ in range(3):  # a local step is not skipped: each rank's gradient counts as zero
            before = everything(ours.optimizer)
            skipped = ours.optimizer.stats.skipped_steps
            if ours.step(not_finite=range(world)) == "skipped":
                assert everything(ours.optimizer) == before
                assert ours.optimizer.stats.skipped_steps == skipped + 1
                break
        ours.run(2)
    assert ours.optimizer.stats.skipped_steps == ours.twin.kinds.count("skipped") == 3
    assert ours.optimizer.stats.steps == ours.t - 3


def everything(optimizer: torch.optim.Optimizer) -> list[bytes | str]:
    """All that a step may change, of this rank."""
    saved = optimizer.state_dict()
    own = [group["zeroone"] for group in saved["param_groups"]]
    residuals = [of[key] for of in own for key in of if key.startswith("server_error")]
    vectors = [x for state in saved["state"].values() for x in state.values()]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [str(trial.counters(saved)), *map(bits, [*residuals, *vectors, *parameters])]


def test_add_param_group(world: int, rank: int) -> None:
    """The new group is unborn till the next refresh, and its bias correction starts then."""
    arguments = {"variance_schedule": Interval(6), "sync_schedule": LearningRateTied(4)}

    def falling(groups: int) -> trial.Plan:
        return lambda t: [Options(lr=1e-3 * 0.8**t / (g + 1)) for g in range(groups)]

    ours = trial.zero_one_adam(falling(1), [[(200,), (3,)]], rank=rank, world=world, **arguments)
    ours.run(11)
    assert ours.twin.pending  # added inside an interval
    ours.add_param_group([(77,), (), (0,)], falling(2))
    new = ours.parameters[1][0]
    start = new.detach().clone()
    while ours.step() != "refresh":
        torch.testing.assert_close(new, start)  # nothing but weight decay
    ours.run(10)
    ours.add_param_group([(5,)], falling(3))
    ours.run(12)
    assert [slab.t for slab in ours.twin.slabs] == [ours.t, ours.t - 11, 12]
    assert all((slab.u[rank] != 0).any() for slab in ours.twin.slabs)
    assert ours.twin.kinds[-12:].count("sync") >= 2


def test_process_group_of_some_ranks(
    world: int, rank: int, trial_of: Callable[..., trial.Trial], kinds: set[str]
) -> None:
    """Ranks 0 and 1 train together, the others each alone."""
    groups = [dist.new_group([0, 1]), *(dist.new_group([r]) for r in range(2, world))]
    together = rank < 2
    ours = trial_of(
        constant(groups=2),
        rank=rank if together else 0,
        world=2 if together else 1,
        process_group=groups[max(0, rank - 1)],
    ).run(12)
    assert set(ours.twin.kinds) == kinds
    assert (ours.optimizer.stats.bytes_sent > 0) == together


def test_state_is_a_live_view(world: int, rank: int) -> None:
    arguments = {"variance_schedule": EveryStep(2), "sync_schedule": Interval(3), "late": False}
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **arguments).run(1)
    state = ours.optimizer.state[ours.parameters[0][0]]
    addresses = {name: value.data_ptr() for name, value in state.items()}
    before = {name: value.clone() for name, value in state.items()}
    views = dict(state)
    ours.run(5)
    assert ours.twin.kinds[1:] == ["refresh", "local", "local", "sync", "local"]
    ours.optimizer.state_dict()  # completes "accumulated"
    assert {name: value.data_ptr() for name, value in state.items()} == addresses
    for name, view in views.items():
        assert view is state[name]
        assert bits(view) != bits(before[name]), name


class Counted:
    """Counts the bytes that collectives are really given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
        self.sent = 0
        operations = distributed._ProcessGroupOperations
        all_to_all, all_gather = operations.all_to_all, operations.all_gather

        def counted_all_to_all(self_: Any, send: int, offset: int, size: int, *rest: int) -> None:
            assert size % world == 0
            assert rest[-1] == size
            self.sent += size // world * (world - 1)
            all_to_all(self_, send, offset, size, *rest)

        def counted_all_gather(self_: Any, send: int, offset: int, size: int, *rest: int) -> None:
            assert rest[-1] == size * world
            self.sent += size * (world - 1)
            all_gather(self_, send, offset, size, *rest)

        monkeypatch.setattr(operations, "all_to_all", counted_all_to_all)
        monkeypatch.setattr(operations, "all_gather", counted_all_gather)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, world: int) -> Counted:
    return Counted(monkeypatch, world)


def test_stats_are_the_closed_form(world: int, rank: int, counted: Counted) -> None:
    """By hand for one slab of three tensors; in every trial the twin counts as well."""
    arguments = {"variance_schedule": EveryStep(4), "sync_schedule": Interval(5), "late": False}
    shapes = [[(100, 100), (30,), (0,), (1,)]]
    ours = trial.zero_one_adam(constant(), shapes, rank=rank, world=world, **arguments)
    counted.sent = 0  # construction is not a round
    ours.run(20)
    n = 10_031
    chunk = 8 * -(-n // (8 * world))
    dense = 2 * (world - 1) * (40 + 4 * chunk)
    one_bit = 2 * (world - 1) * (40 + chunk // 8 + 4 * 3)  # the last chunk has parts of three
    stats = ours.optimizer.stats
    assert (stats.refreshes, stats.syncs, stats.rounds, stats.steps) == (4, 3, 7, 20)
    assert stats.parameters == n
    assert stats.bytes_sent == 4 * dense + 3 * one_bit == counted.sent
    assert stats.bytes_received == stats.bytes_sent
    assert stats.dense_bytes == 20 * (8 * n * (world - 1) // world)
    assert stats.bits_per_parameter_step == pytest.approx(32 * stats.bytes_sent / stats.dense_bytes)
    assert 6 < stats.bits_per_parameter_step < 7  # 4 dense steps of 20, and little else
    assert (stats.setup_bytes_sent > 0) == (rank == 0)
    assert stats.exchange_seconds > 0
    assert stats.local_seconds > 0


def test_one_bit_steps_cost_about_one_bit(world: int, rank: int) -> None:
    shapes = [[(40_000,)]]
    ours = trial.one_bit_adam(constant(), shapes, rank=rank, world=world, warmup_steps=1).run(1)
    before = ours.optimizer.stats
    ours.run(3)
    stats = ours.optimizer.stats
    sent = stats.bytes_sent - before.bytes_sent
    assert 1 < 32 * sent / (stats.dense_bytes - before.dense_bytes) < 1.06


def test_not_finite_where_unborn(world: int, rank: int) -> None:
    """Also a coordinate that takes no part in the round makes the rank's gradient count as zero."""
    arguments = {"variance_schedule": EveryStep(2), "sync_schedule": Interval(3)}
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **arguments).run(3)
    for _ in range(3):
        ours.step(not_finite=[world - 1], unborn=True)
    assert ours.twin.kinds[3:] == ["local", "sync", "refresh"]  # births
    assert ours.optimizer.stats.nonfinite_gradients == (3 if rank == world - 1 else 0)
