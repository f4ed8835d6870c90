"""Copies and pickles of an optimizer, and states of other optimizers, on several ranks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
from test_resume import digest, make, train

import zeroone
from zeroone.schedules import Doubling, Interval

STOPS = [0, 1, 8, 9]  # before anything, after a refresh, inside an interval


def copied(stop: int) -> None:
    """The copy goes on as the original, and neither sees what the other does."""
    parameters, optimizer = make(torch.bfloat16, start=0.5)
    for _ in train(parameters, optimizer, range(1, stop + 1)):
        pass
    addresses = [p.data_ptr() for p in parameters]
    others, other = copy.deepcopy((parameters, optimizer))
    assert not {p.data_ptr() for p in others} & set(addresses) - {0}
    for _ in train(parameters, optimizer, range(stop + 1, 17)):
        pass
    wanted = digest(parameters, optimizer)
    again, third = copy.deepcopy((others, other))  # of a copy that has done nothing yet
    for mine, its in ((others, other), (again, third)):
        for _ in train(mine, its, range(stop + 1, 17)):
            pass
        assert digest(mine, its) == wanted
        assert its._communicator is optimizer._communicator
    assert digest(parameters, optimizer) == wanted
    assert [p.data_ptr() for p in parameters] == addresses
    assert other.stats.setup_bytes_sent == 0


def weights_written_to_a_copy() -> None:
    """Before it is attached: they are adopted, as from the original."""
    parameters, optimizer = make(torch.float32, start=0.5)
    for _ in train(parameters, optimizer, range(1, 7)):
        pass
    others, other = copy.deepcopy((parameters, optimizer))
    for mine, its in ((parameters, optimizer), (others, other)):
        with torch.no_grad():
            mine[0].fill_(3.0)
        for _ in train(mine, its, range(7, 13)):
            pass
        assert (mine[0] - 3.0).abs().max() < 0.1
    assert digest(others, other) == digest(parameters, optimizer)


@pytest.mark.parametrize("stop", STOPS)
def test_deepcopy(stop: int) -> None:
    launch.run_ranks(copied, 2, stop)


def test_weights_written_to_a_copy() -> None:
    launch.run_ranks(weights_written_to_a_copy, 2)


def pickles(folder: Path) -> list[Any]:
    parameters, optimizer = make(torch.float32, start=0.5)
    for _ in train(parameters, optimizer, range(1, 10)):
        pass
    (folder / f"{dist.get_rank()}").write_bytes(pickle.dumps((parameters, optimizer)))
    for _ in train(parameters, optimizer, range(10, 17)):
        pass
    return digest(parameters, optimizer)


def unpickles(folder: Path, of: int) -> Any:
    parameters, optimizer = pickle.loads((folder / f"{(dist.get_rank() + of) % 3}").read_bytes())
    before = [p.clone() for p in parameters]
    try:
        for _ in train(parameters, optimizer, range(10, 17)):
            pass
    except ValueError as error:
        assert all(map(torch.equal, before, parameters))
        return str(error)
    return digest(parameters, optimizer)


def test_pickle(tmp_path: Path) -> None:
    wanted = launch.run_ranks(pickles, 3, tmp_path)
    assert launch.run_ranks(unpickles, 3, tmp_path, 0) == wanted
    for rank, said in enumerate(launch.run_ranks(unpickles, 3, tmp_path, 1)):
        assert f"is of rank ({(rank + 1) % 3}, 3), here is rank ({rank}, 3)" in said
    for rank, said in enumerate(launch.run_ranks(unpickles, 2, tmp_path, 0)):
        assert f"is of rank ({rank}, 3), here is rank ({rank}, 2)" in said


def takes_over(spoilt: str) -> str:
    """Of torch's AdamW, whose gradients are averaged beforehand; then local steps."""
    parameters = [torch.nn.Parameter(torch.ones(70)), torch.nn.Parameter(torch.ones(3, 3))]
    theirs = torch.optim.AdamW(parameters, lr=1e-2)

    def gradients(t: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(100 * t + rank)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)

    for t in range(5):
        gradients(t, rank=0)
        theirs.step()
    state = copy.deepcopy(theirs.state_dict())
    ours = zeroone.ZeroOneAdam(
        parameters, lr=1.0, variance_schedule=Doubling(2), sync_schedule=Interval(3)
    )
    if dist.get_rank() == 1 and spoilt == "parameters":
        with torch.no_grad():
            parameters[1][0, 0] = 7.0
    elif dist.get_rank() == 1 and spoilt:
        state["state"][1][spoilt] = state["state"][1][spoilt] * 2
    before = [p.clone() for p in parameters]
    try:
        ours.load_state_dict(state)
    except zeroone.DisagreementError as error:
        assert all(map(torch.equal, before, parameters))
        assert not any(ours.state[p]["exp_avg_sq"].any() for p in parameters)
        return str(error)
    assert all(map(torch.equal, before, parameters))
    for t in range(5, 15):
        gradients(t, dist.get_rank())
        ours.step()
    stats = ours.stats
    assert (stats.steps, stats.refreshes) == (10, 4)  # 6, 7, 8, 11
    assert 0 < stats.syncs < 6
    ours.sync()
    saved = [ours.state[p]["anchor"].sum().item() for p in parameters]
    return f"{ours.state[parameters[0]]['step'].item()} {saved}"


@pytest.mark.parametrize("spoilt", ["", "parameters", "exp_avg_sq", "exp_avg", "step"])
def test_taking_over_torch_adamw(spoilt: str) -> None:
    first, second = launch.run_ranks(takes_over, 2, spoilt)
    assert first == second
    what = {
        "": "15.0 [",
        "parameters": "saved parameters, tensor 1 of parameter group 0",
        "step": "saved step: rank 0 has 5, rank 1 has 10",
    }
    assert what.get(spoilt, f"saved {spoilt}, tensor 1 of parameter group 0") in first
