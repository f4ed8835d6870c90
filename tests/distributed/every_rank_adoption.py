"""On every rank: values that others wrote to parameters are taken over, alike on all ranks."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trial
from every_rank_trajectory import everything
from torch.optim.swa_utils import AveragedModel
from trial import Trial, bits, constant

import zeroone
from zeroone.schedules import EveryStep, Interval

SCHEDULES = {"variance_schedule": EveryStep(2), "sync_schedule": Interval(4)}
KINDS = ["refresh", "refresh", "local", "local", "local", "sync"]
# After so many steps: before the first one, after a refresh, inside an interval, after a sync.
WHEN = [0, 2, 4, 6]


def make(
    world: int, rank: int, steps: int, dtype: torch.dtype = torch.float32, weight_decay: float = 0.0
) -> Trial:
    plan = constant(groups=2, weight_decay=weight_decay)
    ours = trial.zero_one_adam(plan, rank=rank, world=world, dtype=dtype, **SCHEDULES).run(steps)
    assert ours.twin.kinds == KINDS[:steps]
    return ours


def values(parameter: torch.Tensor, seed: int = 5) -> torch.Tensor:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@torch.no_grad()
def load(parameter: torch.Tensor, seed: int = 5) -> None:
    parameter.copy_(values(parameter, seed))


def adopt(ours: Trial, g: int, i: int) -> None:
    """What the twin does when all ranks have written `values` to a parameter."""
    value = values(ours.parameters[g][i]).float().numpy()
    ours.twin.adopt(g, i, [value] * ours.world)


@pytest.mark.parametrize("steps", WHEN)
def test_loaded_model(world: int, rank: int, steps: int) -> None:
    ours = make(world, rank, steps)
    module = torch.nn.ParameterList(ours.parameters[0])
    module.load_state_dict({name: values(p) for name, p in module.named_parameters()})
    for i in range(len(ours.parameters[0])):
        adopt(ours, 0, i)
    ours.run(8)
    assert "sync" in ours.twin.kinds[steps:]
    assert (module[0] - values(module[0])).abs().median() < 0.05


def test_what_others_wrote(trial_of: Callable[..., Trial]) -> None:
    """Seen, then told of, then a cast: by every algorithm."""
    ours = trial_of(constant(groups=2, weight_decay=0.0)).run(5)
    load(ours.parameters[0][0])
    adopt(ours, 0, 0)
    ours.run(3)
    ours.sync()
    ours.parameters[1][0].data.copy_(values(ours.parameters[1][0], seed=6))
    ours.optimizer.adopt_parameters()
    ours.twin.adopt(1, 0, [values(ours.parameters[1][0], seed=6).numpy()] * ours.world)
    ours.run(3)
    for group in ours.parameters:
        torch.nn.ParameterList(group).to(torch.bfloat16)
    ours.dtypes = (torch.bfloat16,)
    ours.run(3)


@pytest.mark.parametrize("steps", WHEN)
@pytest.mark.parametrize("ranks", ["all", "first"])
def test_state_of_what_was_loaded(world: int, rank: int, steps: int, ranks: str) -> None:
    """A state that is saved then holds it, and loading that one at once, as Accelerate does with
    every optimizer it prepares, does not bring the old values back."""
    ours = make(world, rank, steps, weight_decay=0.5)
    parameter = ours.parameters[0][0]
    load(parameter)
    adopt(ours, 0, 0)
    if ranks == "all":
        ours.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    elif rank == 0:
        ours.optimizer.state_dict()
    torch.testing.assert_close(parameter, values(parameter), rtol=1e-6, atol=0)
    ours.run(8)


def test_averaged_weights(world: int, rank: int) -> None:
    """An average over what the ranks shared, swapped in, is what the training goes on from."""
    ours = make(world, rank, steps=0)
    module = torch.nn.ParameterList(ours.parameters[0])
    average = AveragedModel(module)
    for steps in (0, 2, 4):  # nothing is pending after 2 and 6 steps
        ours.run(steps)
        average.update_parameters(module)
    module.load_state_dict(average.module.state_dict())
    for i, held in enumerate(average.module.parameters()):
        ours.twin.adopt(0, i, [held.detach().numpy()] * world)
    ours.compare()
    ours.run(8)


@pytest.mark.parametrize("steps", WHEN)
def test_sync_takes_over_as_well(world: int, rank: int, steps: int) -> None:
    ours = make(world, rank, steps)
    parameter = ours.parameters[1][0]
    load(parameter)
    adopt(ours, 1, 0)
    assert ours.sync() == (steps == 4)
    assert bits(ours.optimizer.state[parameter]["anchor"]) == bits(values(parameter))
    ours.run(6)


def test_weight_decay_inside_an_interval(world: int, rank: int) -> None:
    """What was loaded has not decayed yet, whatever the pending steps have done to the others."""
    ours = make(world, rank, steps=4, weight_decay=0.5)
    parameter = ours.parameters[0][0]
    load(parameter)
    for group in ours.optimizer.param_groups:
        group["lr"] = 0.0
    ours.optimizer.sync()
    torch.testing.assert_close(parameter, values(parameter), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("steps", "call"), [(0, "step"), (1, "step"), (4, "sync"), (5, "step")])
def test_only_one_rank_loads(world: int, rank: int, steps: int, call: str) -> None:
    """The next exchange raises everywhere and changes nothing. Then the others follow."""
    ours = make(world, rank, steps)
    parameter = ours.parameters[0][0]
    if rank == 1:
        load(parameter)
    before = everything(ours.optimizer)
    parameters = [bits(p) for *_, p in ours.tensors()]
    with pytest.raises(zeroone.DisagreementError, match=r"loaded.*rank 0 has none.*rank 1 has"):
        getattr(ours.optimizer, call)()
    assert [bits(p) for *_, p in ours.tensors()] == parameters
    after = everything(ours.optimizer)
    assert after[0] == before[0]  # the scalars; a rank's own adoption is not undone
    if rank != 1:
        assert after == before
        load(parameter)
    adopt(ours, 0, 0)
    ours.twin.count_headers()
    getattr(ours, call)()
    ours.run(8)


def test_local_steps_do_not_notice_yet(world: int, rank: int) -> None:
    ours = make(world, rank, steps=2)
    if rank == 1:
        load(ours.parameters[0][0])
    for _ in range(3):
        ours.optimizer.step()
    with pytest.raises(zeroone.DisagreementError, match="loaded"):
        ours.optimizer.step()


def test_ranks_load_different_values(world: int, rank: int) -> None:
    """The way out is to adopt everything anew."""
    ours = make(world, rank, steps=1)
    load(ours.parameters[0][0], seed=rank)
    with pytest.raises(zeroone.DisagreementError, match=r"loaded.*values with hash"):
        ours.optimizer.step()
    load(ours.parameters[0][0])
    ours.optimizer.adopt_parameters()
    adopt(ours, 0, 0)
    ours.failed()
    ours.run(8)


@pytest.mark.parametrize("steps", WHEN)
def test_writes_through_data(world: int, rank: int, steps: int) -> None:
    """They cannot be seen: they are lost, unless `adopt_parameters` tells of them."""
    ours = make(world, rank, steps)
    parameter = ours.parameters[0][0]
    parameter.data.copy_(values(parameter))
    ours.run(1)  # the twin knows nothing of it
    parameter.data.copy_(values(parameter))
    ours.optimizer.adopt_parameters()
    adopt(ours, 0, 0)
    if not ours.twin.pending:
        ours.compare()
    ours.run(8)


def unchanged_version(parameter: torch.Tensor) -> None:
    parameter.add_(0)


def other_memory(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data.clone()


def loaded_again(parameter: torch.Tensor) -> None:
    parameter.copy_(parameter.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("touch", [unchanged_version, other_memory, loaded_again])
def test_same_values(
    world: int, rank: int, touch: Callable[[torch.Tensor], None], dtype: torch.dtype
) -> None:
    """Whatever happened to the tensor, and be it on one rank only: the anchor stays in fp32."""
    ours = make(world, rank, steps=0, dtype=dtype)
    for _ in range(12):
        if rank == 1:
            for *_, parameter in ours.tensors():
                version, address = parameter._version, parameter.data_ptr()
                with torch.no_grad():
                    touch(parameter)
                assert (version, address) != (parameter._version, parameter.data_ptr()) or (
                    parameter.numel() == 0
                )
        ours.step()
    assert "sync" in ours.twin.kinds


def test_low_precision_adopts_what_changed(world: int, rank: int) -> None:
    """Elements that have kept their value keep the part of the anchor that bfloat16 cannot hold."""
    ours = make(world, rank, steps=6, dtype=torch.bfloat16)
    parameter = ours.parameters[0][0]
    with torch.no_grad():
        parameter[3] = 1.0
    slab = ours.twin.slabs[0]
    for vector in (slab.a, *slab.x):
        vector[3 * 70 : 4 * 70] = 1
    ours.optimizer.adopt_parameters()
    ours.compare()
    ours.run(6)
    assert (slab.a[70:140] != parameter[1].detach().float().numpy()).any()


@pytest.mark.parametrize("steps", WHEN)
def test_module_to_bfloat16(world: int, rank: int, steps: int) -> None:
    ours = make(world, rank, steps)
    for group in ours.parameters:
        module = torch.nn.ParameterList(group).to(torch.bfloat16)
        assert all(mine is theirs for mine, theirs in zip(group, module, strict=True))
    ours.dtypes = (torch.bfloat16,)
    ours.run(8)
    first = ours.parameters[0][0]
    assert first.dtype == torch.bfloat16
    assert np.any(ours.twin.slabs[0].a[: first.numel()] != first.detach().flatten().float().numpy())


def test_ranks_cannot_adopt_a_broadcast_inside_an_interval(world: int, rank: int) -> None:
    """Rank 0's values, which differ there: for rank 0 nothing has changed. Told, not trained on."""
    ours = make(world, rank, steps=5)
    for *_, parameter in ours.tensors():
        dist.broadcast(parameter.data, 0)
        torch.autograd.graph.increment_version(parameter)
    with pytest.raises(zeroone.DisagreementError, match="loaded"):
        ours.optimizer.step()


@pytest.mark.parametrize("steps", WHEN)
def test_loaded_before_a_group_is_added(world: int, rank: int, steps: int) -> None:
    ours = make(world, rank, steps)
    parameter = ours.parameters[0][0]
    load(parameter)
    new = torch.nn.Parameter(torch.full((5,), float(rank)))
    ours.optimizer.add_param_group({"params": [new], "lr": 0.0})
    assert bits(parameter) == bits(values(parameter))
    assert bits(new) == bits(torch.zeros(5))  # rank 0's
    for group in ours.optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(6):  # whatever the schedules do now, at lr = 0 and without decay nothing moves
        ours.optimizer.zero_grad()
        ours.optimizer.step()
    ours.optimizer.sync()
    if (
        steps != 4
    ):  # a sync of steps that other parameters took inside the interval moves only those
        assert bits(parameter) == bits(values(parameter))
    assert ours.optimizer.stats.steps == steps + 6
