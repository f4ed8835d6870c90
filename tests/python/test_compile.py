"""Compiled models train as plain ones do; the optimizer's step is left out of compilation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trial import bits

import zeroone
from zeroone.schedules import Doubling, Interval


def make(model: torch.nn.Module) -> Any:
    return zeroone.ZeroOneAdam(
        model.named_parameters(), variance_schedule=Doubling(2), sync_schedule=Interval(3)
    )


def loss_of(model: torch.nn.Module, t: int) -> torch.Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(t))
    return torch.nn.functional.cross_entropy(model(x), torch.arange(16) % 4)


@pytest.fixture
def models() -> tuple[torch.nn.Module, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    return plain, torch.compile(copy.deepcopy(plain), backend="aot_eager")


def test_compiled_model(models: tuple[torch.nn.Module, Any]) -> None:
    optimizers = tuple(map(make, models))
    for t in range(12):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if t % 2:
                loss_of(model, t).backward()
                optimizer.step()
            else:

                def closure(model: Any = model, t: int = t) -> Any:
                    loss = loss_of(model, t)
                    loss.backward()
                    return loss

                optimizer.step(closure)
        plain, compiled = (list(map(bits, model.parameters())) for model in models)
        assert plain == compiled
    assert optimizers[0].stats.syncs > 0
    assert optimizers[1].param_groups[0]["param_names"][0] == "_orig_mod.0.weight"

    # The state of one fits the other, as parameters have numbers in it.
    resumed = make(models[1])
    resumed.load_state_dict(optimizers[0].state_dict())
    assert list(map(bits, models[1].parameters())) == plain


def test_compiled_step(models: tuple[torch.nn.Module, Any]) -> None:
    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise AssertionError(f"compiled {graph}")

    plain = models[0]
    other = copy.deepcopy(plain)
    optimizer, compiled = make(plain), make(other)
    step = torch.compile(compiled.step, backend=backend)
    for t in range(8):
        for model, take in ((plain, optimizer.step), (other, step)):
            model.zero_grad()
            loss_of(model, t).backward()
            take()
        assert list(map(bits, plain.parameters())) == list(map(bits, other.parameters()))
    assert compiled.stats.steps == 8
