"""Stop at any step and resume in new processes: the same bytes as without a stop."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import torch.distributed as dist
import trial
from conftest import SETTINGS
from plain_twin import Options
from trial import bits

import zeroone
from zeroone.schedules import Doubling, Interval

SHAPES = [[(50, 9), (), (0,)], [(2100,)]]
STEPS = 16
# After the first refresh; inside an interval, twice; after a sync; before a refresh that waits.
STOPS = [1, 4, 5, 6, 9]


def make(
    dtype: torch.dtype, start: float, algorithm: str = "ZeroOneAdam"
) -> tuple[list[torch.nn.Parameter], Any]:
    parameters = [torch.nn.Parameter(torch.full(s, start, dtype=dtype)) for g in SHAPES for s in g]
    groups = [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "betas": (0.8, 0.99)},
    ]
    return parameters, getattr(zeroone, algorithm)(groups, lr=2e-3, **SETTINGS[algorithm])


def train(parameters: list[torch.nn.Parameter], optimizer: Any, steps: range) -> Iterator[int]:
    """The gradient depends on the rank, the step, and the parameters."""
    for t in steps:
        generator = torch.Generator().manual_seed(100 * t + dist.get_rank())
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) + 0.1 * p.detach()).to(p.dtype)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * 0.95**t
        optimizer.step()
        yield t


def digest(parameters: list[torch.nn.Parameter], optimizer: Any) -> list[Any]:
    """Everything that the state has, as bytes."""
    saved = optimizer.state_dict()
    key = f"server_error.rank{dist.get_rank()}"
    vectors = [(k, bits(x)) for state in saved["state"].values() for k, x in state.items()]
    groups = [group["zeroone"] for group in saved["param_groups"]]
    errors = [group[key] for group in groups if key in group]  # AdamW has none
    settings = [group["lr"] for group in saved["param_groups"]]
    return [trial.counters(saved), settings, vectors, *map(bits, [*errors, *parameters])]


def never_stops(folder: Path, dtype: torch.dtype, algorithm: str) -> list[Any]:
    parameters, optimizer = make(dtype, 0.5, algorithm)
    for t in train(parameters, optimizer, range(1, STEPS + 1)):
        if t in STOPS:
            torch.save(optimizer.state_dict(), folder / f"{t}.rank{dist.get_rank()}.pt")
    return digest(parameters, optimizer)


def resumes(folder: Path, dtype: torch.dtype, algorithm: str) -> list[Any]:
    digests = []
    for stop in STOPS:
        saved = torch.load(folder / f"{stop}.rank{dist.get_rank()}.pt")
        parameters, optimizer = make(dtype, -1.0, algorithm)  # to be overwritten
        addresses = [p.data_ptr() for p in parameters]
        optimizer.load_state_dict(saved)
        for _ in train(parameters, optimizer, range(stop + 1, STEPS + 1)):
            pass
        assert [p.data_ptr() for p in parameters] == addresses
        digests.append(digest(parameters, optimizer))
    return digests


@pytest.mark.parametrize(
    ("algorithm", "dtype", "pending"),
    [
        ("ZeroOneAdam", torch.float32, [0, 1, 2, 0, 2]),
        ("ZeroOneAdam", torch.bfloat16, [0, 1, 2, 0, 2]),
        ("OneBitAdam", torch.float32, [0] * 5),
        ("AdamW", torch.bfloat16, [0] * 5),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_resume(
    ranks: int, algorithm: str, dtype: torch.dtype, pending: list[int], tmp_path: Path
) -> None:
    wanted = launch.run_ranks(never_stops, ranks, tmp_path, dtype, algorithm)
    found = launch.run_ranks(resumes, ranks, tmp_path, dtype, algorithm)
    saved = [torch.load(tmp_path / f"{t}.rank0.pt") for t in STOPS]
    assert [trial.counters(s)["slabs"][0]["pending"] for s in saved] == pending
    for rank in range(ranks):
        for stop, end in zip(STOPS, found[rank], strict=True):
            assert end == wanted[rank], (rank, stop)


# --- states that do not fit ---------------------------------------------------------------------


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def damage(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return damage


def shorter_vector(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:-1]


def own(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["zeroone"] for group in state["param_groups"]]


def other_rank(state: dict[str, Any]) -> None:
    here, other = f".rank{dist.get_rank()}", f".rank{1 - dist.get_rank()}"
    for part in [*own(state), *state["state"].values()]:
        for key in [key for key in part if key.endswith(here)]:
            part[key.replace(here, other)] = part.pop(key)


def other_world(state: dict[str, Any]) -> None:
    for group in own(state):
        group["world_size"] = 3


def other_world_in_one_group(state: dict[str, Any]) -> None:
    own(state)[1]["world_size"] = 3


def later_format(state: dict[str, Any]) -> None:
    own(state)[0]["format"] = 1000


def integers(state: dict[str, Any]) -> None:
    state["state"][0]["anchor"] = state["state"][0]["anchor"].int()


def continued_elsewhere(state: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(s)) for group in SHAPES for s in group]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    other = torch.optim.AdamW(groups)
    other.load_state_dict(copy.deepcopy(state))
    for p in parameters:
        p.grad = torch.ones_like(p)
    other.step()
    state.update(other.state_dict())


def with_amsgrad(state: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(s)) for group in SHAPES for s in group]
    other = torch.optim.AdamW(parameters, amsgrad=True)
    for p in parameters:
        p.grad = torch.ones_like(p)
    other.step()
    state.update(other.state_dict())


def of_sgd(state: dict[str, Any]) -> None:
    state["state"] = {i: {"momentum_buffer": torch.zeros(3)} for i in state["state"]}
    for group in state["param_groups"]:
        del group["zeroone"]


def fewer_tensors(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def shorter_residual(state: dict[str, Any]) -> None:
    key = f"server_error.rank{dist.get_rank()}"
    own(state)[0][key] = own(state)[0][key][:-8]


def fewer_residuals(state: dict[str, Any]) -> None:
    del own(state)[1][f"server_error.rank{dist.get_rank()}"]


def no_zeroone(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        del group["zeroone"]


def no_counters(state: dict[str, Any]) -> None:
    for group in own(state):
        del group["counters"]


def wrong_frozen(state: dict[str, Any]) -> None:
    own(state)[0]["slab"]["frozen"] = "[3]"


def cut_text(state: dict[str, Any]) -> None:
    own(state)[0]["slab"]["frozen"] = "["


def no_step(state: dict[str, Any]) -> None:
    for group in own(state):
        del group["counters"]["step"]


def no_worker_error(state: dict[str, Any]) -> None:
    del state["state"][0][f"worker_error.rank{dist.get_rank()}"]


def text_for_a_vector(state: dict[str, Any]) -> None:
    state["state"][0]["anchor"] = "anchor"


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "empty": dict.clear,
    "zeroone": no_zeroone,
    "zeroone of a group": without("param_groups", 1, "zeroone"),
    "later format": later_format,
    "other rank": other_rank,
    "other world": other_world,
    "other world in one group": other_world_in_one_group,
    "no world": without("param_groups", 0, "zeroone", "world_size"),
    "counters": no_counters,
    "counters step": no_step,
    "counters group": without("param_groups", 1, "zeroone", "slab"),
    "counters sum": without("param_groups", 0, "zeroone", "slab", "sum"),
    "frozen": wrong_frozen,
    "cut text": cut_text,
    "learning rate": without("param_groups", 0, "lr"),
    "step": without("state", 1, "step"),
    "integers": integers,
    "continued by torch's AdamW": continued_elsewhere,
    "amsgrad": with_amsgrad,
    "SGD": of_sgd,
    "param_groups": without("param_groups"),
    "group": without("param_groups", 1),
    "tensors": without("param_groups", 0, "params"),
    "fewer tensors": fewer_tensors,
    "state": without("state"),
    "tensor": without("state", 1),
    "vector": without("state", 1, "exp_avg_sq"),
    "shorter vector": shorter_vector,
    "text": text_for_a_vector,
    "worker_error": no_worker_error,
    "shorter residual": shorter_residual,
    "fewer residuals": fewer_residuals,
}


def refused(name: str) -> str:
    """Empty if a damaged state raises ValueError and changes nothing; else what it did."""
    parameters, optimizer = make(torch.float32, start=0.5)
    for _ in train(parameters, optimizer, range(1, 9)):
        pass
    state = copy.deepcopy(optimizer.state_dict())
    for _ in train(parameters, optimizer, range(9, 12)):
        pass
    DAMAGES[name](state)
    before = digest(parameters, optimizer)
    said = "loaded without an error"
    try:
        optimizer.load_state_dict(state)
    except ValueError:
        said = ""
    except Exception as error:
        said = f"raised {error!r}"
    return said + ("" if digest(parameters, optimizer) == before else ", and changed something")


def refuses() -> dict[str, str]:
    return {name: said for name in DAMAGES if (said := refused(name))}


def foreign() -> dict[str, str]:
    """States of other optimizers: what loading each did, where it was not a ValueError."""
    parameters = [torch.nn.Parameter(torch.ones(9)) for _ in range(2)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    made: dict[str, Any] = {
        "AdamW": zeroone.AdamW(parameters),
        "OneBitAdam": zeroone.OneBitAdam(parameters, warmup_steps=1),
        "ZeroOneAdam": zeroone.ZeroOneAdam(parameters, variance_schedule=Interval(9)),
    }
    for optimizer in made.values():
        for _ in range(3):
            optimizer.step()
    said = {}
    for source, target in (
        ("AdamW", "ZeroOneAdam"),
        ("ZeroOneAdam", "AdamW"),
        ("OneBitAdam", "ZeroOneAdam"),
    ):
        try:
            made[target].load_state_dict(made[source].state_dict())
            said[f"{source} into {target}"] = "loaded without an error"
        except ValueError:
            pass
        except Exception as error:
            said[f"{source} into {target}"] = f"raised {error!r}"
    return said


def test_states_that_do_not_fit_are_refused() -> None:
    assert launch.run_ranks(refuses, 2) == [{}, {}]


def test_states_of_other_optimizers_are_refused() -> None:
    assert launch.run_ranks(foreign, 2) == [{}, {}]


def takes_turns(model_first: bool) -> None:
    """Goes back in the process that saved."""
    ours = trial.zero_one_adam(
        lambda t: [Options(lr=1e-3, weight_decay=0.1)],
        [[(40,), (3, 3)]],
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        variance_schedule=Doubling(2),
        sync_schedule=Interval(3),
    ).run(5)
    assert ours.twin.pending
    model = torch.nn.ParameterList(ours.parameters[0])
    of_model, of_optimizer = copy.deepcopy((model.state_dict(), ours.optimizer.state_dict()))
    twin = copy.deepcopy(ours.twin)
    ours.run(4)
    if model_first:
        model.load_state_dict(of_model)
    ours.optimizer.load_state_dict(of_optimizer)
    if not model_first:
        model.load_state_dict(of_model)
    twin.bytes_sent = ours.twin.bytes_sent  # statistics are not part of the state
    twin.kinds.clear()
    ours.twin, ours.t = twin, 5
    ours.run(8)
    assert {"refresh", "sync", "local"} == set(twin.kinds)


@pytest.mark.parametrize("model_first", [True, False])
def test_loading_in_the_same_process(model_first: bool) -> None:
    launch.run_ranks(takes_turns, 2, model_first)
