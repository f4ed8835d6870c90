"""The optimizers: ``torch.optim.Optimizer`` subclasses over the C++ engine."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as dist

from zeroone import _core, checkpoint, schedules
from zeroone.distributed import (
    Group,
    make_communicator,
    parse_dense_wire,
    parse_scale,
    tell_others,
)
from zeroone.stats import ResidualNorms, Stats, Watch

__all__ = ["AdamW", "OneBitAdam", "ZeroOneAdam"]

_logger = logging.getLogger("zeroone")

# Codes of zeroone::DType.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# State vectors that are equal on all ranks (`exp_avg`: after a sync), and those of a rank.
_SHARED = ("exp_avg", "exp_avg_sq", "anchor")
_OF_RANK = ("accumulated", "worker_error")

ParamsT = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class _Vectors:
    """The state's memory: one flat fp32 tensor per name and parameter group."""

    def __init__(self) -> None:
        self.flat: dict[tuple[str, int], torch.Tensor] = {}
        self._versions: dict[tuple[str, int], int] = {}

    def allocate(self, name: str, group: int, numel: int) -> int:
        if (name, group) in self.flat:  # of a copy, made before its engine asked for it
            return self.flat[name, group].data_ptr()
        skew = _core.skew_of(len(self.flat))
        memory = torch.empty(numel + skew)
        _core.prefer_huge_pages(memory.data_ptr(), memory.nbytes)
        self.flat[name, group] = memory.zero_()[skew:]
        self._versions[name, group] = memory._version
        return self.flat[name, group].data_ptr()

    def note(self) -> None:
        """What is in the vectors now was meant to be there."""
        self._versions = {key: vector._version for key, vector in self.flat.items()}

    def written_from_outside(self) -> bool:
        """Whether somebody, such as a loader that fills a state_dict in place, wrote to them."""
        return any(vector._version != self._versions[key] for key, vector in self.flat.items())

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
    if parameter.layout != torch.strided:
        raise ValueError(f"parameter {name} has layout {parameter.layout}; supported is strided")
    sizes_and_strides = zip(parameter.shape, parameter.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in sizes_and_strides)
    if parameter.numel() > extent:
        raise ValueError(
            f"parameter {name} has elements that share memory (strides {parameter.stride()}); "
            "make it whole with .contiguous()"
        )
    if parameter.device.type != "cpu":
        raise ValueError(f"parameter {name} is on {parameter.device}; supported is the CPU")
    if parameter.numel() and parameter.data_ptr() == 0:
        raise ValueError(
            f"parameter {name} is a {type(parameter).__name__} without memory of its own; "
            "supported are plain tensors, whole on every rank"
        )


class _Optimizer(torch.optim.Optimizer):
    """What the algorithms share. They differ in the recipe that their constructor makes."""

    # A GradScaler then calls `step` on every rank in every step and leaves the unscaling to it.
    # A rank whose gradient overflowed counts as zero in the mean; its own scaler lowers its scale.
    _step_supports_amp_scaling = True

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
        self._begin(make_recipe, process_group, broadcast_parameters)
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
            self._make_engine()
        except Exception as failure:
            if communicator is not None:
                tell_others(communicator, failure)
            raise
        for index in range(len(self.param_groups)):
            self._make_state(index)
        if communicator is not None:
            self._attach(communicator)

    # --- construction -------------------------------------------------------------------------

    def _begin(
        self,
        make_recipe: Callable[[], _core.Recipe],
        process_group: Group | None,
        broadcast_parameters: bool,
    ) -> None:
        """The attributes of an optimizer without parameters."""
        self._make_recipe = make_recipe
        self._engine: _core.Engine | None = None
        self._communicator: _core.Communicator | None = None
        self._process_group = process_group
        self._broadcast_parameters = broadcast_parameters
        self._vectors = _Vectors()
        self._written: list[_Written] = []  # of every parameter, in order
        self._borrowed: list[torch.Tensor] = []  # copies of gradients, alive during a call
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # strided, and a dense copy
        self._max_norm = math.inf
        self._valid_options: list[tuple[float, float, float, float, float, bool]] = []
        self._is_consolidated = False
        self._watch = Watch()
        self._of: tuple[int, int] | None = None  # the rank, and of how many, that the state is of
        self._to_attach: _core.Communicator | None = None  # of what this is a copy of

    def _make_engine(self) -> _core.Engine:
        self._engine = _core.Engine(
            self._make_recipe(),
            [self._layout(group, index) for index, group in enumerate(self.param_groups)],
            self._vectors.allocate,
        )
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return checkpoint.get_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        checkpoint.set_state(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Optimizer:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        result._process_group = self._process_group
        result._to_attach = self._communicator or self._to_attach
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group. After construction a collective: the ranks agree on the new
        group before any of them has it, and its parameters are broadcast."""
        index = len(self.param_groups)
        failure: Exception | None = None
        layout: list[tuple[str, int]] = []
        new: list[tuple[str, str]] = []
        try:
            if self._communicator is not None:  # after construction
                self._adopt()
            super().add_param_group(param_group)
            group = self.param_groups[index]
            _check_options(group)
            self._check_parameters()
            self._check_memory()
            layout = self._layout(group, index)
            new = self._settings()
        except Exception as error:
            failure = error
        try:
            if self._communicator is not None:
                new += [
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
            self._attach(self._communicator)

    def _check_memory(self) -> None:
        """Raises ValueError if two parameters are one piece of memory: it would get both steps."""
        names: dict[int, str] = {}
        for index, group in enumerate(self.param_groups):
            for name, parameter in self._named(group, index):
                if parameter.numel() == 0:
                    continue
                other = names.setdefault(parameter.data_ptr(), name)
                if other != name:
                    raise ValueError(f"parameters {other} and {name} share their memory")

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

    def _settings(self) -> list[tuple[str, str]]:
        """What the ranks must have in common."""
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
        return settings

    def _attach(self, communicator: _core.Communicator) -> None:
        """Agrees with the other ranks and takes the parameters as the anchor."""
        assert self._engine is not None
        here = communicator.rank, communicator.size
        if self._of not in (None, here):
            failure = ValueError(
                f"this copy is of rank {self._of}, here is rank {here} (rank, number of ranks); "
                "load a state_dict instead: see zeroone.checkpoint"
            )
            tell_others(communicator, failure)
            raise failure
        self._valid_options = self._options()
        self._engine.attach(
            communicator,
            self._tensors(gradients=False),
            self._settings(),
            self._broadcast_parameters,
            torch.get_num_threads(),
        )
        self._communicator = communicator
        self._of = here
        self._parameters_written()

    def _attached(self) -> tuple[_core.Engine, _core.Communicator]:
        assert self._engine is not None
        initialized = dist.is_available() and dist.is_initialized()
        if self._communicator is None:
            self._adopt()  # of a copy: what was written to it before
            self._attach(
                self._to_attach
                or (
                    make_communicator(self._process_group)
                    if initialized
                    else _core.LocalCommunicator()
                )
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

    def _tensors(self, gradients: bool = True) -> list[tuple[int, int, int, int, float, bool]]:
        """Addresses of parameters and gradients, collected anew at every call.

        A strided parameter is worked on in a dense copy; `_parameters_written` writes it back.
        """
        self._staged.clear()
        self._check_parameters()
        factor = 1.0
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)  # set by a GradScaler
        if scale is not None:  # 0: it has backed off for ever, as no gradient was finite
            factor = 1 / float(scale) if scale else math.inf
        tensors = []
        for parameter in self._parameters():
            data: torch.Tensor = parameter
            if not parameter.is_contiguous():
                data = parameter.detach().contiguous()
                self._staged.append((parameter, data))
            gradient = parameter.grad if gradients else None
            if gradient is not None and not gradient.is_contiguous():
                gradient = gradient.contiguous()
                self._borrowed.append(gradient)
            tensors.append(
                (
                    data.data_ptr(),
                    0 if gradient is None else gradient.data_ptr(),
                    _DTYPES[parameter.dtype],
                    0 if gradient is None else _DTYPES[gradient.dtype],
                    factor,
                    not parameter.requires_grad and parameter.grad is None,
                )
            )
        return tensors

    def _check_parameters(self) -> None:
        for index, group in enumerate(self.param_groups):
            for name, parameter in self._named(group, index):
                _check_parameter(name, parameter)
                state = self.state.get(parameter)
                if state and parameter.shape != state["anchor"].shape:
                    raise RuntimeError(
                        f"parameter {name} has shape {list(parameter.shape)}, at construction it "
                        f"had {list(state['anchor'].shape)}"
                    )

    def _check_gradients(self) -> None:
        for index, group in enumerate(self.param_groups):
            _check_options(group)
            for name, parameter in self._named(group, index):
                gradient = parameter.grad
                if gradient is None:
                    continue
                shape = parameter.shape
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of parameter {name} is sparse ({gradient.layout}); make the "
                        "layer with sparse=False"
                    )
                if gradient.shape != shape:
                    raise RuntimeError(
                        f"the gradient of parameter {name} has shape {list(gradient.shape)}, the "
                        f"parameter {list(shape)}"
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
        for parameter, data in self._staged:
            parameter.detach().copy_(data)
        self._staged.clear()
        torch.autograd.graph.increment_version(self._parameters())
        self._vectors.note()
        self._remember_parameters()

    def _remember_parameters(self) -> None:
        self._written = [_Written(parameter) for parameter in self._parameters()]

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
        if self._is_consolidated:
            raise RuntimeError("not inside consolidated(): its parameters are not the optimizer's")
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
        self._adopt()
        engine.adopt_all(self._tensors(gradients=False), self._options())

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clips the gradient of the next :meth:`step`, over all parameters, to an l2 norm.

        At a refresh the *mean* gradient g over the ranks is clipped, as in dense training:
        g min(1, max_norm / (norm(g) + 1e-6)). At other steps no rank knows g: each clips its own
        gradient g_i by its own norm, g_i min(1, max_norm / (norm(g_i) + 1e-6)). A local gradient is
        the longer of the two (by the noise of its batch), so ``max_norm`` bites more often there.

        Gradients are left as they are; those of a loss scaler are unscaled first. Not a
        collective, but every rank must ask for the same. Cost: one pass over the gradient.
        ``torch.nn.utils.clip_grad_norm_`` works, too, and clips each rank's gradient at every step.

        Raises:
            ValueError: ``max_norm`` is not positive.
        """
        if not max_norm > 0:
            raise ValueError(f"Invalid max_norm: {max_norm} (must be positive)")
        self._max_norm = float(max_norm)

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
        self._watch.step_begins()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine, communicator = self._attached()
        failure: Exception | None = None
        try:
            self._check_gradients()
            self._adopt()
            tensors, self._valid_options = self._tensors(), self._options()
        except Exception as error:
            failure = error
        options, max_norm = self._valid_options, self._max_norm
        done = False
        try:
            if failure is None:
                threads = torch.get_num_threads()
                with _range(lambda: f"step.{_kind_of_next_step(engine, options)}"):
                    engine.step(communicator, tensors, options, threads, max_norm)
            else:  # where the others exchange something at this step, they are told
                message = f"{type(failure).__name__}: {failure}"
                engine.step(communicator, [], options, 1, max_norm, message)
            done = failure is None
        except _core.CommunicationError as error:
            raise _at_step(engine.counters["step"] + 1, error) from error.__cause__
        except (_core.DisagreementError, ValueError):
            if failure is None:
                raise
        finally:
            self._borrowed.clear()
            if not done:  # a GradScaler takes back only after a success what it has set
                for name in ("grad_scale", "found_inf"):
                    self.__dict__.pop(name, None)
        if failure is not None:
            raise failure
        self._max_norm = math.inf
        self._parameters_written()
        counters = engine.counters
        self._update_steps(counters)
        if counters["step"] == 1 and engine.stats["alike_refreshes"] == 1:
            _logger.warning(
                "all ranks had the same gradient at the first step: it looks already averaged (for "
                "DistributedDataParallel call zeroone.local_gradients(module) first), or every "
                "rank reads the same data"
            )
        self._watch.step_ended(lambda: self.stats)
        return loss

    def _update_steps(self, counters: dict[str, Any]) -> None:
        for group, slab in zip(self.param_groups, counters["slabs"], strict=True):
            if group["params"]:
                self.state[group["params"][0]]["step"].fill_(slab["step"])

    @torch.no_grad()
    def sync(self) -> None:
        """Makes all replicas equal now: before evaluation or export. A collective.

        Sends nothing where no local step is pending.
        """
        engine, communicator = self._attached()
        failure: Exception | None = None
        tensors: list[tuple[int, int, int, int, float, bool]] = []
        try:
            self._adopt()
            tensors, self._valid_options = self._tensors(gradients=False), self._options()
        except Exception as error:
            failure = error
        message = "" if failure is None else f"{type(failure).__name__}: {failure}"
        threads = torch.get_num_threads()
        try:
            with _range(lambda: "sync"):
                engine.sync(communicator, tensors, self._valid_options, threads, message)
        except _core.CommunicationError as error:
            raise _at_step(engine.counters["step"], error) from error.__cause__
        except (_core.DisagreementError, ValueError):
            if failure is None:
                raise
        if failure is not None:
            raise failure
        self._parameters_written()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Within the context the parameters are the exact mean of the replicas, equal on all ranks.

        For evaluation and export inside an interval: unlike :meth:`sync` it leaves the training
        as it is, and afterwards the parameters are this rank's own again, bit for bit; what was
        written to them within is lost. Entering is a collective: one dense fp32 exchange, nothing
        where no local step is pending. The optimizer can't step within.

        Raises:
            CommunicationError, DisagreementError: as :meth:`sync`.
            RuntimeError: a step, sync or second context within.
        """
        with torch.no_grad():
            engine, communicator = self._attached()
            self._adopt()
            arguments = self._tensors(gradients=False), self._options()
            try:
                engine.write_mean(communicator, *arguments, torch.get_num_threads())
            except _core.CommunicationError as error:
                raise _at_step(engine.counters["step"], error) from error.__cause__
            self._parameters_written()
        self._is_consolidated = True
        try:
            yield
        finally:
            self._is_consolidated = False
            with torch.no_grad():
                engine.write_parameters(self._tensors(gradients=False), self._options())
                self._parameters_written()

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Verifies that what must be equal on all ranks is: counters, settings, and per tensor the
        anchor, the second moment and, where no local step is pending, momentum and parameter.

        A collective. Cost: one pass over the state and an exchange of a few bytes.

        Raises:
            DisagreementError: on every rank, naming the first tensor that differs, and two ranks.
        """
        engine, communicator = self._attached()
        counters = engine.counters
        pending = any(slab["pending"] > 0 for slab in counters["slabs"])
        lines = [("counters", str(counters)), ("settings", str(self._options()))]
        for index, group in enumerate(self.param_groups):
            for name, parameter in self._named(group, index):
                state = self.state[parameter]
                values = {"anchor": state["anchor"], "exp_avg_sq": state["exp_avg_sq"]}
                if not pending:
                    born = state["exp_avg_sq"] > 0
                    values["exp_avg"] = torch.where(born, state["exp_avg"], 0)
                    values["parameter"] = parameter.detach()
                lines += [
                    (f"{what} of {name}", checkpoint.hash_of(value))
                    for what, value in values.items()
                ]
        _core.agree(communicator, lines)

    @property
    def stats(self) -> Stats:
        """What happened so far in this process. Costs some microseconds."""
        assert self._engine is not None
        return Stats(**self._engine.stats, elapsed_seconds=self._watch.elapsed_seconds)

    def residual_norms(self) -> ResidualNorms:
        """How much this rank still owes. Reads all residuals, 4 bytes per parameter and 4 per
        parameter of this rank's chunk; sends nothing."""

        def norm(name: str) -> float:
            return math.hypot(
                *(
                    torch.linalg.vector_norm(part, dtype=torch.float64).item()
                    for (key, _), vector in self._vectors.flat.items()
                    if key == name
                    for part in torch.split(vector, 2**16)  # fp64 copies that stay in the caches
                )
            )

        return ResidualNorms(norm("worker_error"), norm("server_error"))

    # --- saving -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict: AdamW's keys, and ours; tensors are the live ones.

        Save it on every rank: what differs between ranks (residuals, pending local steps) is under
        keys that contain the rank, and can be restored only from there. On another number of ranks
        see :func:`zeroone.checkpoint.merge`, and :func:`zeroone.checkpoint.template` for
        ``torch.distributed.checkpoint``.
        """
        return checkpoint.save(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned on this rank, and writes the parameters.

        A collective: ranks agree that all states fit, are of the same step, and have the same
        anchor and moments, before any of them changes anything. Copies in place and in fp32.

        Also takes a state that :func:`zeroone.checkpoint.merge` made of those of another number of
        ranks, or one of ``torch.optim.AdamW``, ``torch.optim.Adam``, or DeepSpeed's ``OnebitAdam``
        or ``ZeroOneAdam``. Of these it keeps the step and both moments, and the anchor is the
        parameters as they are: load the model first.

        Raises:
            ValueError: the state is of another algorithm, layout or rank, or of some of the ranks
                alone, or damaged.
            DisagreementError: another rank's state does not fit, or is another one.
        """
        checkpoint.load(self, state_dict, _check_options)


def _range(name: Callable[[], str]) -> AbstractContextManager[object]:
    """A range for torch's profiler: where none is active it costs 0.5 us, not 8 (measured)."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function("zeroone." + name())


def _kind_of_next_step(
    engine: _core.Engine, options: Sequence[tuple[float, float, float, float, float, bool]]
) -> str:
    return ("local", "refresh", "sync")[engine.next_step(options)]


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


# What makes a recipe anew in a copy; functions of the module, so that they can be pickled.
def _zero_one_adam(
    variance: schedules.Schedule,
    sync: schedules.Schedule,
    scale: str,
    bias_correction: bool,
    dense_wire: str,
) -> _core.Recipe:
    return _core.zero_one_adam(
        variance.native(),
        sync.native(),
        parse_scale(scale),
        bias_correction,
        parse_dense_wire(dense_wire),
    )


def _one_bit_adam(
    warmup_steps: int, scale: str, bias_correction: bool, dense_wire: str
) -> _core.Recipe:
    return _core.one_bit_adam(
        warmup_steps, parse_scale(scale), bias_correction, parse_dense_wire(dense_wire)
    )


def _adamw(bias_correction: bool, dense_wire: str) -> _core.Recipe:
    return _core.adamw(bias_correction, parse_dense_wire(dense_wire))


class ZeroOneAdam(_Optimizer):
    """0/1 Adam (arXiv 2202.06009): AdamW that sends one bit per parameter, and often none.

    A drop-in for ``torch.optim.AdamW`` in a data-parallel program: gradients stay local, and this
    optimizer does all averaging. The second moment is held still between the refreshes of
    ``variance_schedule``, which are exact and dense; in between workers step alone, and at the
    steps of ``sync_schedule`` average their accumulated steps by one sign bit per parameter, with
    error feedback on both sides.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer; float32,
            bfloat16 or float16, of any strides, on the CPU. Where a gradient is None it counts as
            zero, unless ``requires_grad`` is False: such a parameter is frozen and stays as it is,
            from the next exchange on.
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
        dense_wire: "fp32" (default), "bf16" or "fp16": what a dense exchange carries; the mean is
            taken in fp32. In fp16 gradients above 65504 make a rank count as zero, and those below
            6e-8 are lost.
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
        dense_wire: str = "fp32",
        process_group: Group | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        super().__init__(
            params,
            partial(
                _zero_one_adam,
                variance_schedule or schedules.Doubling(),
                sync_schedule or schedules.LearningRateTied(),
                scale,
                bias_correction,
                dense_wire,
            ),
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
        dense_wire: str = "fp32",
        process_group: Group | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        super().__init__(
            params,
            partial(_one_bit_adam, warmup_steps, scale, bias_correction, dense_wire),
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
        dense_wire: str = "fp32",
        process_group: Group | None = None,
        broadcast_parameters: bool = True,
    ) -> None:
        super().__init__(
            params,
            partial(_adamw, bias_correction, dense_wire),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            process_group=process_group,
            broadcast_parameters=broadcast_parameters,
        )
