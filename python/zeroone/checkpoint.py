"""Saving and loading: another number of ranks, ``torch.distributed.checkpoint``, other optimizers.

An optimizer's ``state_dict`` has two keys, "state" and "param_groups", as torch's. Per parameter it
holds ``step``, ``exp_avg`` and ``exp_avg_sq`` (AdamW's), ``anchor``, and what differs between ranks
under keys that contain the rank: ``exp_avg.rank0``, ``accumulated.rank0``, ``worker_error.rank0``.
What is not of a parameter is in every saved group under "zeroone".
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zeroone import _core
from zeroone.distributed import tell_others

if TYPE_CHECKING:
    from zeroone.optim import _Optimizer

__all__ = ["merge", "template"]

_logger = logging.getLogger("zeroone")

_FORMAT = 2
# Vectors of a parameter that are equal on all ranks, and those that are a rank's own.
_SHARED = ("exp_avg_sq", "anchor")
_OF_RANK = ("exp_avg", "accumulated", "worker_error")
_RANK_KEY = re.compile(r"(?:exp_avg|accumulated|worker_error|server_error)\.rank(\d+)")

_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_ADAM = frozenset({"step", "exp_avg", "exp_avg_sq"})
# What DeepSpeed's OnebitAdam and ZeroOneAdam have besides; for why it is dropped see _taken_over.
_DEEPSPEED = frozenset(
    {
        *("worker_error", "server_error", "momentum_accumulator", "lrs"),
        *("tensor_size", "corrected_tensor_size", "server_chunk_size"),
        *("var_interval", "var_counter", "local_step_interval", "local_step_counter"),
    }
)

StateDict = dict[str, Any]
# Where to, what from, and if it must be equal on all ranks the name that messages give it.
_Copy = tuple[torch.Tensor, Callable[[], torch.Tensor], str]


# --- saving -------------------------------------------------------------------------------------


def save(optimizer: _Optimizer) -> StateDict:
    """See ``_Optimizer.state_dict``."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    engine, communicator = optimizer._attached()
    # Within consolidated() the parameters are no part of the state; and where the state was filled
    # in place, it is that of other parameters till load_state_dict is called.
    if not optimizer._is_consolidated and not optimizer._vectors.written_from_outside():
        optimizer._adopt()
    engine.settle()
    rank = communicator.rank
    counters = engine.counters
    slabs = counters.pop("slabs")

    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for index, (group, slab) in enumerate(zip(optimizer.param_groups, slabs, strict=True)):
        ids = []
        for parameter in group["params"]:
            ids.append(len(state))
            state[ids[-1]] = _saved(optimizer.state[parameter], rank)
        own = {
            "format": _FORMAT,
            "algorithm": type(optimizer).__name__,
            "world_size": communicator.size,
            "counters": _packed(counters),
            "slab": _packed(slab),
        }
        if (server_error := optimizer._vectors.flat.get(("server_error", index))) is not None:
            own[f"server_error.rank{rank}"] = server_error
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "zeroone": own, "params": ids})

    result: StateDict = {"state": state, "param_groups": groups}
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = post_hook(optimizer, result)
        result = result if replaced is None else replaced
    return result


def _packed(counters: Any) -> Any:
    """Lists as text: torch's loaders lose empty ones where they flatten a state dict."""
    if isinstance(counters, Mapping):
        return {key: _packed(value) for key, value in counters.items()}
    return json.dumps(counters) if isinstance(counters, list) else counters


def _unpacked(counters: Any) -> Any:
    if isinstance(counters, Mapping):
        return {key: _unpacked(value) for key, value in counters.items()}
    return json.loads(counters) if isinstance(counters, str) else counters


def _saved(vectors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    saved = {
        # One per parameter: AdamW adds 1 to each.
        "step": vectors["step"].clone(),
        # Where v = 0 the slot of m may hold something else. In memory of its own: a loader that
        # fills tensors in place would write another rank's values into this rank's.
        "exp_avg": vectors["exp_avg"].masked_fill(vectors["exp_avg_sq"] == 0, 0),
    }
    saved |= {name: vectors[name] for name in _SHARED}
    return saved | {f"{name}.rank{rank}": vectors[name] for name in _OF_RANK if name in vectors}


# --- loading ------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """What loading will do. ``facts``: what must be equal on all ranks, as (what, value)."""

    counters: dict[str, Any]
    groups: list[dict[str, Any]]
    copies: list[_Copy]
    facts: list[tuple[str, str]]


def load(
    optimizer: _Optimizer, state_dict: StateDict, check_options: Callable[[dict[str, Any]], None]
) -> None:
    """See ``_Optimizer.load_state_dict``."""
    engine, communicator = optimizer._attached()
    try:
        state_dict = state_dict.copy()
        for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(optimizer, state_dict)
            state_dict = state_dict if replaced is None else replaced
        try:
            plan = _planned(optimizer, state_dict, check_options)
        except (AttributeError, KeyError, OverflowError, TypeError) as damage:
            raise ValueError(
                f"this state_dict is damaged: {type(damage).__name__}: {damage}"
            ) from damage
    except Exception as failure:
        tell_others(communicator, failure)
        raise
    _core.agree(communicator, plan.facts)

    for target, source, _ in plan.copies:
        target.copy_(source())
    optimizer._vectors.note()
    for group, settings in zip(optimizer.param_groups, plan.groups, strict=True):
        group.update(settings)
    engine.counters = plan.counters
    optimizer._update_steps(engine.counters)
    engine.write_parameters(optimizer._tensors(gradients=False), optimizer._options())
    optimizer._parameters_written()
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _planned(
    optimizer: _Optimizer, state_dict: StateDict, check_options: Callable[[dict[str, Any]], None]
) -> _Plan:
    """Raises ValueError if the state does not fit. Changes nothing."""
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise ValueError("this state_dict lacks 'param_groups' or 'state'")
    if "zeroone" in state_dict:
        raise ValueError("this state_dict is of an older version of zeroone")
    for index, saved in enumerate(groups):
        if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), list):
            raise ValueError(f"this state_dict has a damaged parameter group {index}: {saved}")
        missing = [key for key in _SETTINGS if key not in saved]
        if missing:
            raise ValueError(f"this state_dict lacks {missing} of parameter group {index}")
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        here, there = group.get("param_names"), saved.get("param_names")
        # Other names may be other wrappers' ("module.", "_orig_mod."); another order is a mistake.
        if here and there and here != there and sorted(here) == sorted(there):
            raise ValueError(
                f"this state_dict has the parameters {there} in group {index}, the optimizer has "
                f"them in the order {here}"
            )
    owned = ["zeroone" in saved for saved in groups]
    if all(owned):
        counters, copies = _own(optimizer, groups, state)
        left_out = {"params", "zeroone"}
        kept = [{k: v for k, v in saved.items() if k not in left_out} for saved in groups]
        where = f"zeroone.{type(optimizer).__name__}"
    elif any(owned):
        raise ValueError(f"this state_dict lacks 'zeroone' of group {owned.index(False)}")
    else:
        where = _foreign(groups, state)
        counters, copies = _taken_over(optimizer, groups, state, where)
        taken = {*_SETTINGS, "maximize", "initial_lr"}
        kept = [{k: v for k, v in saved.items() if k in taken} for saved in groups]

    settings = []
    for group, saved in zip(optimizer.param_groups, kept, strict=True):
        check_options({**group, **saved})
        settings.append(copy.deepcopy(saved))
    facts = [("saved by", where)]
    facts += [(f"saved {key}", str(counters[key])) for key in counters]
    for index, saved in enumerate(settings):
        values = [str(saved.get(key)) for key in (*_SETTINGS, "maximize")]
        facts.append((f"saved settings of parameter group {index}", ", ".join(values)))
    facts += [
        (f"saved {what}", hash_of(source().to("cpu", torch.float32)))
        for _, source, what in copies
        if what
    ]
    return _Plan(counters, settings, copies, facts)


def hash_of(tensor: torch.Tensor) -> str:
    """What ranks compare of a tensor."""
    values = tensor.contiguous()
    return f"bytes with hash {_core.hash_bytes(values.data_ptr(), values.nbytes):016x}"


def _own(
    optimizer: _Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any]
) -> tuple[dict[str, Any], list[_Copy]]:
    """Counters and copies of a state that zeroone saved."""
    engine, communicator = optimizer._attached()
    for own in (group["zeroone"] for group in groups):
        if not isinstance(own, Mapping) or own.get("format") != _FORMAT:
            raise ValueError("this state_dict was not saved by this version of zeroone")
        if own.get("algorithm") != type(optimizer).__name__:
            raise ValueError(
                f"this state_dict is of {own.get('algorithm')}, the optimizer is "
                f"{type(optimizer).__name__}"
            )
        for key in ("world_size", "counters"):
            if own.get(key) is None or own[key] != groups[0]["zeroone"].get(key):
                raise ValueError(f"this state_dict has damaged {key}: {own.get(key)}")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != [len(saved["params"]) for saved in groups]:
        raise ValueError(
            f"this state_dict has parameter groups of "
            f"{[len(saved['params']) for saved in groups]} tensors, the optimizer has {sizes}"
        )
    whole = groups[0]["zeroone"]
    if type(whole["world_size"]) is not int or not 1 <= whole["world_size"] < 2**31:
        raise ValueError(f"this state_dict has damaged world_size: {whole['world_size']!r}")
    if not isinstance(whole["counters"], Mapping):
        raise ValueError(f"this state_dict has damaged counters: {whole['counters']!r}")
    counters = _checked_counters(
        {
            **_unpacked(whole["counters"]),
            "slabs": [_unpacked(saved["zeroone"].get("slab")) for saved in groups],
        },
        engine.counters,
    )
    for slab, size in zip(counters["slabs"], sizes, strict=True):
        if not all(0 <= i < size for i in slab["frozen"]) or len(set(slab["frozen"])) != len(
            slab["frozen"]
        ):
            raise ValueError(f"this state_dict has damaged frozen tensors: {slab['frozen']}")
    ranks = _ranks_to_read(whole["world_size"], communicator, groups, state)

    frozen, first = set(), 0  # of all groups; no step of the interval was theirs
    for slab, size in zip(counters["slabs"], sizes, strict=True):
        frozen |= {first + i for i in slab["frozen"]}
        first += size
    copies: list[_Copy] = []
    every_id = (i for saved in groups for i in saved["params"])
    for parameter, slab, where in _places(optimizer, counters["slabs"]):
        vectors = optimizer.state[parameter]
        saved: Any = state.get(next(every_id))
        # Of a frozen parameter torch's distributed loader drops the state, or puts the present one.
        if not parameter.requires_grad and (
            saved is None or (isinstance(saved, Mapping) and saved.get("step") != slab["step"])
        ):
            _logger.warning("no saved state of %s, which is frozen: it keeps its own", where)
            index = next(i for i, p in enumerate(optimizer._parameters()) if p is parameter)
            decay = 1.0 if index in frozen else slab["decay"]
            anchor = partial(_anchor_of, parameter, decay)
            copies.append((vectors["anchor"], anchor, f"anchor of {where}"))
            copies.append((vectors["accumulated"], partial(torch.zeros, parameter.shape), ""))
            continue
        if not isinstance(saved, Mapping):
            raise ValueError(f"this state_dict lacks the state of {where}")
        step = _vector(saved, "step", where, torch.Size([]))
        if step.item() != slab["step"]:
            raise ValueError(
                f"this state_dict has step {step.item():g} of {where}, where zeroone saved "
                f"{slab['step']}: another optimizer has changed it since"
            )
        _vector(saved, "exp_avg", where, parameter.shape)
        for name in _SHARED:
            source = _vector(saved, name, where, parameter.shape)
            copies.append((vectors[name], partial(_same, source), f"{name} of {where}"))
        for name in _OF_RANK:
            if name in vectors:
                keys = [f"{name}.rank{rank}" for rank in ranks]
                sources = [_vector(saved, key, where, parameter.shape) for key in keys]
                copies.append((vectors[name], partial(_mean, sources), ""))

    for index, group in enumerate(optimizer.param_groups):
        target = optimizer._vectors.flat.get(("server_error", index))
        if target is None:
            continue
        numel = sum(parameter.numel() for parameter in group["params"])
        chunk = torch.Size([_chunk(numel, whole["world_size"])])
        of_group = groups[index]["zeroone"]
        where = f"parameter group {index}"
        chunks = [_vector(of_group, f"server_error.rank{rank}", where, chunk) for rank in ranks]
        if whole["world_size"] == communicator.size:
            copies.append((target, partial(_same, chunks[0]), ""))
        else:
            begin = communicator.rank * target.numel()
            copies.append((target, partial(_cut, chunks, numel, begin, target.numel()), ""))
    return counters, copies


def _places(optimizer: _Optimizer, slabs: Sequence[Any]) -> Iterator[tuple[torch.Tensor, Any, str]]:
    """Every parameter, the counters of its group, and its name in messages."""
    count = 0
    for group, slab in zip(optimizer.param_groups, slabs, strict=True):
        for parameter in group["params"]:
            yield parameter, slab, f"parameter {count}"
            count += 1


def _ranks_to_read(
    saved_on: int,
    communicator: _core.Communicator,
    groups: list[dict[str, Any]],
    state: Mapping[Any, Any],
) -> list[int]:
    """The ranks whose own vectors this rank starts from; raises ValueError where one is missing."""
    found = _ranks_in(groups, state)
    here = f"here is rank {communicator.rank} of {communicator.size}"
    if saved_on == communicator.size:
        if communicator.rank not in found:
            raise ValueError(
                f"this state_dict holds the vectors of ranks {found} of {saved_on}, {here}; save "
                "on every rank, and load what the same rank has saved"
            )
        return [communicator.rank]
    if found != list(range(saved_on)):
        raise ValueError(
            f"this state_dict was saved on {saved_on} ranks and holds the vectors of ranks "
            f"{found}, {here}; make one state of those of all ranks by zeroone.checkpoint.merge"
        )
    return found


def _ranks_in(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> list[int]:
    """The ranks that a state holds vectors of."""
    parts = [saved["zeroone"] for saved in groups]
    parts += [saved for saved in state.values() if isinstance(saved, Mapping)]
    found = {_RANK_KEY.fullmatch(str(key)) for part in parts for key in part}
    return sorted({int(match[1]) for match in found if match})


def _vector(saved: Mapping[str, Any], key: str, where: str, shape: torch.Size) -> torch.Tensor:
    found = saved.get(key)
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"this state_dict lacks {key} of {where}, expected shape {list(shape)}")
    if found.shape != shape or not found.is_floating_point():
        raise ValueError(
            f"this state_dict has {key} of {where} of shape {list(found.shape)} and type "
            f"{found.dtype}, expected shape {list(shape)} and a floating point type"
        )
    return found


def _checked_counters(saved: Any, own: dict[str, Any]) -> dict[str, Any]:
    """`saved`, if it has the structure of `own`; raises ValueError."""

    def check(found: Any, expected: Any, where: str) -> None:
        if isinstance(expected, dict):
            if not isinstance(found, dict) or found.keys() != expected.keys():
                raise ValueError(f"this state_dict has damaged {where}: {found}")
            for key, value in expected.items():
                check(found[key], value, f"{where}[{key!r}]")
        elif isinstance(expected, list):
            if not isinstance(found, list):
                raise ValueError(f"this state_dict has damaged {where}: {found}")
            if expected and isinstance(expected[0], dict):
                if len(found) != len(expected):
                    raise ValueError(f"this state_dict has {len(found)} {where}")
                for item, value in zip(found, expected, strict=True):
                    check(item, value, where)
            elif not all(type(item) is (int if "frozen" in where else float) for item in found):
                raise ValueError(f"this state_dict has damaged {where}: {found}")
        elif type(found) is not type(expected) or not (
            0 <= found < 2**63 if isinstance(found, int) else math.isfinite(found)
        ):
            raise ValueError(f"this state_dict has damaged {where}: {found!r}")

    check(saved, own, "counters")
    result: dict[str, Any] = saved
    return result


# --- another number of ranks --------------------------------------------------------------------


def merge(states: Sequence[StateDict]) -> StateDict:
    """One state of what ``optimizer.state_dict()`` returned on every rank, in any order.

    Its ``load_state_dict`` works on any number of ranks: on as many as have saved, bit for bit;
    on another number each rank starts from the mean over the old ones of ``worker_error``, of the
    pending ``accumulated`` and of ``exp_avg`` (summed in float64 in rank order), and from its chunk
    of the old ranks' ``server_error``. So the mean of all residuals is kept, replicas are equal,
    and the schedules go on.

    Copies nothing: the result holds the tensors of ``states``, 12 bytes per parameter of each
    besides 12 of the first.

    Raises:
        ValueError: a rank is missing or there twice, or the states are not of one step.
    """
    if not states:
        raise ValueError("there is no state to merge")
    try:
        return _merged(states)
    except (AttributeError, KeyError, TypeError) as damage:
        raise ValueError(
            f"one of these states is damaged: {type(damage).__name__}: {damage}"
        ) from damage


def _merged(states: Sequence[StateDict]) -> StateDict:
    first = states[0]
    held: list[int] = []
    for number, saved in enumerate(states):
        groups, state = saved.get("param_groups"), saved.get("state")
        if not isinstance(groups, list) or not isinstance(state, Mapping):
            raise ValueError(f"state {number} lacks 'param_groups' or 'state'")
        if not groups or not all("zeroone" in group for group in groups):
            raise ValueError(f"state {number} was not saved by this version of zeroone")
        own = [_without_ranks(group["zeroone"]) for group in groups]
        if own != [_without_ranks(group["zeroone"]) for group in first["param_groups"]]:
            raise ValueError(f"states 0 and {number} are not of the same run and step")
        if state.keys() != first["state"].keys():
            raise ValueError(f"states 0 and {number} are not of the same parameters")
        for index, vectors in state.items():
            for name in _SHARED:
                if not torch.equal(vectors[name], first["state"][index][name]):
                    raise ValueError(f"states 0 and {number} differ in {name} of {index}")
        held += _ranks_in(groups, state)
    expected = list(range(first["param_groups"][0]["zeroone"]["world_size"]))
    if sorted(held) != expected:
        raise ValueError(f"these states are of ranks {sorted(held)}, expected {expected}")

    def united(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
        return {key: value for part in reversed(parts) for key, value in part.items()}

    groups = [
        {**group, "zeroone": united([saved["param_groups"][index]["zeroone"] for saved in states])}
        for index, group in enumerate(first["param_groups"])
    ]
    state = {index: united([saved["state"][index] for saved in states]) for index in first["state"]}
    return {**first, "state": state, "param_groups": groups}


def _without_ranks(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if not _RANK_KEY.fullmatch(str(key))}


def template(state_dict: StateDict, checkpoint_id: str | os.PathLike[str]) -> StateDict:
    """What ``torch.distributed.checkpoint.load`` needs for a checkpoint of any number of ranks.

    ``state_dict`` is what was passed to ``save``, made anew: with ``optimizer.state_dict()``, or
    what ``get_optimizer_state_dict`` returned, at the place where it was then. In the result it has
    the vectors of all ranks that are in the checkpoint, in new memory, so that loading changes no
    optimizer yet; everything else is the same objects.

    Not a collective; reads the checkpoint's metadata. 12 bytes per parameter and rank that saved,
    and 12 more.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import

    metadata = FileSystemReader(checkpoint_id).read_metadata()
    saved: dict[tuple[str, ...], dict[str, torch.Size]] = {}
    for key, path in (metadata.planner_data or {}).items():
        *place, name = map(str, path)
        if _RANK_KEY.fullmatch(name):
            tensor: Any = metadata.state_dict_metadata[key]
            saved.setdefault(tuple(place), {})[name] = tensor.size

    def made(value: Any, place: tuple[str, ...], new: bool) -> Any:
        if isinstance(value, Mapping):
            vectors = saved.get(place)
            new = new or vectors is not None
            if vectors is not None:
                value = _without_ranks(value)
            result = {k: made(v, (*place, str(k)), new) for k, v in value.items()}
            return result | {k: torch.zeros(size) for k, size in (vectors or {}).items()}
        if isinstance(value, list):
            return [made(item, (*place, str(i)), new) for i, item in enumerate(value)]
        return torch.zeros_like(value) if new and isinstance(value, torch.Tensor) else value

    result: StateDict = made(state_dict, (), False)
    return result


def _chunk(numel: int, ranks: int) -> int:
    return 8 * -(-numel // (8 * ranks))


def _same(source: torch.Tensor) -> torch.Tensor:
    return source


def _mean(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float64, in the order of the ranks, rounded once; a single one as it is."""
    if len(sources) == 1:
        return sources[0]
    total = torch.zeros(sources[0].shape, dtype=torch.float64)
    for source in sources:
        total += source
    return (total / len(sources)).float()


def _cut(chunks: Sequence[torch.Tensor], numel: int, begin: int, length: int) -> torch.Tensor:
    """Elements [begin, begin + length) of what the old chunks say of `numel` elements, padded."""
    part = torch.cat(list(chunks))[:numel][begin : begin + length]
    return torch.nn.functional.pad(part, (0, length - part.numel()))


# --- other optimizers ---------------------------------------------------------------------------


def _foreign(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> str:
    """The name of the optimizer that saved this; raises ValueError if none is known."""
    keys: set[str] = set()
    for saved in state.values():
        if not isinstance(saved, Mapping) or not saved.keys() >= _ADAM:
            raise ValueError("this state_dict is neither of zeroone nor of an Adam")
        keys |= saved.keys()
    if "max_exp_avg_sq" in keys or any(saved.get("amsgrad") for saved in groups):
        raise ValueError("this state_dict is of an Adam with amsgrad=True, which is not supported")
    if not keys or keys - _ADAM - _DEEPSPEED:
        unknown = sorted(map(str, keys - _ADAM - _DEEPSPEED))
        raise ValueError(
            "this state_dict is neither of zeroone nor of an Adam: "
            + (f"it has {unknown}" if unknown else "it has no state")
        )
    if "var_interval" in keys:
        return "DeepSpeed's ZeroOneAdam"
    if any("max_grad_norm" in saved for saved in groups):
        return "DeepSpeed's OnebitAdam"
    return "torch's Adam or AdamW"


def _taken_over(
    optimizer: _Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, Any], where: str
) -> tuple[dict[str, Any], list[_Copy]]:
    """Counters and copies of the state of another Adam.

    Kept are the moments and the step, which both corrections go on from. Residuals start at zero:
    others' are of other units (of gradients, or not scaled by lr) and cut otherwise, and DeepSpeed
    itself drops them on load and saves those of one rank. The schedules begin anew.
    """
    engine, communicator = optimizer._attached()
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"this state_dict has {len(groups)} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    ids = [i for saved in groups for i in saved["params"]]
    if len(set(ids)) != len(ids) or not state.keys() <= set(ids):
        raise ValueError(
            f"this state_dict has state of the parameters {list(state)}, its groups name {ids}"
        )
    slabs: list[dict[str, Any]] = []
    copies: list[_Copy] = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        parts = _parts(group["params"], saved["params"], state, index)
        steps = [0 if part is None else _step_of(part["step"]) for part in parts]
        step = max(steps, default=0)
        slabs.append({"step": step, "refreshes": step, "pending": 0, "sum": 0.0})
        slabs[-1] |= {"previous_sum": 0.0, "decay": 1.0, "frozen": []}
        for number, (parameter, part, own_step) in enumerate(
            zip(group["params"], parts, steps, strict=True)
        ):
            of = f"tensor {number} of parameter group {index}"
            vectors = optimizer.state[parameter]
            for name in vectors.keys() - {"step", "anchor", "exp_avg", "exp_avg_sq"}:
                copies.append((vectors[name], partial(torch.zeros, parameter.shape), ""))
            anchor = partial(_anchor_of, parameter, 1.0)
            copies.append((vectors["anchor"], anchor, f"parameters, {of}"))
            for name, beta in zip(("exp_avg", "exp_avg_sq"), saved["betas"], strict=True):
                if part is None:
                    source: Callable[[], torch.Tensor] = partial(torch.zeros, parameter.shape)
                else:
                    source = partial(_restarted, part[name], float(beta), own_step, step)
                copies.append((vectors[name], source, f"{name}, {of}"))
        target = optimizer._vectors.flat.get(("server_error", index))
        if target is not None:
            copies.append((target, partial(torch.zeros, target.shape), ""))

    step = max(slab["step"] for slab in slabs)
    position = {"next": step + 1, "index": 0, "peak_lr": [], "last_lr": []}
    counters = _checked_counters(
        {
            "step": step,
            "last_sync": step,
            "births_due": False,
            "refresh": position,
            "sync": copy.deepcopy(position),
            "slabs": slabs,
        },
        engine.counters,
    )
    if communicator.rank == 0:
        _logger.info(
            "taking over a state of %s: step %d and both moments are kept, the anchor is the "
            "present parameters, residuals start at zero, the schedules begin anew",
            where,
            step,
        )
        if "DeepSpeed" in where:
            _logger.warning(
                "dropped from a state of %s: worker_error, server_error, momentum_accumulator, "
                "and the positions of its own schedules",
                where,
            )
        if any(not saved.get("decoupled_weight_decay", True) for saved in groups) and any(
            saved["weight_decay"] > 0 for saved in groups
        ):
            _logger.warning("the weight decay of torch's Adam is L2; from here on it is decoupled")
    return counters, copies


def _parts(
    parameters: list[torch.Tensor], ids: list[Any], state: Mapping[Any, Any], index: int
) -> list[dict[str, Any] | None]:
    """The saved state per parameter; None where there is none, as of one without a gradient."""
    where = f"parameter group {index}"
    if len(ids) == len(parameters):
        found = [state.get(i) for i in ids]
        for number, (parameter, saved) in enumerate(zip(parameters, found, strict=True)):
            for name in ("exp_avg", "exp_avg_sq"):
                if saved is not None:
                    _vector(saved, name, f"tensor {number} of {where}", parameter.shape)
        return found
    numel = sum(parameter.numel() for parameter in parameters)
    if len(ids) != 1 or ids[0] not in state:
        raise ValueError(
            f"this state_dict has {len(ids)} tensors in {where}, the optimizer has "
            f"{len(parameters)}"
        )
    # DeepSpeed's fp16 wrapper lets the optimizer see one vector per group.
    flat = state[ids[0]]
    vectors = [
        _vector(flat, name, where, torch.Size([numel])) for name in ("exp_avg", "exp_avg_sq")
    ]
    parts: list[dict[str, Any] | None] = []
    begin = 0
    for p in parameters:
        m, v = (vector[begin : begin + p.numel()].view(p.shape) for vector in vectors)
        parts.append({"step": flat["step"], "exp_avg": m, "exp_avg_sq": v})
        begin += p.numel()
    return parts


def _step_of(saved: Any) -> int:
    try:
        step = float(saved)
    except (TypeError, ValueError, RuntimeError):
        step = -1.0
    if step < 0 or step != int(step):
        raise ValueError(f"this state_dict has a damaged step: {saved!r}")
    return int(step)


def _restarted(moment: torch.Tensor, beta: float, own_step: int, step: int) -> torch.Tensor:
    """A moment whose bias correction at `step` gives what that at `own_step` gave."""
    if own_step in (0, step):
        return moment
    return (moment.double() * ((1 - beta**step) / (1 - beta**own_step))).float()


def _anchor_of(parameter: torch.Tensor, decay: float) -> torch.Tensor:
    return parameter.detach().float() / decay


# --- copies and pickles -------------------------------------------------------------------------


def get_state(optimizer: _Optimizer) -> dict[str, Any]:
    """All of an optimizer but its hooks and how it talks to others."""
    engine = optimizer._engine
    assert engine is not None
    begun = bool(optimizer._written)  # it has an anchor
    if begun:
        optimizer._adopt()
        engine.settle()
    return {
        "defaults": optimizer.defaults,
        "param_groups": optimizer.param_groups,
        "make_recipe": optimizer._make_recipe,
        "broadcast_parameters": optimizer._broadcast_parameters,
        "of": optimizer._of,
        "counters": engine.counters if begun else None,
        "vectors": optimizer._vectors.flat,
    }


def set_state(optimizer: _Optimizer, state: dict[str, Any]) -> None:
    """Makes ``optimizer``, which has no attribute yet, from what `get_state` returned.

    Without a collective: the engine is made here, and attached at the next call that needs it.
    """
    optimizer._begin(state["make_recipe"], None, state["broadcast_parameters"])
    optimizer._of = state["of"]
    torch.optim.Optimizer.__setstate__(
        optimizer,
        {"defaults": state["defaults"], "state": {}, "param_groups": state["param_groups"]},
    )
    optimizer.state = defaultdict(dict)
    engine = optimizer._make_engine()
    for (name, group), values in state["vectors"].items():
        if (name, group) not in optimizer._vectors.flat:  # of a rank's chunk: attach looks for it
            optimizer._vectors.allocate(name, group, values.numel())
        optimizer._vectors.flat[name, group].copy_(values)
    optimizer._vectors.note()
    for index in range(len(optimizer.param_groups)):
        optimizer._make_state(index)
    if state["counters"] is not None:
        engine.counters = state["counters"]
        optimizer._update_steps(engine.counters)
        optimizer._remember_parameters()
