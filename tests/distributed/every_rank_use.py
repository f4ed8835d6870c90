"""On every rank: the bare collective, and DistributedDataParallel."""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from plain_twin import Layout, Vector, f32, one_bit_mean
from torch.nn.parallel import DistributedDataParallel
from trial import bits

import zeroone
from zeroone import schedules

Exact = npt.NDArray[np.float64]


def of_all(value: object) -> list[Any]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    return held


def inputs(t: int, rank: int, n: int) -> Vector:
    """Noise around a vector that is the same at all times; some zeros, which count as positive."""
    mean = np.linspace(-1, 2, n, dtype=f32)
    values = (mean + np.random.default_rng([t, rank]).standard_normal(n)).astype(f32)
    values[1::5] = 0
    values[2::7] = -0.0
    return values


def residual(collective: zeroone.OneBitAllReduce) -> Exact:
    """E = mean of the workers' + all chunks of the servers'."""
    workers = of_all(collective.worker_error.double().numpy())
    servers = of_all(collective.server_error.double().numpy())
    total: Exact = np.mean(workers, axis=0) + np.concatenate(servers)
    return total


@pytest.mark.parametrize("scale", ["l1", "l2"])
@pytest.mark.parametrize("n", [1, 50, 9001])
def test_one_bit_all_reduce(world: int, rank: int, n: int, scale: str) -> None:
    """Bytes as the twin's, the same everywhere, and nothing is lost for good."""
    collective = zeroone.OneBitAllReduce(n, scale=scale)
    layout = Layout([n], world)
    born = np.ones(n, bool)
    worker_error = [np.zeros(n, f32) for _ in range(world)]
    server_error = np.zeros(n, f32)
    assert collective.server_error.shape == server_error[layout.chunks[rank]].shape
    for t in range(10):
        z = [inputs(t, r, n) for r in range(world)]
        tensor = torch.from_numpy(z[rank].copy())
        before = residual(collective)
        assert collective.reduce_(tensor) is tensor
        after = residual(collective)

        wanted, worker_error, server_error = one_bit_mean(
            layout, born, scale, f32(1), z, worker_error, server_error
        )
        assert bits(tensor) == wanted.tobytes()
        assert bits(collective.worker_error) == worker_error[rank].tobytes()
        assert bits(collective.server_error) == server_error[layout.chunks[rank]].tobytes()
        assert len(set(of_all(bits(tensor)))) == 1

        mean = np.mean(np.asarray(z, np.float64), axis=0)
        lost = tensor.double().numpy() + after - (mean + before)
        assert np.linalg.norm(lost) < 1e-6 * np.linalg.norm(mean)
        assert n == 1 or np.linalg.norm(after) > 0.01 * np.linalg.norm(mean)
    per_round = 2 * (world - 1) * (40 + layout.one_bit_section)
    assert 10 * per_round <= collective.bytes_sent <= 10 * per_round + 1000


def test_running_mean_tends_to_a_constant(world: int, rank: int) -> None:
    n = 200
    collective = zeroone.OneBitAllReduce(n)
    wanted = np.mean([inputs(0, r, n) for r in range(world)], axis=0)
    total = np.zeros(n)
    distances = []
    for _ in range(400):
        total += collective.reduce_(torch.from_numpy(inputs(0, rank, n))).double().numpy()
        distances.append(np.linalg.norm(total / (len(distances) + 1) - wanted))
    assert distances[0] > 0.3 * np.linalg.norm(wanted)  # one bit alone says little
    assert distances[-1] < 0.05 * np.linalg.norm(wanted)
    assert distances[-1] < 0.5 * distances[len(distances) // 4]


def test_one_bit_all_reduce_of_values_that_are_not_finite(world: int, rank: int) -> None:
    n = 100
    disturbed, zero = (zeroone.OneBitAllReduce(n) for _ in range(2))
    for t in range(3):
        bad, good = (torch.from_numpy(inputs(t, rank, n)) for _ in range(2))
        if t == 1 and rank == 1:
            bad[99] = float("inf")
            good.zero_()
        assert bits(disturbed.reduce_(bad)) == bits(zero.reduce_(good))
    before = bits(disturbed.worker_error), bits(disturbed.server_error)
    bad = torch.full((n,), float("nan"))
    with pytest.raises(ValueError, match="finite"):
        disturbed.reduce_(bad)
    assert bad.isnan().all()
    assert (bits(disturbed.worker_error), bits(disturbed.server_error)) == before
    assert bits(disturbed.reduce_(torch.ones(n))) == bits(zero.reduce_(torch.ones(n)))


def test_errors_of_one_bit_all_reduce(world: int, rank: int) -> None:
    with pytest.raises(zeroone.DisagreementError, match=r"rank 0 has 8, rank 1 has 9"):
        zeroone.OneBitAllReduce(8 + (rank == 1))
    with pytest.raises(zeroone.DisagreementError, match=r"rank 0 has .*l1.*, rank 1 has .*l2"):
        zeroone.OneBitAllReduce(8, scale="l2" if rank == 1 else "l1")
    for numel, scale, words in ((0, "l1", "Invalid numel: 0"), (8, "max", "Invalid scale: 'max'")):
        with pytest.raises(ValueError if rank == 1 else zeroone.DisagreementError, match=words):
            zeroone.OneBitAllReduce(*((numel, scale) if rank == 1 else (8, "l1")))
    collective = zeroone.OneBitAllReduce(8)
    for wrong in (torch.ones(7), torch.ones(8).double(), torch.ones(16)[::2]):
        before = wrong.clone()
        with pytest.raises(ValueError, match="expected a contiguous float32 tensor of 8"):
            collective.reduce_(wrong)
        assert torch.equal(wrong, before)
    assert bits(collective.reduce_(torch.ones(8))) == bits(torch.ones(8))


def test_one_bit_all_reduce_of_some_ranks(world: int, rank: int) -> None:
    groups = [dist.new_group([r]) for r in range(world)]
    collective = zeroone.OneBitAllReduce(4, process_group=groups[rank])
    values = torch.full((4,), float(rank + 1))
    assert bits(collective.reduce_(values)) == bits(torch.full((4,), float(rank + 1)))
    assert collective.bytes_sent == 0


def test_local_gradients(world: int, rank: int) -> None:
    """Under DDP as without it: gradients are those of the rank, and the optimizer averages."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1, bias=False)
    )
    wrapped = zeroone.local_gradients(DistributedDataParallel(copy.deepcopy(plain)))
    arguments: Any = {
        "lr": 1e-2,
        "variance_schedule": schedules.Doubling(4),
        "sync_schedule": schedules.Interval(3),
    }
    modules = plain, wrapped
    optimizers = [zeroone.ZeroOneAdam(m.parameters(), **arguments) for m in modules]
    torch.manual_seed(1 + rank)
    losses = []
    for t in range(60):
        x = torch.randn(16, 8)
        y = x[:, :1].sin() - x[:, 1:2]
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(module(x), y)
            loss.backward()
            gradients = [bits(p.grad) for p in module.parameters() if p.grad is not None]
            assert len(gradients) == 3
            assert t > 0 or len(set(of_all(b"".join(gradients)))) == world
            optimizer.step()
        losses.append(loss.item())
        for mine, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert bits(mine) == bits(theirs)
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    optimizers[1].sync()
    assert len(set(of_all(b"".join(map(bits, wrapped.parameters()))))) == 1
