"""Process groups of some ranks, and device meshes: each trains as a world of its own."""

from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trial import bits

import zeroone
from zeroone.distributed import Group
from zeroone.schedules import Doubling, Interval


def train(process_group: Group | None, index: int, rank: int) -> list[Any]:
    """What rank `rank` of group number `index` ends with."""
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5))
    torch.manual_seed(10 * index + rank)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    optimizer = zeroone.ZeroOneAdam(
        model.parameters(),
        variance_schedule=Doubling(2),
        sync_schedule=Interval(3),
        process_group=process_group,
    )
    data = [torch.randn(4, 9) for _ in range(14 + 2 * rank)]
    for x in zeroone.even_batches(data, process_group):
        optimizer.zero_grad()
        if x is not None:
            model(x).square().sum().backward()
        optimizer.step()
    optimizer.sync()
    zeroone.average_buffers(model, process_group)
    values = torch.randn(30)
    zeroone.OneBitAllReduce(30, process_group=process_group).reduce_(values)
    stats = optimizer.stats
    counts = stats.steps, stats.refreshes, stats.syncs, stats.bytes_sent
    return [counts, bits(values), *map(bits, model.parameters()), bits(model[1].running_var)]


def in_groups(ranks: list[list[int]]) -> list[Any]:
    groups = [dist.new_group(members) for members in ranks]
    (index,) = (i for i, members in enumerate(ranks) if dist.get_rank() in members)
    return train(groups[index], index, ranks[index].index(dist.get_rank()))


def in_the_default_group(index: int) -> list[Any]:
    return train(None, index, dist.get_rank())


def in_a_row_of_a_mesh() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    row, column = mesh.get_coordinate() or []
    return train(mesh["data"], row, column)


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0], [1, 2, 3]]])
def test_groups(ranks: list[list[int]]) -> None:
    found = launch.run_ranks(in_groups, 4, ranks)
    ends = []
    for index, members in enumerate(ranks):
        wanted = launch.run_ranks(in_the_default_group, len(members), index)
        assert [found[r] for r in members] == wanted
        assert all(end == wanted[0] for end in wanted)  # replicas
        ends.append(wanted[0])
    assert ends[0] != ends[1]


def test_rows_of_a_mesh() -> None:
    found = launch.run_ranks(in_a_row_of_a_mesh, 4)
    assert found == launch.run_ranks(in_groups, 4, [[0, 1], [2, 3]])


def refuses() -> None:
    """Construction and calls, on ranks that are not in the group; the others go on."""
    rank = dist.get_rank()
    group: Any = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = DeviceMesh("cpu", [0, 1])
    model = torch.nn.Linear(2, 2)
    uses: Any = [
        lambda group: zeroone.ZeroOneAdam(model.parameters(), process_group=group).step(),
        lambda group: zeroone.OneBitAllReduce(8, process_group=group).reduce_(torch.ones(8)),
        lambda group: zeroone.average_buffers(model, group),
        lambda group: zeroone.even_batches([1], group),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"mesh of 2 dimensions, \('dp', 'tp'\).*mesh\['dp'\]"):
            use(mesh)
        for some, words in ((group, "is not in the process group"), (part, "is not in the mesh")):
            if rank < 2:
                use(some)
            else:
                with pytest.raises(ValueError, match=f"rank {rank} {words}"):
                    use(some)


def test_ranks_that_are_not_in_the_group() -> None:
    launch.run_ranks(refuses, 4)
