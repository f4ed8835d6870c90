"""The optimizers: ``torch.optim.Optimizer`` subclasses over the C++ engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist

from zeroone import _core, schedules
from zeroone.distributed import Group, make_communicator, parse_scale, tell_others
from zeroone.stats import Stats

__all__ = ["AdamW", "OneBitAdam", "ZeroOneAdam"]

# Codes of zeroone::DType.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# State vectors that are equal on all ranks (`exp_avg`: after a sync), and those of a rank.
_SHARED = ("exp_avg", "exp_avg_sq", "anchor")
_OF_RANK = ("accumulated", "worker_error")

_FORMAT = 1

ParamsT = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class _Vectors:
    """The state's memory: one flat fp32 tensor per name and parameter group."""

    def __init__(self) -> None:
        self.flat: dict[tuple[str, int], torch.Tensor] = {}

    def allocate(self, name: str, group: int, numel: int) -> int:
        skew = _core.skew_of(len(self.flat))
        memory = torch.empty(numel + skew)
        _core.prefer_huge_pages(memory.data_ptr(), memory.nbytes)
        self.flat[name, group] = memory.zero_()[skew:]
        return self.flat[name, group].data_ptr()

    def view(self, name: str, group: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        return self.flat[name, group].narrow(0, offset, like.numel()).view(like.shape)


class _Written:
    """What a parameter was when the engine last wrote it; a difference means that others wrote."""

    __slots__ = ("device", "dtype", "pointer", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.version = parameter._version
        self.pointer = parameter.data_ptr()
        self.dtype = parameter.dtype
        self.device = parameter.device

    def is_still(self, parameter: torch.Tensor) -> bool:
        return (
            self.version == parameter._version
            and self.pointer == parameter.data_ptr()
            and self.dtype == parameter.dtype
            and self.device == parameter.device
        )


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_complex():
        raise ValueError(f"parameter {name} is complex ({parameter.dtype}), which is not supported")
    if parameter.dtype not in _DTYPES:
        raise ValueError(
            f"parameter {name} has type {parameter.dtype}; supported are "
            + ", ".join(str(dtype) for dtype in _DTYPES)
        )
    if parameter.layout != torch.strided or not parameter.is_contiguous():
        raise ValueError(f"parameter {name} is not contiguous; make it so with .contiguous()")
    if parameter.device.type != "cpu":
        raise ValueError(f"parameter {name} is on {parameter.device}; supported is the CPU")


class _Optimizer(torch.optim.Optimizer):
    """What the algorithms share. They differ in the recipe that their constructor makes."""

    def __init__(
        self,
        params: ParamsT,
        make_recipe: Callable[[], _core.Recipe],
        *,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
        process_group: Group | None,
        broadcast_parameters: bool,
    ) -> None:
        self._engine: _core.Engine | None = None
        self._communicator: _core.Communicator | None = None
        self._process_group = process_group
        self._broadcast_parameters = broadcast_parameters
        self._vectors = _Vectors()
        self._written: list[_Written] = []  # of every parameter, in order
        self._borrowed: list[torch.Tensor] = []  # copies of gradients, alive during a call
        distributed = process_group is not None or (dist.is_available() and dist.is_initialized())
        communicator = make_communicator(process_group) if distributed else None
        try:
            defaults = {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
            }
            super().__init__(params, defaults)
            engine = _core.Engine(
                make_recipe(),
                [self._layout(group, index) for index, group in enumerate(self.param_groups)],
                self._vectors.allocate,
            )
        except Exception as failure:
            if communicator is not None:
                tell_others(communicator, failure)
            raise
        self._engine = engine
        for index in range(len(self.param_groups)):
            self._make_state(index)
        if communicator is not None:
            self._attach(communicator)

    # --- construction -------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. After construction a collective: the ranks agree on the new
        group before any of them has it, and its parameters are broadcast."""
        index = len(self.param_groups)
        failure: Exception | None = None
        layout: list[tuple[str, int]] = []
        try:
            super().add_param_group(param_group)
            group = self.param_groups[index]
            for name, parameter in self._named(group, index):
                _check_parameter(name, parameter)
            _check_options(group)
            layout = self._layout(group, index)
        except Exception as error:
            failure = error
        try:
            if self._communicator is not None:  # after construction
                new = [
                    (f"tensor {i} of parameter group {index}", f"{name} with {numel} elements")
                    for i, (name, numel) in enumerate(layout)
                ]
                message = "" if failure is None else f"{type(failure).__name__}: {failure}"
                _core.agree(self._communicator, new, message)
            if failure is not None:
                raise failure
        except Exception as error:
            del self.param_groups[index:]
            raise failure or error from None
        if self._engine is None:
            return  # under construction
        self._engine.add_group(layout)
        self._make_state(index)
        if self._communicator is not None:
            self._adopt()
            self._attach(self._communicator)

    @staticmethod
    def _named(group: dict[str, Any], index: int) -> list[tuple[str, torch.Tensor]]:
        names = group.get("param_names") or [
            f"{i} of parameter group {index}" for i in range(len(group["params"]))
        ]
        return list(zip(names, group["params"], strict=True))

    def _layout(self, group: dict[str, Any], index: int) -> list[tuple[str, int]]:
        return [
            (f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}", p.numel())
            for name, p in self._named(group, index)
        ]

    def _make_state(self, index: int) -> None:
        step = torch.zeros(())  # one for all parameters of the group
        offset = 0
        for parameter in self.param_groups[index]["params"]:
            state = self.state[parameter]
            state["step"] = step
            for name in (*_SHARED, *_OF_RANK):
                if (name, index) in self._vectors.flat:
                    state[name] = self._vectors.view(name, index, offset, parameter)
            offset += parameter.numel()

    def _attach(self, communicator: _core.Communicator) -> None:
        """Agrees with the other ranks and takes the parameters as the anchor."""
        assert self._engine is not None
        settings = [("broadcast_parameters", str(self._broadcast_parameters))]
        for index, group in enumerate(self.param_groups):
            settings += [
                (f"{name} of parameter group {index}", str(value))
                for name, value in zip(
                    ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
                    _options(group),
                    strict=True,
                )
            ]
        self._engine.attach(
            communicator,
            self._tensors(gradients=False),
            settings,
            self._broadcast_parameters,
            torch.get_num_threads(),
        )
        self._communicator = communicator
        self._parameters_written()

    def _attached(self) -> tuple[_core.Engine, _core.Communicator]:
        assert self._engine is not None
        initialized = dist.is_available() and dist.is_initialized()
        if self._communicator is None:
            self._attach(
                make_communicator(self._process_group) if initialized else _core.LocalCommunicator()
            )
        elif (
            isinstance(self._communicator, _core.LocalCommunicator)
            and initialized
            and dist.get_world_size() > 1
        ):
            raise RuntimeError(
                "a process group of several ranks appeared after the first step; call "
                "torch.distributed.init_process_group before the optimizer is made"
            )
        assert self._communicator is not None
        return self._engine, self._communicator

    # --- steps --------------------------------------------------------------------------------

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _tensors(self, gradients: bool = True) -> list[tuple[int, int, int, int]]:
        """Addresses of parameters and gradients, collected anew at every call."""
        tensors = []
        for parameter in self._parameters():
            gradient = parameter.grad if gradients else None
            if gradient is not None and not gradient.is_contiguous():
                gradient = gradient.contiguous()
                self._borrowed.append(gradient)
            tensors.append(
                (
                    parameter.data_ptr(),
                    0 if gradient is None else gradient.data_ptr(),
                    _DTYPES[parameter.dtype],
                    0 if gradient is None else _DTYPES[gradient.dtype],
                )
            )
        return tensors

    def _check_gradients(self) -> None:
        for index, group in enumerate(self.param_groups):
            _check_options(group)
            for name, parameter in self._named(group, index):
                _check_parameter(name, parameter)
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of parameter {name} is sparse ({gradient.layout}); make the "
                        "layer with sparse=False"
                    )
                if gradient.dtype not in _DTYPES or gradient.device.type != "cpu":
                    raise RuntimeError(
                        f"the gradient of parameter {name} is {gradient.dtype} on "
                        f"{gradient.device}; supported are float32, bfloat16, float16 on the CPU"
                    )

    def _options(self) -> list[tuple[float, float, float, float, float, bool]]:
        return [_options(group) for group in self.param_groups]

    def _parameters_written(self) -> None:
        """Tells autograd, and remembers what was written."""
        parameters = self._parameters()
        torch.autograd.graph.increment_version(parameters)
        self._written = [_Written(parameter) for parameter in parameters]

    def _adopt(self) -> None:
        """Takes over what others have written to parameters since we did."""
        assert self._engine is not None
        changed = [
            index  # of parameters that we have written; a new group's follow them
            for index, (written, parameter) in enumerate(
                zip(self._written, self._parameters(), strict=False)
            )
            if not written.is_still(parameter)
        ]
        if changed:
            self._engine.adopt(self._tensors(gradients=False), self._options(), changed)
            parameters = self._parameters()
            for index in changed:
                self._written[index] = _Written(parameters[index])

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Takes the parameters' present values as the ones to go on from.

        Needed only after writing through ``parameter.data`` or a raw pointer: other changes
        (``load_state_dict``, ``copy_``, ``.to()``) are noticed at the next step. Every rank must
        do the same; the next exchange verifies it.
        """
        engine, _ = self._attached()
        engine.adopt_all(self._tensors(gradients=False), self._options())

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step. A collective at refreshes and syncs: every rank must call it.

        Raises:
            CommunicationError: a collective failed or timed out. Parameters and state are those of
                before the step.
            DisagreementError: ranks differ in step, learning rate or other settings, or another
                rank failed. Parameters and state are those of before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine, communicator = self._attached()
        failure: Exception | None = None
        try:
            self._check_gradients()
            self._adopt()
        except (RuntimeError, ValueError) as error:
            failure = error
        try:
            if failure is None:
                engine.step(communicator, self._tensors(), self._options(), torch.get_num_threads())
            else:  # where the others exchange something at this step, they are told
                message = f"{type(failure).__name__}: {failure}"
                engine.step(communicator, [], self._options(), 1, message)
        except _core.CommunicationError as error:
            raise _at_step(engine.counters["step"] + 1, error) from error.__cause__
        except (_core.DisagreementError, ValueError):
            if failure is None:
                raise
        finally:
            self._borrowed.clear()
        if failure is not None:
            raise failure
        self._parameters_written()
        self._update_steps(engine)
        return loss

    def _update_steps(self, engine: _core.Engine) -> None:
        for group, slab in zip(self.param_groups, engine.counters["slabs"], strict=True):
            if group["params"]:
                self.state[group["params"][0]]["step"].fill_(slab["step"])

    @torch.no_grad()
    def sync(self) -> None:
        """Makes all replicas equal now: before evaluation or export. A collective.

        Sends nothing where no local step is pending.
        """
        engine, communicator = self._attached()
        self._adopt()
        tensors = self._tensors(gradients=False)
        try:
            engine.sync(communicator, tensors, self._options(), torch.get_num_threads())
        except _core.CommunicationError as error:
            raise _at_step(engine.counters["step"], error) from error.__cause__
        self._parameters_written()

    @property
    def stats(self) -> Stats:
        """What happened so far in this process."""
        assert self._engine is not None
        return Stats(**self._engine.stats)

    # --- saving -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with this rank's own vectors under keys that contain the rank.

        Save it on every rank: what differs between ranks (residuals, pending local steps) can be
        restored only from there.
        """
        engine, communicator = self._attached()
        self._adopt()
        engine.settle()
        result = super().state_dict()
        rank = communicator.rank
        result["state"] = {
            index: {
                (f"{name}.rank{rank}" if name in _OF_RANK else name): value
                for name, value in state.items()
            }
            for index, state in result["state"].items()
        }
        result["zeroone"] = {
            "format": _FORMAT,
            "algorithm": type(self).__name__,
            "rank": rank,
            "world_size": communicator.size,
            "counters": engine.counters,
            f"server_error.rank{rank}": [
                self._vectors.flat.get(("server_error", index))
                for index in range(len(self.param_groups))
            ],
        }
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned on this rank, and writes the parameters.

        A collective: ranks agree that all states fit and are of the same step before any of them
        changes anything. Copies in place and in fp32.

        Raises:
            ValueError: the state is of another algorithm, layout, rank or world size, or damaged.
            DisagreementError: another rank's state does not fit, or is of another step.
        """
        engine, communicator = self._attached()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        try:
            copies = self._planned_copies(state_dict)
            counters = _checked_counters(state_dict["zeroone"].get("counters"), engine.counters)
        except Exception as failure:
            tell_others(communicator, failure)
            raise
        _core.agree(communicator, [(f"saved {key}", str(counters[key])) for key in counters])

        for target, source in copies:
            target.copy_(source)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        engine.counters = counters
        engine.write_parameters(self._tensors(gradients=False), self._options())
        self._parameters_written()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _planned_copies(
        self, state_dict: dict[str, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) of every tensor; raises ValueError if the state does not fit."""
        _, communicator = self._attached()
        rank = communicator.rank
        own = state_dict.get("zeroone")
        if not isinstance(own, dict) or own.get("format") != _FORMAT:
            raise ValueError("this state_dict was not saved by this version of zeroone")
        for what, here in (
            ("algorithm", type(self).__name__),
            ("rank", rank),
            ("world_size", communicator.size),
        ):
            if own.get(what) != here:
                raise ValueError(f"this state_dict is of {what} {own.get(what)}, here it is {here}")
        groups, state = state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(groups, list) or not isinstance(state, dict):
            raise ValueError("this state_dict lacks 'param_groups' or 'state'")
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group.get("params", ())) for group in groups]
        if sizes != saved_sizes:
            raise ValueError(
                f"this state_dict has parameter groups of {saved_sizes} tensors, the optimizer has "
                f"{sizes}"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            if missing := group.keys() - saved.keys():
                raise ValueError(f"this state_dict lacks {sorted(missing)} of a parameter group")
            _check_options(saved)

        pairs: list[tuple[str, torch.Tensor, Any]] = []
        for index, parameter in enumerate(self._parameters()):
            saved = state.get(index, {})
            for name, target in self.state[parameter].items():
                key = f"{name}.rank{rank}" if name in _OF_RANK else name
                pairs.append((f"{key} of parameter {index}", target, saved.get(key)))
        key = f"server_error.rank{rank}"
        errors: Sequence[Any] = own.get(key, ())
        for index in range(len(self.param_groups)):
            target_error = self._vectors.flat.get(("server_error", index))
            if target_error is not None:
                source = errors[index] if index < len(errors) else None
                pairs.append((f"{key} of parameter group {index}", target_error, source))
        for what, target, source in pairs:
            if not isinstance(source, torch.Tensor) or source.shape != target.shape:
                found = f"of shape {list(source.shape)}" if isinstance(source, torch.Tensor) else ""
                raise ValueError(
                    f"this state_dict has {what} {found or 'missing'}, expected shape "
                    f"{list(target.shape)}"
                )
        return [(target, source) for _, target, source in pairs]


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
            elif not all(isinstance(item, float) for item in found):
                raise ValueError(f"this state_dict has damaged {where}: {found}")
        elif type(found) is not type(expected):
            raise ValueError(f"this state_dict has damaged {where}: {found!r}")

    check(saved, own, "counters")
    result: dict[str, Any] = saved
    return result


def _at_step(step: int, error: Exception) -> _core.CommunicationError:
    return _core.CommunicationError(f"step {step}: {error}")


def _options(group: dict[str, Any]) -> tuple[float, float, float, float, float, bool]:
    beta1, beta2 = group["betas"]
    return (
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["maximize"]),
    )


def _check_options(group: dict[str, Any]) -> None:
    """Raises ValueError, in torch's words, if a setting of the group is invalid."""
    lr, beta1, beta2, eps, weight_decay, _ = _options(group)
    if not 0 <= lr < float("inf"):
        raise ValueError(f"Invalid learning rate: {lr}")
    if not 0 <= beta1 < 1:
        raise ValueError(f"Invalid beta parameter at index 0: {beta1}")
    if not 0 <= beta2 < 1:
        raise ValueError(f"Invalid beta parameter at index 1: {beta2}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"Invalid epsilon value: {eps}")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


class ZeroOneAdam(_Optimizer):
    """0/1 Adam (arXiv 2202.06009): AdamW that sends one bit per parameter, and often none.

    A drop-in for ``torch.optim.AdamW`` in a data-parallel program: gradients stay local, and this
    optimizer does all averaging. The second moment is held still between the refreshes of
    ``variance_schedule``, which are exact and dense; in between workers step alone, and at the
    steps of ``sync_schedule`` average their accumulated steps by one sign bit per parameter, with
    error feedback on both sides.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer; float32,
            bfloat16 or float16, contiguous, on the CPU.
        lr: learning rate (default 1e-3); a float or a tensor.
        betas: decay of first and second moment (default (0.9, 0.999)).
        eps: added to the root of the second moment (default 1e-8).
        weight_decay: decoupled (default 0.01).
        bias_correction: correct both moments for their start at zero (default True).
        maximize: ascend (default False).
        variance_schedule: steps of refreshes (default ``schedules.Doubling(kappa=16)``).
        sync_schedule: steps of one-bit averages (default
            ``schedules.LearningRateTied(max_interval=16)``).
        scale: "l1" (default), a block's mean absolute value, or "l2", its root mean square.
        process_group: the ranks to average over, a process group or a device mesh of one dimension
            (default None: all, or this process alone where ``torch.distributed`` is not initialised
            by the first step).
        broadcast_parameters: start from rank 0's parameters on all ranks (default True).

    Construction is a collective, as is every :meth:`step` that refreshes or syncs. Not
    thread-safe. Memory: 20 bytes per parameter of state and 8 per parameter of this rank's chunk;
    8 bytes per parameter for the wire, 4 on one rank.

    Raises:
        ValueError: an invalid argument on this rank, before anything is sent or changed.
        DisagreementError: ranks differ in layout or settings, or another rank failed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        variance_schedule: schedules.Schedule | None = None,
        sync_schedule: schedules.Schedule | None = None,
        scale: str = "l1",
        process_group: Group | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        def make_recipe() -> _core.Recipe:
            return _core.zero_one_adam(
                (variance_schedule or schedules.Doubling()).native(),
                (sync_schedule or schedules.LearningRateTied()).native(),
                parse_scale(scale),
                bias_correction,
            )

        super().__init__(
            params,
            make_recipe,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            process_group=process_group,
            broadcast_parameters=broadcast_parameters,
        )


class OneBitAdam(_Optimizer):
    """1-bit Adam (arXiv 2102.02888): dense AdamW, then v frozen and one bit per parameter and step.

    Args:
        warmup_steps: dense steps before v is frozen, at least 1. The authors advise 15 to 20 % of
            the run.

    Other arguments, errors and memory: see :class:`ZeroOneAdam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        warmup_steps: int,
        bias_correction: bool = True,
        maximize: bool = False,
        scale: str = "l1",
        process_group: Group | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        super().__init__(
            params,
            lambda: _core.one_bit_adam(warmup_steps, parse_scale(scale), bias_correction),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            process_group=process_group,
            broadcast_parameters=broadcast_parameters,
        )


class AdamW(_Optimizer):
    """Exact data-parallel AdamW (arXiv 1711.05101): the mean gradient, dense, every step.

    The baseline: ``torch.optim.AdamW`` on gradients that were averaged in fp32. Arguments, errors:
    see :class:`ZeroOneAdam`. State: 16 bytes per parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        process_group: Group | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        super().__init__(
            params,
            lambda: _core.adamw(bias_correction),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            process_group=process_group,
            broadcast_parameters=broadcast_parameters,
        )
