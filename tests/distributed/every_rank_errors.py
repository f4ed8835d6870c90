"""On every rank: what one rank does wrong raises on all of them, and changes nothing on any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trial
from every_rank_trajectory import everything
from trial import bits, constant

import zeroone
from zeroone import AdamW, OneBitAdam, ZeroOneAdam, schedules

BAD = 1  # the rank that errs

Parameters = list[torch.nn.Parameter]


def parameters(rank: int) -> Parameters:
    """Different on all ranks, so that a broadcast would show."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (30, 7)]


def raises_everywhere(
    rank: int, own: type[Exception], words: str, call: Callable[[], object]
) -> None:
    """The rank that errs says what is wrong, and the others which rank it was and what it said."""
    with pytest.raises(own if rank == BAD else zeroone.DisagreementError) as caught:
        call()
    assert words in str(caught.value)
    if rank != BAD:
        assert f"rank {BAD}" in str(caught.value)
        assert type(caught.value) is zeroone.DisagreementError


def works(ours: Parameters) -> None:
    """The process group is as good as new."""
    optimizer = ZeroOneAdam(ours)
    for parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in ours]
    optimizer.step()
    for parameter, old in zip(ours, before, strict=True):
        assert (parameter < old - 5e-4).all()
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, b"".join(map(bits, ours)))
    assert len(set(held)) == 1


Make = Callable[[Parameters], torch.optim.Optimizer]
INVALID: dict[str, tuple[str, Make]] = {
    "lr": ("Invalid learning rate: -1.0", lambda p: ZeroOneAdam(p, lr=-1.0)),
    "lr nan": ("Invalid learning rate: nan", lambda p: AdamW(p, lr=float("nan"))),
    "beta1": (
        "Invalid beta parameter at index 0: 1.0",
        lambda p: ZeroOneAdam(p, betas=(1.0, 0.9)),
    ),
    "beta2": ("Invalid beta parameter at index 1: -0.5", lambda p: AdamW(p, betas=(0.9, -0.5))),
    "eps": ("Invalid epsilon value: -1e-08", lambda p: ZeroOneAdam(p, eps=-1e-8)),
    "weight_decay": ("Invalid weight_decay value: -0.1", lambda p: AdamW(p, weight_decay=-0.1)),
    "group": (
        "Invalid learning rate: -2.0",
        lambda p: ZeroOneAdam([{"params": p[:1]}, {"params": p[1:], "lr": -2.0}]),
    ),
    "scale": ("Invalid scale: 'l3'", lambda p: ZeroOneAdam(p, scale="l3")),
    "warmup_steps": ("0", lambda p: OneBitAdam(p, warmup_steps=0)),
    "no parameters": ("empty parameter list", lambda p: ZeroOneAdam([])),
    "complex": (
        "complex64",
        lambda p: ZeroOneAdam([p[0], torch.nn.Parameter(p[1].to(torch.complex64))]),
    ),
    "float64": ("float64", lambda p: ZeroOneAdam([p[0], torch.nn.Parameter(p[1].double())])),
    "expanded": (
        "share memory",
        lambda p: ZeroOneAdam([p[0], torch.nn.Parameter(torch.ones(1).expand(7))]),
    ),
    "named float64": (
        "layers.weight",
        lambda p: ZeroOneAdam([("layers.weight", torch.nn.Parameter(p[1].double()))]),
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_argument(world: int, rank: int, case: str) -> None:
    ours = parameters(rank)
    before = list(map(bits, ours))
    words, wrong = INVALID[case]
    make = wrong if rank == BAD else ZeroOneAdam
    raises_everywhere(rank, ValueError, words, lambda: make(ours))
    assert list(map(bits, ours)) == before
    works(ours)


def test_a_mistake_that_is_no_valueerror(world: int, rank: int) -> None:
    ours = parameters(rank)
    wrong: Any = ours[0] if rank == BAD else ours
    raises_everywhere(rank, TypeError, "params argument", lambda: ZeroOneAdam(wrong))
    works(ours)


def named(*names: str) -> Make:
    return lambda p: ZeroOneAdam(list(zip(names, p, strict=True)))


# What rank BAD does, what the others do, and both values as the message has them.
DIFFERENT: dict[str, tuple[Make, Make, str, str]] = {
    "shape": (
        lambda p: ZeroOneAdam([torch.nn.Parameter(torch.ones(3, 4))]),
        lambda p: ZeroOneAdam([torch.nn.Parameter(torch.ones(4, 3))]),
        "[3, 4]",
        "[4, 3]",
    ),
    "dtype": (
        lambda p: ZeroOneAdam([torch.nn.Parameter(p[0].bfloat16())]),
        lambda p: ZeroOneAdam(p[:1]),
        "bfloat16",
        "float32",
    ),
    "name": (named("weight", "bias"), named("weight", "scale"), "bias", "scale"),
    "order": (named("bias", "weight"), named("weight", "bias"), "bias", "weight"),
    "number": (lambda p: ZeroOneAdam(p[:1]), ZeroOneAdam, " 1", " 2"),
    "groups": (
        lambda p: ZeroOneAdam([{"params": p[:1]}, {"params": p[1:]}]),
        ZeroOneAdam,
        " 2",
        " 1",
    ),
    "lr": (lambda p: ZeroOneAdam(p, lr=2e-3), ZeroOneAdam, "0.002", "0.001"),
    "beta2": (lambda p: ZeroOneAdam(p, betas=(0.9, 0.98)), ZeroOneAdam, "0.98", "0.999"),
    "eps": (lambda p: ZeroOneAdam(p, eps=1e-6), ZeroOneAdam, "1e-06", "1e-08"),
    "weight_decay": (lambda p: ZeroOneAdam(p, weight_decay=0.1), ZeroOneAdam, "0.1", "0.01"),
    "maximize": (lambda p: ZeroOneAdam(p, maximize=True), ZeroOneAdam, "True", "False"),
    "scale": (lambda p: ZeroOneAdam(p, scale="l2"), ZeroOneAdam, "l2", "l1"),
    "bias_correction": (
        lambda p: ZeroOneAdam(p, bias_correction=False),
        ZeroOneAdam,
        "False",
        "True",
    ),
    "variance_schedule": (
        lambda p: ZeroOneAdam(p, variance_schedule=schedules.Doubling(8, until=100)),
        ZeroOneAdam,
        "Doubling(kappa=8, until=100)",
        "Doubling(kappa=16, until=None)",
    ),
    "sync_schedule": (
        lambda p: ZeroOneAdam(p, sync_schedule=schedules.Interval(8)),
        ZeroOneAdam,
        "Interval(8)",
        "LearningRateTied(16)",
    ),
    "algorithm": (AdamW, ZeroOneAdam, "AdamW", "ZeroOneAdam"),
    "warmup_steps": (
        lambda p: OneBitAdam(p, warmup_steps=5),
        lambda p: OneBitAdam(p, warmup_steps=4),
        "5",
        "4",
    ),
    "dense_wire": (
        lambda p: AdamW(p, dense_wire="bf16"),
        AdamW,
        "bf16",
        "fp32",
    ),
    "broadcast_parameters": (
        lambda p: ZeroOneAdam(p, broadcast_parameters=False),
        ZeroOneAdam,
        "False",
        "True",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_argument(world: int, rank: int, case: str) -> None:
    ours = parameters(rank)
    before = list(map(bits, ours))
    wrong, right, bad_value, good_value = DIFFERENT[case]
    with pytest.raises(zeroone.DisagreementError) as caught:
        (wrong if rank == BAD else right)(ours)
    message = str(caught.value)
    assert f"rank {BAD} has" in message
    before_bad, after_bad = message.split(f"rank {BAD} has")
    assert good_value in before_bad
    assert bad_value in after_bad
    assert list(map(bits, ours)) == before
    works(ours)


def sparse(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter).to_sparse()


def negative_lr(optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"] = -0.5


def invalid_beta(optimizer: Any) -> None:
    optimizer.param_groups[1]["betas"] = (0.9, 1.0)


# A refresh, and a sync with local steps pending.
SCHEDULES = {"variance_schedule": schedules.EveryStep(2), "sync_schedule": schedules.Interval(2)}
BEFORE = {"refresh": 1, "sync": 3}


@pytest.mark.parametrize("kind", BEFORE)
@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        (sparse, RuntimeError, "the gradient of parameter 0 of parameter group 0 is sparse"),
        (negative_lr, ValueError, "Invalid learning rate: -0.5"),
        (invalid_beta, ValueError, "Invalid beta parameter at index 1: 1.0"),
    ],
)
def test_mistake_at_a_step(
    world: int, rank: int, kind: str, mistake: Any, error: type[Exception], words: str
) -> None:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **SCHEDULES)
    ours.run(BEFORE[kind])
    if rank == BAD:
        mistake(ours.optimizer)
    raises_everywhere(rank, error, words, ours.optimizer.step)
    rounds = ours.optimizer.stats.rounds
    ours.failed()
    assert ours.step() == kind  # as if nothing had been
    assert ours.optimizer.stats.rounds == rounds + 1
    ours.run(4)


@pytest.mark.parametrize("kind", BEFORE)
@pytest.mark.parametrize(
    ("setting", "value", "both"),
    [
        ("lr", 0.25, ("0.001", "0.25")),
        ("betas", (0.9, 0.75), ("0.999", "0.75")),
        ("maximize", True, ("False", "True")),
    ],
)
def test_different_setting_at_a_step(
    world: int, rank: int, kind: str, setting: str, value: Any, both: tuple[str, str]
) -> None:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **SCHEDULES)
    ours.run(BEFORE[kind])
    if rank == BAD:
        ours.optimizer.param_groups[1][setting] = value
    with pytest.raises(zeroone.DisagreementError) as caught:
        ours.optimizer.step()
    for words in (*both, "rank 0 has", f"rank {BAD} has", "group 1", setting):
        assert words in str(caught.value)
    ours.failed()
    assert ours.step() == kind
    ours.run(4)


SYNC_AT_4 = "what to do: rank 0 has a sync at step 4"
CALLED_AT_3 = r"rank 1 has sync\(\) called at step 3"


def test_sync_here_and_step_there(world: int, rank: int) -> None:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **SCHEDULES).run(3)
    with pytest.raises(zeroone.DisagreementError, match=f"{SYNC_AT_4}, {CALLED_AT_3}"):
        ours.optimizer.sync() if rank == BAD else ours.optimizer.step()
    ours.failed()
    assert ours.step() == "sync"


def test_a_rank_that_missed_a_step(world: int, rank: int) -> None:
    ours = trial.adamw(constant(groups=2), rank=rank, world=world).run(2)
    engine = ours.optimizer._engine
    counters = engine.counters
    if rank == BAD:
        engine.counters = {**counters, "step": counters["step"] - 1}
    with pytest.raises(
        zeroone.DisagreementError, match=r"0 has .* at step 3, rank 1 has .* at step 2"
    ):
        ours.optimizer.step()
    engine.counters = counters
    ours.failed()
    ours.run(2)


def test_states_of_different_steps(world: int, rank: int) -> None:
    ours = trial.adamw(constant(groups=2), rank=rank, world=world).run(2)
    before = everything(ours.optimizer)
    state = ours.optimizer.state_dict()
    if rank == BAD:
        for group in state["param_groups"]:
            group["zeroone"]["counters"]["step"] -= 1
    with pytest.raises(zeroone.DisagreementError, match=r"saved step: rank 0 has 2, rank 1 has 1"):
        ours.optimizer.load_state_dict(state)
    assert everything(ours.optimizer) == before
    ours.run(2)


def test_invalid_group_added_later(world: int, rank: int) -> None:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **SCHEDULES).run(3)
    before = everything(ours.optimizer)
    new = torch.nn.Parameter(torch.full((5,), float(rank)))
    for wrong, words in (
        ({"params": [torch.nn.Parameter(torch.ones(3).double())]}, "float64"),
        ({"params": [new], "lr": -3.0}, "Invalid learning rate: -3.0"),
    ):
        group = wrong if rank == BAD else {"params": [new]}
        raises_everywhere(
            rank, ValueError, words, lambda group=group: ours.optimizer.add_param_group(group)
        )
        assert bits(new) == bits(torch.full((5,), float(rank)))
        assert everything(ours.optimizer) == before
        assert len(ours.optimizer.param_groups) == 2
    ours.run(2)
    ours.add_param_group([(5,), (2, 2)], constant(groups=3))
    ours.run(4)


def test_different_groups_added_later(world: int, rank: int) -> None:
    ours = trial.zero_one_adam(constant(groups=2), rank=rank, world=world, **SCHEDULES).run(3)
    before = everything(ours.optimizer)
    new = torch.nn.Parameter(torch.ones(5 + (rank == BAD)))
    with pytest.raises(zeroone.DisagreementError, match=r"\[5\].*rank 1 has.*\[6\]"):
        ours.optimizer.add_param_group({"params": [new]})
    assert everything(ours.optimizer) == before
    assert len(ours.optimizer.param_groups) == 2
    ours.run(4)
