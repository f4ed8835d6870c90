"""Under DistributedDataParallel as without it, and nothing is sent but by the optimizer."""

import copy
from contextlib import nullcontext
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trial import bits

import zeroone
from zeroone.schedules import Doubling, Interval


class Model(torch.nn.Module):
    """With buffers, and with a branch that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))
        self.branches = torch.nn.ModuleList([torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.first(x))


def collectives(profile: Any) -> set[str]:
    names = {event.name for event in profile.events()}
    return {name.removeprefix("gloo:") for name in names if name.startswith("gloo:")}


def profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def train(arguments: dict[str, Any], branches: bool) -> None:
    rank = dist.get_rank()
    plain = Model()
    if not branches:
        del plain.branches[1]
    wrapped = DistributedDataParallel(copy.deepcopy(plain), **arguments)
    assert zeroone.local_gradients(wrapped) is wrapped
    modules: tuple[Any, Any] = plain, wrapped
    optimizers = [
        zeroone.ZeroOneAdam(
            m.parameters(), variance_schedule=Doubling(2), sync_schedule=Interval(3)
        )
        for m in modules
    ]
    with profiler() as profile:
        for t in range(12):
            for module, optimizer in zip(modules, optimizers, strict=True):
                noise = torch.Generator().manual_seed(100 * t + rank)
                optimizer.zero_grad()
                passes = t % 3 + (rank == 0)  # none at all, with one rank, or several
                for i in range(passes):
                    last = i == passes - 1 or module is plain
                    with nullcontext() if last else module.no_sync():
                        x = torch.randn(4, 6, generator=noise)
                        module(x, (t + i + rank) % 2 if branches else 0).square().mean().backward()
                optimizer.step()
            pairs: Any = zip(
                (*plain.parameters(), *plain.buffers()),
                (*wrapped.parameters(), *wrapped.buffers()),
                strict=True,
            )
            for mine, theirs in pairs:
                assert torch.equal(mine, theirs), t
                assert (mine.grad is None) == (theirs.grad is None), t
                assert mine.grad is None or bits(mine.grad) == bits(theirs.grad), t
    assert collectives(profile) == {"all_to_all", "all_gather"}
    assert optimizers[1].stats.syncs > 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "option", ["", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"]
)
def test_local_gradients(ranks: int, option: str) -> None:
    arguments = {option: True} if option else {}
    launch.run_ranks(train, ranks, arguments, option == "find_unused_parameters")


def turned_on_again() -> None:
    module = zeroone.local_gradients(DistributedDataParallel(torch.nn.Linear(3, 1)))
    module.require_backward_grad_sync = True
    values = torch.full((1, 3), float(dist.get_rank()))
    for _ in range(2):
        module.zero_grad()
        module(values).sum().backward()
        assert torch.equal(module.module.weight.grad, values)


def test_gradients_stay_local_where_a_program_turns_synchronisation_on_again() -> None:
    launch.run_ranks(turned_on_again, 2)


def without() -> set[str]:
    module = DistributedDataParallel(Model(), find_unused_parameters=True)
    with profiler() as profile:
        module(torch.ones(4, 6), 0).sum().backward()
        module(torch.ones(4, 6), 0).sum().backward()
    return collectives(profile)


def test_the_profiler_sees_what_is_sent() -> None:
    assert launch.run_ranks(without, 2) == [{"all_reduce", "broadcast"}] * 2


def test_other_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got Linear"):
        zeroone.local_gradients(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
