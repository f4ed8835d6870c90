"""One process without a process group: the same algorithm, and a drop-in for torch's AdamW."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trial
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plain_twin import Options
from trial import bits, constant

import zeroone
from zeroone.schedules import Doubling, EveryStep, Interval, LearningRateTied, Schedule, Steps

LR = st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 1e-3, 1e-2])
until = st.none() | st.integers(1, 12)
schedules = st.one_of(
    st.builds(EveryStep, until),
    st.builds(Interval, st.integers(1, 7)),
    st.builds(Doubling, st.integers(1, 4), until),
    st.builds(LearningRateTied, st.integers(1, 9)),
    st.builds(Steps, st.sets(st.integers(1, 20), min_size=1).map(sorted)),
)
numel = st.integers(0, 40) | st.sampled_from([2047, 2048, 2049, 5000])
shapes = st.lists(st.lists(numel, min_size=1, max_size=3), min_size=1, max_size=3)


@st.composite
def plans(draw: Callable[..., Any], groups: int) -> list[list[Options]]:
    """Learning rates that fall, rise again and are zero, at random; other settings by group."""
    fixed = [
        {
            "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.95, 0.9)])),
            "eps": draw(st.sampled_from([1e-8, 1e-3, 0.0])),
            "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
            "maximize": draw(st.booleans()),
        }
        for _ in range(groups)
    ]
    steps = draw(st.integers(1, 16))
    return [[Options(lr=draw(LR), **settings) for settings in fixed] for _ in range(steps)]


@settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
@given(data=st.data(), sizes=shapes, variance=schedules, sync=schedules)
def test_any_problem_is_as_in_the_twin(
    data: st.DataObject, sizes: list[list[int]], variance: Schedule, sync: Schedule
) -> None:
    plan = data.draw(plans(len(sizes)))
    make = data.draw(st.sampled_from([trial.zero_one_adam, trial.one_bit_adam, trial.adamw]))
    arguments: dict[str, Any] = {"bias_correction": data.draw(st.booleans())}
    if make is not trial.adamw:
        arguments["scale"] = data.draw(st.sampled_from(["l1", "l2"]))
    if make is trial.one_bit_adam:
        arguments["warmup_steps"] = data.draw(st.integers(1, 8))
    if make is trial.zero_one_adam:
        arguments |= {"variance_schedule": variance, "sync_schedule": sync}
    ours = make(
        lambda t: plan[max(0, t - 1)],
        [[(n,) for n in group] for group in sizes],
        dtype=data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        seed=data.draw(st.integers(0, 1000)),
        **arguments,
    )
    for _ in plan:
        action = data.draw(st.sampled_from(["step"] * 6 + ["sync", "not finite"]))
        if action == "sync":
            ours.sync()
        elif action == "not finite":
            ours.step(not_finite=[0])
        else:
            ours.step()


@pytest.mark.parametrize("threads", [1, 3])
def test_long_run(threads: int) -> None:
    """More doublings than the random problems reach, and a refresh that waits for an interval."""

    def falling(t: int) -> list[Options]:
        return [Options(lr=1e-3 * 0.98**t), Options(lr=1e-4)]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = trial.zero_one_adam(
            falling, variance_schedule=Doubling(4), sync_schedule=Interval(5)
        ).run(150)
    finally:
        torch.set_num_threads(before)
    refreshes = [t + 1 for t, kind in enumerate(ours.twin.kinds) if kind == "refresh"]
    # Due after 2 steps, and then 4, 8 and 16, but taken after the sync that ends an interval.
    assert refreshes[:6] == [1, 2, 3, 4, 5, 11]
    assert ours.twin.kinds.count("sync") > 20


def test_default_refreshes_are_the_golden_list() -> None:
    ours = trial.zero_one_adam(constant(), [[(3,)]]).run(121)
    kinds = ours.twin.kinds
    refreshes = [t + 1 for t, kind in enumerate(kinds) if kind == "refresh"]
    assert refreshes == [*range(1, 17), *range(17, 49, 2), *range(49, 113, 4), 113, 121]
    assert set(kinds) == {"refresh", "sync"}  # a constant learning rate stays at interval 1


def test_first_step_is_a_refresh_whatever_the_schedule() -> None:
    ours = trial.zero_one_adam(constant(), [[(3,)]], variance_schedule=Steps([3, 7])).run(8)
    assert [t + 1 for t, kind in enumerate(ours.twin.kinds) if kind == "refresh"] == [1, 3, 7]


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))


def batch(t: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(t))
    return x, (x[:, :1] * x[:, 1:2]).sin()


def loss_of(module: torch.nn.Module, t: int) -> torch.Tensor:
    x, y = batch(t)
    return torch.nn.functional.mse_loss(module(x), y)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for t in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module, t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("algorithm", ["AdamW", "ZeroOneAdam", "OneBitAdam"])
def test_refresh_every_step_is_torch_adamw(algorithm: str) -> None:
    modules = model(), model()
    arguments: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.1}
    losses = train(modules[0], torch.optim.AdamW(modules[0].parameters(), **arguments), 60)
    if algorithm == "ZeroOneAdam":
        arguments["variance_schedule"] = EveryStep()
    elif algorithm == "OneBitAdam":
        arguments["warmup_steps"] = 60
    ours = getattr(zeroone, algorithm)(modules[1].parameters(), **arguments)
    assert train(modules[1], ours, 60) == pytest.approx(losses, rel=1e-3)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for theirs, mine in zip(*(m.parameters() for m in modules), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["ZeroOneAdam", "OneBitAdam"])
def test_compressed_training_learns(algorithm: str) -> None:
    arguments: dict[str, Any] = {
        "ZeroOneAdam": {"variance_schedule": Doubling(8), "sync_schedule": Interval(4)},
        "OneBitAdam": {"warmup_steps": 20},
    }[algorithm]
    module = model()
    optimizer = getattr(zeroone, algorithm)(module.parameters(), lr=5e-3, **arguments)
    losses = train(module, optimizer, 100)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert optimizer.stats.syncs > 10
    assert optimizer.stats.bytes_sent == 0
    assert optimizer.stats.bits_per_parameter_step == 0


# --- what a torch user expects ------------------------------------------------------------------


@pytest.mark.parametrize("cls", [zeroone.ZeroOneAdam, zeroone.OneBitAdam, zeroone.AdamW])
def test_signatures_are_those_of_torch(cls: type[torch.optim.Optimizer]) -> None:
    theirs = inspect.signature(torch.optim.AdamW.__init__).parameters
    ours = inspect.signature(cls.__init__).parameters
    names = ["self", "params", "lr", "betas", "eps", "weight_decay"]
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == names == list(theirs)[:6]
    for name in names:
        assert ours[name].default == theirs[name].default
    assert ours["maximize"].default == theirs["maximize"].default
    assert cls.zero_grad is torch.optim.Optimizer.zero_grad
    for member in (cls, cls.step, cls.sync, cls.state_dict, cls.load_state_dict):
        assert inspect.getdoc(member)


def make(module: torch.nn.Module, **others: Any) -> zeroone.ZeroOneAdam:
    arguments = {
        "lr": 5e-3,
        "variance_schedule": Doubling(4),
        "sync_schedule": LearningRateTied(4),
    }
    return zeroone.ZeroOneAdam(module.parameters(), **{**arguments, **others})


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=40),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=10),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1, t / 5) * 0.95**t),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=41),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers(name: str) -> None:
    """They see an ordinary optimizer, and what they set is what is used."""
    modules = model(), model()
    scheduled, by_hand = make(modules[0]), make(modules[1])
    scheduler = SCHEDULERS[name](scheduled)
    rates = set()
    for t in range(40):
        rates.add(scheduled.param_groups[0]["lr"])
        for key in ("lr", "betas"):
            by_hand.param_groups[0][key] = scheduled.param_groups[0][key]
        for module, optimizer in zip(modules, (scheduled, by_hand), strict=True):
            optimizer.zero_grad()
            loss_of(module, t).backward()
            optimizer.step()
        scheduler.step()
    assert len(rates) >= 10
    for mine, theirs in zip(*(m.parameters() for m in modules), strict=True):
        assert bits(mine) == bits(theirs)
    stats = scheduled.stats
    assert stats.syncs > 3
    assert stats.rounds < stats.steps or name == "one cycle"


def test_closure() -> None:
    modules = model(), model()
    optimizers = [make(m) for m in modules]
    losses = train(modules[0], optimizers[0], 10)
    for t in range(10):

        def closure(t: int = t) -> float:
            assert torch.is_grad_enabled()
            optimizers[1].zero_grad()
            loss = loss_of(modules[1], t)
            loss.backward()
            return loss.item()

        assert optimizers[1].step(closure) == losses[t]
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))


def test_gradient_accumulation() -> None:
    """Micro-batches are no steps: schedules count calls of step()."""
    modules = model(), model()
    whole, parts = (make(m) for m in modules)
    for t in range(12):
        x, y = batch(t)
        whole.zero_grad()
        torch.nn.functional.mse_loss(modules[0](x), y).backward()
        parts.zero_grad()
        for i in range(0, 16, 4):
            error = torch.nn.functional.mse_loss(modules[1](x[i : i + 4]), y[i : i + 4])
            (error / 4).backward()
        whole.step()
        parts.step()
    assert parts.stats.steps == 12
    assert parts.stats.refreshes == whole.stats.refreshes
    for mine, theirs in zip(*(m.parameters() for m in modules), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_clipping_and_missing_gradients() -> None:
    module = model()
    module.unused = torch.nn.Linear(3, 3)
    module[0].bias.requires_grad_(False)
    before = [p.detach().clone() for p in module.unused.parameters()]
    optimizer = make(module, weight_decay=0.0)
    frozen = module[0].bias.detach().clone()
    for t in range(10):
        optimizer.zero_grad()
        x, y = batch(t)
        torch.nn.functional.mse_loss(module[2](module[1](module[0](x))), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        assert norm > 0.01
        optimizer.step()
    assert torch.equal(module[0].bias, frozen)
    assert all(map(torch.equal, module.unused.parameters(), before))
    assert optimizer.stats.steps == 10


def test_learning_rate_as_a_tensor() -> None:
    modules = model(), model()
    rate = torch.tensor(5e-3, dtype=torch.float64)
    optimizers = make(modules[0]), make(modules[1], lr=rate)
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer, 10)
        if optimizer is optimizers[1]:
            rate.fill_(1e-3)  # in place, as a capturable scheduler would
        else:
            optimizer.param_groups[0]["lr"] = 1e-3
        train(module, optimizer, 10)
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))
    assert optimizers[1].param_groups[0]["lr"] is rate


def test_groups_and_names() -> None:
    module = model()
    groups = [
        {"params": [(n, p) for n, p in module.named_parameters() if "weight" in n], "lr": 1e-2},
        {"params": [(n, p) for n, p in module.named_parameters() if "bias" in n], "lr": 0.0},
    ]
    biases = [p.detach().clone() for n, p in module.named_parameters() if "bias" in n]
    optimizer = zeroone.ZeroOneAdam(groups, variance_schedule=EveryStep(2))
    losses = train(module, optimizer, 20)
    assert losses[-1] < losses[0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight"]
    after = [p for n, p in module.named_parameters() if "bias" in n]
    assert all(map(torch.equal, after, biases))
    module[0].weight.grad = torch.ones(20, 6).to_sparse()
    with pytest.raises(RuntimeError, match=r"the gradient of parameter 0\.weight is sparse"):
        optimizer.step()


def test_gradients_that_are_not_contiguous_or_of_another_type() -> None:
    a, b = (torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    optimizers = [zeroone.ZeroOneAdam([p], variance_schedule=EveryStep(1)) for p in (a, b)]
    for t in range(6):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(t)).t()
        assert not gradient.is_contiguous()
        a.grad, b.grad = gradient, gradient.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert bits(a) == bits(b) != bits(torch.ones(4, 3))


def test_autograd_is_told_of_writes() -> None:
    module = model()
    optimizer = make(module)
    train(module, optimizer, 3)
    loss = loss_of(module, 0)  # saves weights for its backward pass
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_dict_is_restored_in_another_optimizer() -> None:
    modules = model(), model()
    first = make(modules[0])
    train(modules[0], first, 22)
    saved = copy.deepcopy(first.state_dict())
    assert trial.counters(saved)["step"] == 22
    losses = train(modules[0], first, 15)
    second = make(modules[1], lr=1.0)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 5e-3
    assert train(modules[1], second, 15) == losses
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))
    for p, q in zip(*(m.parameters() for m in modules), strict=True):
        for name, value in first.state[p].items():
            assert bits(value) == bits(second.state[q][name])
            assert value.data_ptr() != second.state[q][name].data_ptr()


def test_hooks() -> None:
    seen = []
    module = model()
    optimizer = make(module)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    train(module, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "loaded"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"scale": "l0"}, "Invalid scale: 'l0'"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], words: str) -> None:
    module = model()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=words):
        make(module, **arguments)
    assert all(map(torch.equal, module.parameters(), before))


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (EveryStep, [0]),
        (Interval, [0]),
        (Doubling, [0]),
        (Doubling, [4, 0]),
        (LearningRateTied, [0]),
        (Steps, [[3, 3]]),
        (Steps, [[0, 3]]),
    ],
)
def test_invalid_schedules(cls: Callable[..., Any], values: list[Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        cls(*values)


def test_all_gradients_not_finite_leave_no_trace() -> None:
    ours = trial.zero_one_adam(
        constant(groups=2), variance_schedule=EveryStep(2), sync_schedule=Interval(3)
    )
    for _ in range(8):
        ours.step()
        assert ours.step(not_finite=[0]) == "skipped"
    assert ours.optimizer.stats.nonfinite_gradients == 8
    assert {"refresh", "local", "sync", "skipped"} == set(ours.twin.kinds)


def test_without_attributes_that_cannot_be() -> None:
    """A property of the package: everything public is there, and is documented."""
    for name in zeroone.__all__:
        assert getattr(zeroone, name) is not None
    assert issubclass(zeroone.CommunicationError, zeroone.Error)
    assert issubclass(zeroone.DisagreementError, zeroone.Error)
    assert zeroone.__version__
