"""A state of some ranks goes on, on other ranks: merged in memory or through DCP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trial
from test_resume import SHAPES, digest, make, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from trial import bits

from zeroone import checkpoint

STOPS = [1, 6, 9]  # after a refresh, after a sync, inside an interval
HALF_ULP = 2**-24


class Model(torch.nn.Module):
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)


def saves(folder: Path) -> None:
    parameters, optimizer = make(torch.float32, start=0.5)
    model = Model(parameters)
    for t in train(parameters, optimizer, range(1, max(STOPS) + 1)):
        if t in STOPS:
            torch.save(optimizer.state_dict(), folder / f"{t}.rank{dist.get_rank()}.pt")
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder / f"{t}.plain")
            state = {"model": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder / f"{t}.named")


def merged(folder: Path, stop: int, ranks: int) -> Any:
    states = [torch.load(folder / f"{stop}.rank{r}.pt") for r in reversed(range(ranks))]
    return checkpoint.merge(states)


def loaded(way: str, folder: Path, stop: int, of: int) -> tuple[list[torch.nn.Parameter], Any]:
    parameters, optimizer = make(torch.float32, start=-1.0)  # to be overwritten
    model = Model(parameters)
    before = digest(parameters, optimizer)
    if way == "merge":
        optimizer.load_state_dict(merged(folder, stop, of))
    elif way == "plain":
        where = folder / f"{stop}.plain"
        state = checkpoint.template({"optimizer": optimizer.state_dict()}, where)
        dcp.load(state, checkpoint_id=where)
        assert digest(parameters, optimizer) == before
        optimizer.load_state_dict(state["optimizer"])
    else:
        where = folder / f"{stop}.named"
        state = {"model": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
        state = checkpoint.template(state, where)
        dcp.load(state, checkpoint_id=where)
        set_optimizer_state_dict(model, optimizer, state["o"])
    return parameters, optimizer


def shared(parameters: list[torch.nn.Parameter], optimizer: Any) -> list[Any]:
    """What must be equal on all ranks."""
    saved = optimizer.state_dict()
    vectors = [s[name] for s in saved["state"].values() for name in ("anchor", "exp_avg_sq")]
    return [trial.counters(saved), *map(bits, [*vectors, *parameters])]


def goes_on(folder: Path, of: int) -> dict[str, Any]:
    """What each way has at once, and after six steps."""
    result: dict[str, Any] = {}
    for stop in STOPS:
        for way in ("merge", "plain", "named"):
            parameters, optimizer = loaded(way, folder, stop, of)
            saved = copy.deepcopy(optimizer.state_dict())
            start = shared(parameters, optimizer)
            for _ in train(parameters, optimizer, range(stop + 1, stop + 7)):
                pass
            optimizer.sync()
            result[f"{stop} {way}"] = (
                saved,
                start,
                digest(parameters, optimizer),
                shared(parameters, optimizer),
            )
    return result


def mean_residual(states: list[Any]) -> list[torch.Tensor]:
    """E of every group in float64: mean of worker_error, plus server_error."""
    ranks = range(len(states))
    result = []
    index = 0
    for g, shapes in enumerate(SHAPES):
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        chunks = [states[r]["param_groups"][g]["zeroone"][f"server_error.rank{r}"] for r in ranks]
        total = torch.cat(chunks)[:numel].double()
        for r in ranks:
            of_rank = [
                states[r]["state"][index + i][f"worker_error.rank{r}"].flatten()
                for i in range(len(shapes))
            ]
            total = total + torch.cat(of_rank).double() / len(states)
        result.append(total)
        index += len(shapes)
    return result


def norms(states: list[Any], name: str) -> list[torch.Tensor]:
    """Of the mean over the ranks, per group."""
    vectors = iter(mean(states, name))
    return [torch.cat([next(vectors).flatten() for _ in shapes]).norm() for shapes in SHAPES]


def mean(states: list[Any], name: str) -> list[torch.Tensor]:
    keys = states[0]["state"].keys()
    return [
        torch.stack([s["state"][i][f"{name}.rank{r}"].double() for r, s in enumerate(states)]).mean(
            0
        )
        for i in keys
    ]


@pytest.mark.parametrize(("of", "on"), [(4, 2), (4, 3), (4, 8), (2, 4), (3, 3), (2, 1)])
def test_another_number_of_ranks(of: int, on: int, tmp_path: Path) -> None:
    launch.run_ranks(saves, of, tmp_path)
    found = launch.run_ranks(goes_on, on, tmp_path, of)
    for stop in STOPS:
        old = [torch.load(tmp_path / f"{stop}.rank{r}.pt") for r in range(of)]
        for rank in range(on):
            one, two, three = (found[rank][f"{stop} {w}"] for w in ("merge", "plain", "named"))
            assert one[1:] == two[1:] == three[1:]
            if of != on:  # replicas are equal, also inside an interval
                assert one[1] == found[0][f"{stop} merge"][1]
            assert one[3] == found[0][f"{stop} merge"][3]
        new = [found[rank][f"{stop} merge"][0] for rank in range(on)]
        assert trial.counters(new[0]) == trial.counters(old[0])
        if of == on:
            for was, is_now in zip(old, new, strict=True):
                for index, vectors in was["state"].items():
                    found_now = is_now["state"][index]
                    assert {k: bits(v) for k, v in vectors.items()} == {
                        k: bits(v) for k, v in found_now.items()
                    }
            continue
        # The means are rounded once, and what the server holds is moved as it is.
        for was, is_now, rounded in zip(
            mean_residual(old), mean_residual(new), norms(old, "worker_error"), strict=True
        ):
            assert (was - is_now).norm() <= HALF_ULP * rounded
            assert (rounded > 0) == (stop != 1)
        for name in ("accumulated", "exp_avg"):
            for was, is_now in zip(mean(old, name), mean(new, name), strict=True):
                assert (was - is_now).norm() <= HALF_ULP * was.norm()
        assert (trial.counters(old[0])["slabs"][0]["pending"] > 0) == (stop == 9)


def resumes_by_state_dict(folder: Path, template: bool, options: dict[str, bool]) -> None:
    """get_state_dict and set_state_dict, same ranks, with a parameter that is frozen."""
    how = StateDictOptions(**options)
    parameters, optimizer = make(torch.float32, start=0.5)
    parameters[0].requires_grad_(False)  # has no gradient
    model = Model(parameters)

    def run(steps: range) -> None:
        for t in steps:
            generator = torch.Generator().manual_seed(100 * t + dist.get_rank())
            for p in parameters[1:]:
                p.grad = torch.randn(p.shape, generator=generator) + 0.1 * p.detach()
            optimizer.step()

    optimizer.param_groups[0]["weight_decay"] = 0.0
    run(range(1, 6))
    of_model, of_optimizer = get_state_dict(model, optimizer, options=how)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    run(range(6, 12))
    wanted = digest(parameters, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=how)
    state = {"model": of_model, "optimizer": of_optimizer}
    if template:
        state = checkpoint.template(state, folder)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=how,
    )
    run(range(6, 12))
    assert digest(parameters, optimizer) == wanted


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("template", "options"),
    [
        (True, {}),
        (False, {}),
        (True, {"cpu_offload": True}),
        (False, {"full_state_dict": True}),  # torch knows no keys but this rank's then
    ],
)
def test_state_dict_functions_of_torch(
    ranks: int, template: bool, options: dict[str, bool], tmp_path: Path
) -> None:
    launch.run_ranks(resumes_by_state_dict, ranks, tmp_path, template, options)


def resumes_without_template(folder: Path) -> None:
    parameters, optimizer = make(torch.float32, start=0.5)
    for t in train(parameters, optimizer, range(1, 17)):
        if t == 9:
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    wanted = digest(parameters, optimizer)
    parameters, optimizer = make(torch.float32, start=-1.0)
    state = {"optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_state_dict(state["optimizer"])
    for _ in train(parameters, optimizer, range(10, 17)):
        pass
    assert digest(parameters, optimizer) == wanted


def test_plain_dcp_on_the_same_ranks(tmp_path: Path) -> None:
    launch.run_ranks(resumes_without_template, 2, tmp_path)


def refuses(folder: Path) -> list[str]:
    """A state of one rank alone, and a merged one that differs on a rank."""
    parameters, optimizer = make(torch.float32, start=0.5)
    for _ in train(parameters, optimizer, range(1, 4)):
        pass
    before = digest(parameters, optimizer)
    said = []
    other = merged(folder, 6, 4)
    if dist.get_rank() == 1:
        other["state"][1]["anchor"] = other["state"][1]["anchor"] + 1
    for state in (torch.load(folder / f"6.rank{dist.get_rank()}.pt"), other):
        try:
            optimizer.load_state_dict(state)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        assert digest(parameters, optimizer) == before
    return said


def test_clear_errors(tmp_path: Path) -> None:
    launch.run_ranks(saves, 4, tmp_path)
    for rank, (alone, differs) in enumerate(launch.run_ranks(refuses, 2, tmp_path)):
        assert f"saved on 4 ranks and holds the vectors of ranks [{rank}]" in alone
        assert "zeroone.checkpoint.merge" in alone
        assert (
            "DisagreementError: ranks disagree on saved anchor of parameter 1: rank 0 has"
            in differs
        )
    states = [torch.load(tmp_path / f"6.rank{r}.pt") for r in range(4)]
    with pytest.raises(ValueError, match=r"of ranks \[0, 1, 2\], expected \[0, 1, 2, 3\]"):
        checkpoint.merge(states[:3])
    with pytest.raises(ValueError, match=r"of ranks \[0, 0, 1, 2, 3\]"):
        checkpoint.merge([*states, states[0]])
    with pytest.raises(ValueError, match="0 and 3 are not of the same run and step"):
        checkpoint.merge([*states[:3], torch.load(tmp_path / "9.rank3.pt")])
    states[2]["state"][0]["exp_avg_sq"] = states[2]["state"][0]["exp_avg_sq"] + 1
    with pytest.raises(ValueError, match="0 and 2 differ in exp_avg_sq of 0"):
        checkpoint.merge(states)
    with pytest.raises(ValueError, match="no state"):
        checkpoint.merge([])
