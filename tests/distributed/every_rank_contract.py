"""On every rank: what a program expects of an optimizer, beside its arithmetic."""

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trial
from every_rank_trajectory import everything
from plain_twin import Options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler
from trial import bits, constant

import zeroone
from zeroone.schedules import Doubling, EveryStep, Interval, Steps

MIXED = {"variance_schedule": Doubling(2), "sync_schedule": Interval(3)}

OptimizerOf = Callable[..., Any]  # fixtures: the optimizers in turn
TrialOf = Callable[..., trial.Trial]


def of_all(value: object) -> list[Any]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    return held


def noise(rank: int, t: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * t + rank))


# --- types and tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_dense_wire(trial_of: TrialOf, kinds: set[str], wire: str) -> None:
    ours = trial_of(constant(groups=2), dense_wire=wire).run(12)
    assert set(ours.twin.kinds) == kinds


def test_all_types_in_one_model(trial_of: TrialOf, kinds: set[str]) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    shapes = [[(40, 30), ()], [(33,), (0,)], [(9, 9)]]
    ours = trial_of(constant(groups=3), shapes=shapes, dtype=dtypes).run(14)
    assert set(ours.twin.kinds) == kinds
    ours.sync()
    ours.optimizer.check_replicas()


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[:, ::2],
    "channels last": lambda x: x.view(2, 3, 2, -1).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("transposed", torch.float32),
        ("every second", torch.bfloat16),
        ("channels last", torch.float32),
    ],
)
def test_strided(rank: int, optimizer_of: OptimizerOf, layout: str, dtype: torch.dtype) -> None:
    """The same values in other places of memory give the same values, gradients likewise."""
    start = torch.arange(12 * 10, dtype=dtype).view(12, 10) / 64
    dense = torch.nn.Parameter(start.clone().view_as(STRIDED[layout](start)))
    strided = torch.nn.Parameter(STRIDED[layout](start))
    assert not strided.is_contiguous()
    optimizers = [optimizer_of([p]) for p in (dense, strided)]
    address, strides = strided.data_ptr(), strided.stride()
    for t in range(10):
        gradient = noise(rank, t, torch.Size((12, 10))).to(dtype)
        dense.grad = gradient.clone().view_as(dense)
        strided.grad = STRIDED[layout](gradient) if t % 2 else gradient.view_as(dense)
        for optimizer in optimizers:
            optimizer.step()
        assert bits(strided.contiguous()) == bits(dense), t
    assert (strided.data_ptr(), strided.stride()) == (address, strides)
    with torch.no_grad():  # written to from outside: taken over
        strided.mul_(2)
        dense.mul_(2)
    for optimizer in optimizers:
        optimizer.sync()
    assert bits(strided.contiguous()) == bits(dense)


def test_tied_weights(rank: int, optimizer_of: OptimizerOf) -> None:
    """One tensor in two places of a model is one parameter, with the sum of both gradients."""
    table = torch.nn.Embedding(7, 5)
    head = torch.nn.Linear(5, 7, bias=False)
    head.weight = table.weight
    model = torch.nn.Sequential(table, head)
    optimizer = optimizer_of(model.parameters(), lr=1e-2)
    assert optimizer.stats.parameters == 35
    before = table.weight.detach().clone()
    for t in range(8):
        optimizer.zero_grad()
        model(torch.tensor([t % 7, rank])).square().sum().backward()
        optimizer.step()
    optimizer.sync()
    assert head.weight is table.weight
    assert (table.weight != before).any()
    assert len(set(of_all(bits(table.weight)))) == 1


def test_gradients_that_are_missing(rank: int, optimizer_of: OptimizerOf) -> None:
    """None counts as zero, on any rank and in any step; a tensor with none at all only decays."""
    some, none = (torch.nn.Parameter(torch.ones(20)) for _ in range(2))
    twin = torch.nn.Parameter(torch.ones(20))
    ours = optimizer_of([some, none], lr=0.01, weight_decay=0.5)
    theirs = optimizer_of([twin], lr=0.01, weight_decay=0.5)
    for t in range(9):
        missing = (t + rank) % 3 == 0
        gradient = torch.full((20,), 1.0 + rank)
        some.grad = None if missing else gradient
        twin.grad = torch.zeros(20) if missing else gradient
        ours.step()
        theirs.step()
    assert some.detach().min() < 1 - 0.01
    torch.testing.assert_close(none.detach(), torch.full((20,), (1 - 0.01 * 0.5) ** 9))
    ours.sync()
    ours.check_replicas()


# --- freezing ------------------------------------------------------------------------------------


def test_frozen(trial_of: TrialOf, kinds: set[str]) -> None:
    """Byte for byte as the twin: frozen from the start, in mid-run, and inside an interval."""
    ours = trial_of(constant(groups=2))
    plans = [{(0, 0), (1, 1)}, {(0, 1)}, set(), {(0, 0), (0, 1), (1, 0), (1, 1)}, {(1, 0)}]
    for t in range(24):
        ours.step(frozen=sorted(plans[t // 4 % len(plans)]))
    assert set(ours.twin.kinds) == kinds


def test_a_frozen_parameter_stays(rank: int, optimizer_of: OptimizerOf) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = optimizer_of(model.parameters(), lr=0.1)
    first: torch.Tensor = model[0].weight

    def train(steps: int) -> None:
        for t in range(steps):
            optimizer.zero_grad()
            model(noise(rank, t, torch.Size((3, 4)))).square().mean().backward()
            optimizer.step()
        optimizer.sync()

    for frozen in (True, False, True):
        first.requires_grad_(not frozen)
        before = first.detach().clone()
        train(4)
        assert (bits(first) == bits(before)) == frozen
    optimizer.check_replicas()


def test_ranks_that_freeze_other_tensors(world: int, rank: int) -> None:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **MIXED).run(3)
    while ours.twin.pending:
        ours.step()
    parameter = ours.parameters[1][0]
    parameter.requires_grad_(rank != 1)
    for _, _, p in ours.tensors():
        p.grad = None
    words = r"disagree on tensor '0 of parameter group 1.*rank 0 has trained, rank 1 has frozen"
    for _ in range(2):  # alone: nobody is told
        ours.optimizer.step()
    before = everything(ours.optimizer)
    for call in (ours.optimizer.step, ours.optimizer.sync):
        with pytest.raises(zeroone.DisagreementError, match=words):
            call()
    assert everything(ours.optimizer) == before
    parameter.requires_grad_(True)  # mended: it goes on
    ours.optimizer.step()
    ours.optimizer.check_replicas()


# --- scaling and clipping ------------------------------------------------------------------------


class Scaler(torch.amp.GradScaler):
    def __init__(self, **arguments: Any) -> None:
        super().__init__("cpu", init_scale=2.0**10, growth_interval=3, **arguments)


def test_grad_scaler(world: int, rank: int, optimizer_of: OptimizerOf) -> None:
    """Every rank enters every step; a rank whose gradient overflows counts as zero in it, and its
    own scaler alone lowers its scale. Scales are powers of two, so nothing else is rounded."""
    ours, plain = (torch.nn.Parameter(torch.ones(50, dtype=torch.float16)) for _ in range(2))
    scaled, unscaled = (optimizer_of([p], lr=1e-2) for p in (ours, plain))
    scaler = Scaler()
    scaler.scale(torch.ones(()))
    for t in range(12):
        overflows = t % 4 == 3 and rank == t % world
        gradient = noise(rank, t, ours.shape)
        gradient = (gradient * 2**-6).half().float()
        ours.grad = (gradient * scaler.get_scale()).half()
        assert bits(ours.grad.float() / scaler.get_scale()) == bits(gradient)
        plain.grad = gradient.half()
        if overflows:
            ours.grad[3] = float("inf")
            plain.grad.zero_()
        scale = scaler.get_scale()
        scaler.step(scaled)
        scaler.update()
        unscaled.step()
        assert (scaler.get_scale() == scale / 2) == overflows
        assert bits(ours) == bits(plain), t
    assert scaled.stats.skipped_steps == 0
    overflown = sum(t % 4 == 3 and rank == t % world for t in range(12))
    assert scaled.stats.nonfinite_gradients == overflown


def test_grad_scaler_with_autocast_and_unscale(rank: int, optimizer_of: OptimizerOf) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = optimizer_of(model.parameters(), lr=1e-2)
    scaler = Scaler()
    for t in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(noise(rank, t, torch.Size((4, 8)))).square().mean()
        scaler.scale(loss).backward()
        if t % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.stats.steps == 8
    optimizer.sync()
    optimizer.check_replicas()


def test_clip_grad_norm(trial_of: TrialOf) -> None:
    """The mean's norm at refreshes, the rank's own at other steps; then the next step is free."""
    ours, free = trial_of(constant(groups=2)), trial_of(constant(groups=2))
    for t in range(12):
        ours.step(max_norm=(0.5, 1e-3, 1e9, None)[t % 4])
        free.step()
        assert everything(ours.optimizer) != everything(free.optimizer)


def test_clipping_is_that_of_dense_training(world: int, rank: int) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(300)) for _ in range(2))
    optimizer, reference = zeroone.AdamW([ours], lr=0.01), torch.optim.AdamW([theirs], lr=0.01)
    for t in range(6):
        ours.grad = (1 + t) * noise(rank, t, ours.shape)
        theirs.grad = ours.grad.clone()
        dist.all_reduce(theirs.grad)
        theirs.grad /= world
        torch.nn.utils.clip_grad_norm_([theirs], 2.0)
        reference.step()
        before = bits(ours.grad)
        optimizer.clip_grad_norm_(2.0)
        optimizer.step()
        assert bits(ours.grad) == before
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_clip_grad_norm_must_be_the_same(world: int, rank: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = zeroone.AdamW([parameter])
    with pytest.raises(ValueError, match="Invalid max_norm: 0"):
        optimizer.clip_grad_norm_(0)
    parameter.grad = torch.ones(3)
    optimizer.clip_grad_norm_(1.0 + (rank == 1))
    with pytest.raises(zeroone.DisagreementError, match="max_norm: rank 0 has 1, rank 1 has 2"):
        optimizer.step()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


# --- evaluation and checks -----------------------------------------------------------------------


def inside_an_interval(world: int, rank: int, **arguments: Any) -> trial.Trial:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **MIXED, **arguments)
    while not ours.twin.pending or ours.t < 6:
        ours.step()
    return ours


def test_consolidated(world: int, rank: int) -> None:
    ours = inside_an_interval(world, rank)
    before = everything(ours.optimizer)
    here = [p.detach().clone() for *_, p in ours.tensors()]
    assert len(set(of_all(b"".join(map(bits, here))))) == world
    with ours.optimizer.consolidated():
        inside = [p.detach().clone() for *_, p in ours.tensors()]
        for call in (ours.optimizer.step, ours.optimizer.sync, ours.optimizer.adopt_parameters):
            with pytest.raises(RuntimeError, match="consolidated"):
                call()
    assert everything(ours.optimizer) == before
    assert len(set(of_all(b"".join(map(bits, inside))))) == 1
    # x is affine in u and all else is equal, so the mean of u gives the mean of x.
    for k, x in enumerate(inside):
        mean = torch.stack([values[k].double() for values in of_all(here)]).mean(0)
        torch.testing.assert_close(x.double(), mean, rtol=1e-6, atol=1e-6)
    ours.twin.bytes_sent = ours.optimizer.stats.bytes_sent  # of the calls that were refused
    ours.run(6)
    ours.sync()
    sent = ours.optimizer.stats.bytes_sent
    with ours.optimizer.consolidated():  # nothing is pending
        pass
    assert ours.optimizer.stats.bytes_sent == sent
    ours.run(3)


def test_consolidated_after_an_error_within(world: int, rank: int) -> None:
    ours = inside_an_interval(world, rank)
    before = everything(ours.optimizer)

    def evaluate() -> None:
        with ours.optimizer.consolidated():
            ours.parameters[0][0].data.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert everything(ours.optimizer) == before


def test_check_replicas(world: int, rank: int, trial_of: TrialOf) -> None:
    ours = trial_of(constant(groups=2)).run(7)
    ours.optimizer.check_replicas()
    ours.sync()
    ours.optimizer.check_replicas()
    parameter = ours.parameters[1][0]
    state = ours.optimizer.state[parameter]
    at = int(state["exp_avg_sq"].argmax())
    for vector in ("parameter", "exp_avg", "exp_avg_sq", "anchor"):  # later ones are named first
        values = parameter.data if vector == "parameter" else state[vector]
        if rank == world - 1:
            values.view(-1)[at] *= 1 + 2**-20
        with pytest.raises(zeroone.DisagreementError, match=f"{vector} of 0 of parameter group 1"):
            ours.optimizer.check_replicas()


@pytest.mark.parametrize("averaged", [True, False])
def test_gradients_that_look_averaged(
    rank: int, optimizer_of: OptimizerOf, averaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    if not averaged:
        zeroone.local_gradients(model)
    optimizer = optimizer_of(model.parameters())
    with caplog.at_level(logging.WARNING, logger="zeroone"):
        for t in range(3):
            optimizer.zero_grad()
            model(noise(rank, t, torch.Size((4, 5)))).sum().backward()
            optimizer.step()
    assert [("already averaged" in r.message) for r in caplog.records] == [True] * averaged


# --- the rest of the contract --------------------------------------------------------------------


def test_a_group_is_added(trial_of: TrialOf, kinds: set[str]) -> None:
    ours = trial_of(constant(groups=1), shapes=[[(200,), (3,)]]).run(5)
    ours.add_param_group([(77,), (), (0,)], constant(groups=2))
    ours.run(9)
    assert set(ours.twin.kinds) == kinds


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, 4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(world: int, rank: int, name: str) -> None:
    """Every scheduler drives lr, and some betas, as it does torch's AdamW."""
    shape = torch.Size((30,))
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizers = zeroone.AdamW([ours], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    both = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    for t in range(12):
        ours.grad = noise(rank, t, shape)
        theirs.grad = torch.stack([noise(r, t, shape) for r in range(world)]).mean(0)
        for optimizer, scheduler in zip(optimizers, both, strict=True):
            optimizer.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_settings_of_groups_and_tensor_lr(world: int, rank: int) -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(8))], "lr": torch.tensor(0.02)},
        {"params": [torch.nn.Parameter(torch.ones(8))], "betas": (0.5, 0.9), "eps": 1e-3},
        {"params": [torch.nn.Parameter(torch.ones(8))], "weight_decay": 0.3, "maximize": True},
    ]
    copies = copy.deepcopy(groups)
    ours = zeroone.AdamW(groups, lr=torch.tensor(0.01))
    theirs = torch.optim.AdamW(copies, lr=torch.tensor(0.01), foreach=False)
    for t in range(5):
        for group, other in zip(groups, copies, strict=True):
            group["params"][0].grad = noise(rank, t, torch.Size((8,)))
            gradients = [noise(r, t, torch.Size((8,))) for r in range(world)]
            other["params"][0].grad = torch.stack(gradients).mean(0)
        ours.step()
        theirs.step()
    for group, other in zip(groups, copies, strict=True):
        torch.testing.assert_close(group["params"][0], other["params"][0], rtol=1e-6, atol=1e-6)


def test_closure_hooks_and_accumulation(rank: int, optimizer_of: OptimizerOf) -> None:
    """Nothing is sent but at `step`, and zero_grad may come at any time."""
    model = torch.nn.Linear(6, 2)
    optimizer = optimizer_of(model.parameters(), lr=1e-2)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure() -> float:
        optimizer.zero_grad()
        for micro in range(3):
            sent = optimizer.stats.bytes_sent
            loss: torch.Tensor = model(noise(rank, micro, torch.Size((4, 6)))).square().mean() / 3
            loss.backward()
            assert optimizer.stats.bytes_sent == sent
        assert torch.is_grad_enabled()
        return float(loss.detach())

    losses = [optimizer.step(closure) for _ in range(5)]
    assert called == ["pre", "post"] * 5
    assert losses[-1] < losses[0]
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.sync()
    optimizer.check_replicas()


def test_sparse_gradients_are_refused(world: int, optimizer_of: OptimizerOf) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = optimizer_of(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


def test_sharded_parameters_are_refused(world: int, rank: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="parameter 0 of parameter group 0 is a DTensor without"):
        zeroone.ZeroOneAdam([parameter])


def test_a_parameter_of_another_shape(world: int, rank: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(6))
    optimizer = zeroone.ZeroOneAdam([parameter])
    parameter.data = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"has shape \[4\], at construction it had \[6\]"):
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        partial(
            zeroone.ZeroOneAdam,
            variance_schedule=Doubling(2, until=20),
            sync_schedule=EveryStep(),
        ),
        partial(zeroone.OneBitAdam, warmup_steps=20),
    ],
    ids=["ZeroOneAdam", "OneBitAdam"],
)
def test_rows_first_seen_late(world: int, rank: int, make: OptimizerOf) -> None:
    """An embedding row whose first gradient comes long after v is held learns as the others did."""
    table = torch.nn.Embedding(6, 4)
    torch.nn.init.zeros_(table.weight)
    never = table.weight.detach()[5].clone()
    optimizer = make(table.parameters(), lr=1e-2, weight_decay=0)
    longest = 0.0
    for t in range(120):
        optimizer.zero_grad()
        rows = torch.arange(4 if t < 60 else 5)
        target = 1 + 0.5 * noise(rank, t, torch.Size((len(rows), 4)))
        (table(rows) - target).square().mean().backward()
        before = table.weight.detach().clone()
        optimizer.step()
        longest = max(longest, float((table.weight.detach() - before)[4].abs().max()))
        if t == 59:
            reached = float(table.weight.detach()[0].mean())
            assert not table.weight.detach()[4].any()
    late = float(table.weight.detach()[4].mean())
    assert 0.6 * reached < late < 1.4 * reached
    assert longest < 5 * 1e-2
    assert bits(table.weight.detach()[5]) == bits(never)


def test_learning_rate_of_nan_is_refused(world: int, rank: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = zeroone.ZeroOneAdam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = Options.lr
    optimizer.step()


# --- what went wrong once ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ZeroOneAdam", "OneBitAdam"])
def test_a_group_added_after_v_is_held(world: int, rank: int, name: str) -> None:
    arguments = {"ZeroOneAdam": {"variance_schedule": Doubling(4, until=4)}}
    make = getattr(zeroone, name)
    first, late = (torch.nn.Parameter(torch.ones(6)) for _ in range(2))
    optimizer = make([first], lr=1e-2, **arguments.get(name, {"warmup_steps": 4}))
    for t in range(30):
        if t == 10:
            optimizer.add_param_group({"params": [late]})
        for p in (first, late):
            p.grad = torch.ones(6) + 0.1 * noise(rank, t, p.shape)
        optimizer.step()
    optimizer.sync()
    assert late.detach().max() < 1 - 10 * 1e-2
    assert optimizer.state_dict()["param_groups"][1]["zeroone"]["slab"]["refreshes"] == 1


def test_what_fp16_cannot_carry_is_not_kept(world: int, rank: int) -> None:
    """One gradient of an unborn coordinate that is too large must not end the run."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = zeroone.ZeroOneAdam(
        [parameter],
        lr=1e-2,
        dense_wire="fp16",
        variance_schedule=Steps([1, 4, 7, 9]),
        sync_schedule=EveryStep(),
    )
    for t in range(1, 11):
        parameter.grad = torch.tensor([1.0, 1.0, 0.0, 0.0])
        if t == 2:
            parameter.grad[3] = 1e5
        if t >= 6:
            parameter.grad[3] = 2.0
        optimizer.step()
    stats = optimizer.stats
    assert (stats.refreshes, stats.skipped_steps, stats.nonfinite_gradients) == (4, 0, 0)
    assert parameter.detach()[3] < 1
    optimizer.check_replicas()


def test_a_step_with_a_scaler_is_tried_again(world: int, rank: int) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(9)) for _ in range(2))
    scaled, plain = (zeroone.ZeroOneAdam([p], lr=1e-2, eps=1.0) for p in (ours, theirs))
    scaler = Scaler()
    scaler.scale(torch.ones(()))
    for p in (ours, theirs):
        p.grad = torch.full((9,), 2.0 + rank)
    ours.grad.mul_(scaler.get_scale())
    scaled.param_groups[0]["lr"] = 1e-2 * (1 + rank)
    with pytest.raises(zeroone.DisagreementError):
        scaler.step(scaled)
    scaled.param_groups[0]["lr"] = 1e-2
    scaler = Scaler()
    scaler.scale(torch.ones(()))
    scaler.step(scaled)
    plain.step()
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("call", ["step", "sync", "state_dict", "adopt_parameters", "consolidated"])
@pytest.mark.parametrize("what", ["shape", "type"])
def test_a_parameter_that_has_become_another(world: int, rank: int, call: str, what: str) -> None:
    """Whatever is called, memory that is not the parameter's is neither read nor written."""
    ours = inside_an_interval(world, rank)
    parameter, kept = ours.parameters[1][0], ours.parameters[1][0].data
    parameter.data = kept[:4].clone() if what == "shape" else kept.double()
    with pytest.raises((RuntimeError, ValueError), match=r"has shape|has type"):
        getattr(ours.optimizer, call)().__enter__()  # of consolidated; the others raise before
    parameter.data = kept
    ours.twin.bytes_sent = ours.optimizer.stats.bytes_sent
    ours.run(3)


def test_a_group_that_is_refused_leaves_no_trace(world: int, rank: int) -> None:
    ours = inside_an_interval(world, rank)
    before = everything(ours.optimizer)
    new = {"params": [torch.nn.Parameter(torch.full((5,), 7.0))]}
    with ours.optimizer.consolidated(), pytest.raises(RuntimeError):
        ours.optimizer.add_param_group({**new})
    with pytest.raises(zeroone.DisagreementError, match="lr of parameter group 2"):
        ours.optimizer.add_param_group({**new, "lr": 0.1 * (1 + rank)})
    assert (new["params"][0] == 7).all()
    assert everything(ours.optimizer) == before
    ours.run(3)


def test_weights_written_after_the_state_was(world: int, rank: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = zeroone.ZeroOneAdam([parameter], **MIXED)
    for t in range(4):
        parameter.grad = noise(rank, t, parameter.shape)
        optimizer.step()
        optimizer.state[parameter]["exp_avg"].mul_(0.5)
    optimizer.sync()
    with torch.no_grad():
        parameter.fill_(5)
    assert (optimizer.state_dict()["state"][0]["anchor"] == 5).all()


def test_names_in_another_order(world: int, rank: int) -> None:
    tensors = [(name, torch.nn.Parameter(torch.ones(3))) for name in "ab"]
    saved = zeroone.ZeroOneAdam(tensors).state_dict()
    other = zeroone.ZeroOneAdam(tensors[::-1])
    with pytest.raises(ValueError, match=r"\['a', 'b'\] in group 0"):
        other.load_state_dict(saved)


def test_a_learning_rate_that_is_none(world: int, rank: int) -> None:
    """Any error of one rank's own is told to the others."""
    ours = inside_an_interval(world, rank)
    while ours.t % 3 != 2:
        ours.step()
    for _, _, p in ours.tensors():
        p.grad = None
    group = ours.optimizer.param_groups[0]
    lr = group["lr"]
    group["lr"] = None if rank == 1 else lr
    for call in (ours.optimizer.sync, ours.optimizer.sync):
        with pytest.raises(TypeError if rank == 1 else zeroone.DisagreementError, match="float"):
            call()
    group["lr"] = lr
    ours.optimizer.sync()
    ours.optimizer.check_replicas()


def test_parameters_that_share_memory(world: int, rank: int) -> None:
    values = torch.ones(6)
    both = [torch.nn.Parameter(values), torch.nn.Parameter(values)]
    with pytest.raises(ValueError, match="share their memory"):
        zeroone.ZeroOneAdam(both)
    overlapping = torch.nn.Parameter(torch.ones(5).as_strided((3, 3), (1, 1)))
    with pytest.raises(ValueError, match="share memory"):
        zeroone.ZeroOneAdam([overlapping])


def test_a_frozen_parameter_whose_state_a_loader_drops(world: int, rank: int) -> None:
    """As torch.distributed.checkpoint does; inside an interval with weight decay."""
    frozen, other = (torch.nn.Parameter(torch.full((4,), 3.0)) for _ in range(2))
    optimizer = zeroone.ZeroOneAdam([frozen, other], lr=0.1, weight_decay=0.2, **MIXED)
    frozen.requires_grad_(False)
    pending = 0
    while pending == 0:
        other.grad = noise(rank, 0, other.shape)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        pending = state["param_groups"][0]["zeroone"]["slab"]["pending"]
    del state["state"][0]
    optimizer.load_state_dict(state)
    assert (frozen == 3).all()
    optimizer.sync()
    assert (frozen == 3).all()
