"""What is saved, as other programs see it: torch's optimizers, its hooks; states of other Adams."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trial
from trial import bits

import zeroone
from zeroone.schedules import Doubling, EveryStep, Interval

SHAPES = [(30, 7), (), (0,), (5,)]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "ZeroOneAdam": lambda p, **a: zeroone.ZeroOneAdam(p, variance_schedule=EveryStep(), **a),
    "OneBitAdam": lambda p, **a: zeroone.OneBitAdam(p, warmup_steps=1000, **a),
    "AdamW": zeroone.AdamW,
}


def parameters(start: float = 1.0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full(shape, start)) for shape in SHAPES]


def step(on: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    for p in on:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def run(on: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:
        step(on, optimizer, t)


def test_keys() -> None:
    on = parameters()
    optimizer = zeroone.ZeroOneAdam(on, variance_schedule=EveryStep(2), sync_schedule=Interval(9))
    run(on, optimizer, range(4))
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    ours = {"anchor", "exp_avg.rank0", "accumulated.rank0", "worker_error.rank0"}
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq", *ours}
    assert "zeroone" not in optimizer.param_groups[0]
    assert saved["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert saved["state"][0]["anchor"].data_ptr() == optimizer.state[on[0]]["anchor"].data_ptr()


def test_an_unborn_coordinate_has_no_momentum_for_others() -> None:
    on = parameters()
    optimizer = zeroone.ZeroOneAdam(on, variance_schedule=EveryStep(2), sync_schedule=Interval(9))
    run(on, optimizer, range(3))
    state = optimizer.state[on[0]]
    state["exp_avg_sq"][0] = 0
    state["exp_avg"][0] = 5
    saved = copy.deepcopy(optimizer.state_dict())
    assert not saved["state"][0]["exp_avg"][0].any()
    assert torch.equal(saved["state"][0]["exp_avg"][1:], state["exp_avg"][1:])
    state["exp_avg"].zero_()
    optimizer.load_state_dict(saved)
    assert (state["exp_avg"][0] == 5).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_adamw_loads_our_state(name: str) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = OPTIMIZERS[name](mine, lr=1e-2, weight_decay=0.1)
    run(mine, optimizer, range(6))
    adamw = torch.optim.AdamW(theirs, lr=1.0)
    adamw.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for p, q in zip(theirs, mine, strict=True):
        p.data.copy_(q)
    for t in range(6, 10):
        step(mine, optimizer, t)
        step(theirs, adamw, t)
    assert [adamw.state[p]["step"].item() for p in theirs] == [10] * 4
    for p, q in zip(theirs, mine, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("theirs_is", ["AdamW", "Adam"])
def test_we_take_over_torchs_state(
    name: str, theirs_is: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, mine = parameters(), parameters(start=9.0)
    weight_decay = 0.0 if theirs_is == "Adam" else 0.1
    adam = getattr(torch.optim, theirs_is)(theirs, lr=1e-2, weight_decay=weight_decay)
    run(theirs, adam, range(6))
    for p, q in zip(mine, theirs, strict=True):
        p.data.copy_(q)
    optimizer = OPTIMIZERS[name](mine)
    addresses = [v.data_ptr() for p in mine for v in (p, *optimizer.state[p].values())]
    with caplog.at_level(logging.INFO, "zeroone"):
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert "taking over a state of torch's Adam or AdamW: step 6" in caplog.text
    assert set(optimizer.param_groups[0]) == {*optimizer.defaults, "params"}
    counters = trial.counters(optimizer.state_dict())
    assert (counters["step"], counters["refresh"]["next"]) == (6, 7)
    for p, q in zip(mine, theirs, strict=True):
        for vector in ("exp_avg", "exp_avg_sq"):
            assert bits(optimizer.state[p][vector]) == bits(adam.state[q][vector])
        assert bits(optimizer.state[p]["anchor"]) == bits(q) == bits(p)
        assert optimizer.state[p]["step"] == 6
    assert [v.data_ptr() for p in mine for v in (p, *optimizer.state[p].values())] == addresses
    for t in range(6, 10):
        step(mine, optimizer, t)
        step(theirs, adam, t)
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_parameters_of_fewer_steps_keep_their_corrected_moments() -> None:
    theirs = parameters()
    adam = torch.optim.AdamW(theirs)
    run(theirs[:2], adam, range(9))  # the others' first gradient comes later, or never
    run(theirs[:3], adam, range(9, 11))
    optimizer = zeroone.ZeroOneAdam(theirs)
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    for p in theirs[:3]:
        s = adam.state[p]["step"].item()
        for vector, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
            corrected = adam.state[p][vector] / (1 - beta**s)
            torch.testing.assert_close(optimizer.state[p][vector] / (1 - beta**11), corrected)
    assert not optimizer.state[theirs[3]]["exp_avg_sq"].any()
    run(theirs, optimizer, range(11, 15))


def test_l2_of_adam_is_said(caplog: pytest.LogCaptureFixture) -> None:
    theirs = parameters()
    adam = torch.optim.Adam(theirs, weight_decay=0.1)
    run(theirs, adam, range(2))
    zeroone.AdamW(theirs).load_state_dict(adam.state_dict())
    assert "L2; from here on it is decoupled" in caplog.text


def of_deepspeed(name: str, flat: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What DeepSpeed's optimizers have after 40 steps, and v per parameter."""
    generator = torch.Generator().manual_seed(0)
    v = [torch.rand(shape, generator=generator) for shape in SHAPES]
    parts = [torch.cat([x.flatten() for x in v])] if flat else v
    state: dict[int, dict[str, Any]] = {}
    for index, part in enumerate(parts):
        state[index] = {
            "step": 40,
            "exp_avg": part * 2,
            "exp_avg_sq": part,
            "tensor_size": part.numel(),
            "corrected_tensor_size": part.numel() + 32,
            "server_chunk_size": 64,
            "worker_error": torch.ones(part.numel() + 32),
            "server_error": torch.ones(64),
        }
        if name == "ZeroOneAdam":
            state[index] |= {
                "var_interval": 4,
                "var_counter": 3,
                "local_step_interval": 1,
                "local_step_counter": 0,
                "lrs": 0,
                "momentum_accumulator": torch.zeros_like(part),
            }
    group = {"lr": 0.003, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-6}
    group |= {"weight_decay": 0.1, "max_grad_norm": 0.0, "params": list(state)}
    return {"state": state, "param_groups": [group]}, v


@pytest.mark.parametrize("name", ["ZeroOneAdam", "OnebitAdam"])
@pytest.mark.parametrize("flat", [False, True])
def test_we_take_over_deepspeeds_state(
    name: str, flat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state, v = of_deepspeed(name, flat)
    on = parameters(start=2.0)
    optimizer = zeroone.ZeroOneAdam(on, variance_schedule=Doubling(2), sync_schedule=Interval(3))
    run(on, optimizer, range(5))
    present = [p.clone() for p in on]
    with caplog.at_level(logging.INFO, "zeroone"):
        optimizer.load_state_dict(state)
    assert f"taking over a state of DeepSpeed's {name}: step 40" in caplog.text
    assert "dropped" in caplog.text
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.003, (0.9, 0.99), 0.1)
    assert "max_grad_norm" not in group
    for p, x, before in zip(on, v, present, strict=True):
        own = optimizer.state[p]
        assert bits(own["exp_avg_sq"]) == bits(x)
        assert bits(own["exp_avg"]) == bits(x * 2)
        assert bits(own["anchor"]) == bits(before) == bits(p)
        assert not own["worker_error"].any()
        assert not own["accumulated"].any()
    run(on, optimizer, range(40, 50))
    assert all(p.isfinite().all() for p in on)


def test_deepspeeds_state_of_another_model_is_refused() -> None:
    state, _ = of_deepspeed("OnebitAdam", flat=True)
    on = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))]
    with pytest.raises(ValueError, match=r"exp_avg of parameter group 0 of shape \[216\]"):
        zeroone.OneBitAdam(on, warmup_steps=3).load_state_dict(state)


def test_hooks() -> None:
    seen: list[str] = []
    on = parameters()
    optimizer = zeroone.AdamW(on)
    run(on, optimizer, range(2))

    def after_saving(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert "zeroone" in saved["param_groups"][0]
        return {**saved, "hooked": True}

    def before_loading(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert saved.pop("hooked")  # from a copy
        seen.append("before loading")
        return dict(saved)

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert saved["hooked"]
    assert seen == ["before saving", "before loading", "after loading"]


@pytest.mark.parametrize("cls", [zeroone.ZeroOneAdam, zeroone.OneBitAdam, zeroone.AdamW])
def test_methods_have_torchs_signatures(cls: type[torch.optim.Optimizer]) -> None:
    """Same names, order and defaults; what is added is keyword-only."""
    for base in (torch.optim.Optimizer, torch.optim.AdamW):
        for name, theirs in inspect.getmembers(base, inspect.isfunction):
            if name.startswith("_") and name != "__init__":
                continue
            expected = list(inspect.signature(theirs).parameters.values())
            ours = list(inspect.signature(getattr(cls, name)).parameters.values())
            if name == "__init__":
                if base is torch.optim.Optimizer:
                    continue  # no optimizer of torch's has its signature
                shared = {p.name for p in expected}
                positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
                assert [p.name for p in positional] == [p.name for p in expected][: len(positional)]
                defaults = {p.name: p.default for p in expected}
                assert all(p.default == defaults[p.name] for p in ours if p.name in shared)
            else:
                compared = ours[: len(expected)]
                assert [(p.name, p.kind, p.default) for p in compared] == [
                    (p.name, p.kind, p.default) for p in expected
                ], name
                positional = compared
            assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(positional) :]), name
