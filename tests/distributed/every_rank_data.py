"""On every rank: different numbers of batches and of tokens, and buffers."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from every_rank_use import of_all
from trial import bits

import zeroone
from zeroone.schedules import EveryStep, Interval


class Loader:
    """Yields `count` batches, and says that it has `length`."""

    def __init__(self, count: int, length: int | None = None) -> None:
        self.count = count
        self.length = count if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [3, 0, 2, 1], [0, 4, 7, 9], [5, 5, 5, 5]])
def test_even_batches(world: int, rank: int, counts: list[int]) -> None:
    longest = max(counts[:world])
    for _ in range(2):
        found = list(zeroone.even_batches(Loader(counts[rank])))
        assert found == [*range(counts[rank]), *[None] * (longest - counts[rank])]


def test_loaders_whose_length_is_wrong(world: int, rank: int) -> None:
    """The lengths decide, so that no rank waits for another."""
    found = list(zeroone.even_batches(Loader(4 + rank, 5 - rank)))
    assert found == ([0, 1, 2, 3, None] if rank == 0 else [0, 1, 2, 3, 4])


def test_loaders_without_a_length(world: int, rank: int) -> None:
    loader: Any = iter([1, 2]) if rank == 1 else [1, 2]
    with pytest.raises(ValueError, match=r"loaders of ranks \[1\] have no length"):
        zeroone.even_batches(loader)
    assert list(zeroone.even_batches([1], dist.new_group([rank], use_local_synchronization=True)))


def test_training_on_different_numbers_of_batches(world: int, rank: int) -> None:
    """A rank without a batch counts as one whose gradient is zero."""
    parameters = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
    uneven, zeros = (
        zeroone.ZeroOneAdam([p], variance_schedule=Interval(5), sync_schedule=Interval(3))
        for p in parameters
    )
    noise = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(50, generator=noise) for _ in range(20 - 4 * rank)]
    for gradient in zeroone.even_batches(gradients):
        uneven.zero_grad()
        if gradient is not None:
            (parameters[0] @ gradient).backward()
        uneven.step()
        parameters[1].grad = torch.zeros(50) if gradient is None else gradient.clone()
        zeros.step()
        assert bits(parameters[0]) == bits(parameters[1])
    assert uneven.stats.steps == 20
    assert 0 < uneven.stats.syncs + uneven.stats.refreshes < 20


def test_different_numbers_of_tokens(world: int, rank: int) -> None:
    """The loss of a rank is divided by a fixed number, not by its own number of tokens: then the
    mean over ranks is the mean over all tokens, times the tokens there are by those expected."""
    expected = 40
    counts = [30 + 7 * r for r in range(world)]
    torch.manual_seed(0)
    tokens = [torch.randn(count, 9, dtype=torch.float64) for count in counts]
    start = torch.randn(9)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = zeroone.ZeroOneAdam([parameter], variance_schedule=EveryStep())
    losses = (tokens[rank].float() @ parameter).square()
    (losses.sum() / expected).backward()
    optimizer.step()

    every = torch.cat(tokens)
    of_mean = 2 * (every * (every @ start.double())[:, None]).mean(0)
    factor = sum(counts) / (world * expected)
    mean = optimizer.state[parameter]["exp_avg"].double() / (1 - 0.9)
    torch.testing.assert_close(mean, factor * of_mean, rtol=1e-5, atol=0)


class Buffers(torch.nn.Module):
    """Buffers of many types and shapes, in a tree, that differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.norm = torch.nn.BatchNorm1d(5)
        for statistic in (self.norm.running_mean, self.norm.running_var):
            statistic.normal_()
        self.norm.num_batches_tracked += rank
        self.tensors = {
            "mask": torch.tensor([True, rank == 1, False]),
            "empty": torch.zeros(0, 3),
            "low": torch.randn(7).bfloat16(),
            "sixteen": torch.tensor(60000.0 + 32 * rank, dtype=torch.float16),
            "exact": torch.randn(3, dtype=torch.float64),
            "strided": torch.randn(3, 4).t(),
            "same": torch.linspace(0.1, 1.7, 99),
            "whole": torch.full((2,), 2**60 + rank),
        }
        for name, tensor in self.tensors.items():
            self.register_buffer(name, tensor.clone(), persistent=name != "same")


def everything(module: torch.nn.Module) -> list[bytes]:
    tensors = (*module.buffers(), *module.parameters())
    return [x.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors]


def test_average_buffers(world: int, rank: int) -> None:
    all_ranks = [Buffers(r) for r in range(world)]
    module = copy.deepcopy(all_ranks[rank])
    parameters = [bits(p) for p in module.parameters()]
    strides = [b.stride() for b in module.buffers()]
    zeroone.average_buffers(module)
    assert len(set(map(tuple, of_all(everything(module))))) == 1
    assert [bits(p) for p in module.parameters()] == parameters
    assert [b.stride() for b in module.buffers()] == strides
    for name, buffer in module.named_buffers():
        before = [dict(m.named_buffers())[name] for m in all_ranks]
        assert buffer.dtype == before[0].dtype
        if buffer.is_floating_point():
            mean = np.mean([x.double().numpy() for x in before], axis=0)
            assert torch.equal(buffer, torch.as_tensor(mean).to(buffer.dtype))
        else:
            assert torch.equal(buffer, before[0])
    assert bits(module.same) == bits(all_ranks[0].same)
    zeroone.average_buffers(torch.nn.Linear(2, 2))  # which has none


def other_shape(module: Buffers) -> None:
    module.low = torch.zeros(8, dtype=torch.bfloat16)


def other_type(module: Buffers) -> None:
    module.low = torch.zeros(7)


def another(module: Buffers) -> None:
    module.register_buffer("low2", torch.zeros(1))


def sparse(module: Buffers) -> None:
    module.low = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_shape, r"buffer low: rank 0 has torch.bfloat16 \[7\], rank 1 has .* \[8\]"),
        (other_type, r"buffer low: rank 0 has torch.bfloat16 \[7\], rank 1 has torch.float32"),
        (another, "rank 1 has"),
        (sparse, "rank 1 failed"),
    ],
)
def test_different_buffers(
    world: int, rank: int, change: Callable[[Buffers], None], words: str
) -> None:
    module = Buffers(rank)
    if rank == 1:
        change(module)
    before = everything(module) if change is not sparse else []
    own: type[Exception] = RuntimeError if change is sparse else zeroone.DisagreementError
    with pytest.raises(own, match=None if own is RuntimeError and rank == 1 else words):
        zeroone.average_buffers(module)
    assert change is sparse or everything(module) == before
