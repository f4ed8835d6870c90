"""How ranks talk: a private process group made from the user's, and what is built on it alone."""

from __future__ import annotations

import atexit
import weakref
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from zeroone import _core

__all__ = ["Group", "OneBitAllReduce", "average_buffers", "local_gradients", "make_communicator"]

# What every `process_group=` takes.
Group: TypeAlias = dist.ProcessGroup | DeviceMesh


_live: weakref.WeakSet[_ProcessGroupOperations] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """Ends the groups' threads while the interpreter still runs: a thread of the backend that
    wants the GIL after that ends the process with "terminate called" (seen with Gloo)."""
    for operations in list(_live):
        operations.__dict__.pop("_group", None)


class _ProcessGroupOperations:
    """The engine's collectives on a ``torch.distributed`` group: bytes of uint8 tensors.

    Buffers are allocated once; a call names buffer, offset and length, so that nothing is
    converted. Regions are contiguous and of explicit size: Gloo reads strided ones wrongly.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._buffers: dict[int, torch.Tensor] = {}
        self._next_id = 0
        _live.add(self)

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def size(self) -> int:
        return self._group.size()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes ``values`` of all ranks, in their order; as many on every rank."""
        send, receive = (self.allocate(n * values.numel())[0] for n in (1, self.size))
        self._buffers[send].copy_(values)
        self.all_gather(send, 0, values.numel(), receive, 0, self.size * values.numel())
        return self._buffers.pop(receive)

    def allocate(self, size: int) -> tuple[int, int]:
        buffer = torch.zeros(size, dtype=torch.uint8)
        self._next_id += 1
        self._buffers[self._next_id] = buffer
        return self._next_id, buffer.data_ptr()

    def release(self, buffer: int) -> None:
        del self._buffers[buffer]

    def _region(self, buffer: int, offset: int, size: int) -> torch.Tensor:
        return self._buffers[buffer].narrow(0, offset, size)

    def _failed(self, operation: str, size: int, cause: Exception) -> _core.CommunicationError:
        return _core.CommunicationError(
            f"{operation} of {size} bytes failed on rank {self.rank} of {self.size}: {cause}"
        )

    def all_to_all(
        self, send: int, offset: int, size: int, receive: int, receive_offset: int, received: int
    ) -> None:
        with torch.profiler.record_function("zeroone.all_to_all"):
            try:
                dist.all_to_all_single(
                    self._region(receive, receive_offset, received),
                    self._region(send, offset, size),
                    group=self._group,
                )
            except RuntimeError as cause:
                raise self._failed("all_to_all", size, cause) from cause

    def all_gather(
        self, send: int, offset: int, size: int, receive: int, receive_offset: int, received: int
    ) -> None:
        with torch.profiler.record_function("zeroone.all_gather"):
            try:
                _all_gather(
                    self._region(receive, receive_offset, received),
                    self._region(send, offset, size),
                    group=self._group,
                )
            except RuntimeError as cause:
                raise self._failed("all_gather", size, cause) from cause

    def broadcast(self, buffer: int, offset: int, size: int, root: int) -> None:
        with torch.profiler.record_function("zeroone.broadcast"):
            try:
                dist.broadcast(
                    self._region(buffer, offset, size), group=self._group, group_src=root
                )
            except RuntimeError as cause:
                raise self._failed("broadcast", size, cause) from cause


# Its name changed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group; None (the backend's default) where the backend does not tell."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError as cause:
        raise ValueError(
            f"the process group's backend {dist.get_backend_config(group)!r} does not carry CPU "
            "tensors; initialise it with one that does, such as 'gloo' or 'cpu:gloo,cuda:nccl'"
        ) from cause
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def _resolve(process_group: Group | None) -> dist.ProcessGroup:
    """The process group that is meant (None: the default one), of which this rank is a member."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed has no default process group")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(
                f"process_group is a mesh of {group.ndim} dimensions, {names or 'without names'}; "
                f"pass the one to average over, such as mesh[{names[0] if names else 'dp'!r}]"
            )
        if group.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh {group.mesh.tolist()}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):  # what new_group returns to those left out
        raise ValueError(f"rank {dist.get_rank()} is not in the process group")
    return group


def operations_on(process_group: Group | None) -> _ProcessGroupOperations:
    """Collectives on the user's own group (None: the default one), for the length of one call."""
    group = _resolve(process_group)
    _timeout(group)  # refuses a backend without CPU tensors
    return _ProcessGroupOperations(group)


def make_communicator(process_group: Group | None = None) -> _core.Communicator:
    """A communicator over a private copy of ``process_group`` (None: of the default group).

    A collective among the group's ranks, and no one else's. The copy has the group's backend and
    timeout; it is private because two users of one group, on two threads, would deadlock.
    """
    group = _resolve(process_group)
    ranks = dist.get_process_group_ranks(group)
    private = dist.new_group(
        ranks,
        timeout=_timeout(group),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc="zeroone",
    )
    # It lives until the program destroys all groups: torch would give its name, and the addresses
    # that the store keeps under it, to the next group (measured: "connection refused").
    operations = _ProcessGroupOperations(private)
    return _core.PythonCommunicator(operations.rank, operations.size, operations)


class OneBitAllReduce:
    """The mean of a vector over all ranks for one bit per element, with error feedback.

    The result is the same bytes on every rank. What the code loses is kept in ``worker_error``
    ([numel]) and ``server_error`` ([this rank's chunk]), fp32, and enters the next call, so that
    the running mean of the results tends to the running mean of the inputs.

    Args:
        numel: elements of the vector; at least 1 and equal on all ranks.
        scale: "l1", a block's mean absolute value, or "l2", its root mean square.
        process_group: the ranks that take part, a process group or a device mesh of one dimension;
            None: all, or this process alone where ``torch.distributed`` is not initialised.

    Construction and :meth:`reduce_` are collectives. Not thread-safe.

    Raises:
        ValueError: an invalid ``numel`` or ``scale`` on this rank, or it is not in the group.
        DisagreementError: ranks differ in ``numel`` or ``scale``, or another rank failed.
    """

    worker_error: torch.Tensor
    server_error: torch.Tensor

    def __init__(self, numel: int, scale: str = "l1", process_group: Group | None = None) -> None:
        vectors: dict[str, torch.Tensor] = {}

        def allocate(name: str, group: int, size: int) -> int:
            vectors[name] = torch.zeros(size)
            return vectors[name].data_ptr()

        self._numel = numel
        self._communicator: _core.Communicator
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            self._communicator = _core.LocalCommunicator()
        else:
            self._communicator = make_communicator(process_group)
        try:
            if numel < 1:
                raise ValueError(f"Invalid numel: {numel}")
            native_scale = parse_scale(scale)
        except ValueError as failure:
            tell_others(self._communicator, failure)
            raise
        self._collective = _core.OneBitAllReduce(self._communicator, numel, native_scale, allocate)
        self.worker_error = vectors["worker_error"]
        self.server_error = vectors["server_error"]

    def reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces ``tensor`` (fp32, contiguous, ``numel`` elements, on the CPU) by the mean.

        A rank whose values are not finite counts as zero. On an error the tensor and the residuals
        are those of before.
        """
        if (
            tensor.dtype != torch.float32
            or not tensor.is_contiguous()
            or tensor.numel() != self._numel
            or tensor.device.type != "cpu"
        ):
            raise ValueError(
                f"expected a contiguous float32 tensor of {self._numel} elements on the CPU, got "
                f"{tensor.dtype} of {tensor.numel()} elements on {tensor.device}"
            )
        values = tensor.detach()
        self._collective.reduce(self._communicator, values.data_ptr(), torch.get_num_threads())
        torch.autograd.graph.increment_version(tensor)
        return tensor

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has handed to the network."""
        return self._collective.bytes_sent


def parse_scale(scale: str) -> _core.Scale:
    """The native scale; raises ValueError."""
    try:
        return {"l1": _core.Scale.L1, "l2": _core.Scale.L2}[scale]
    except KeyError:
        raise ValueError(f"Invalid scale: {scale!r} (must be 'l1' or 'l2')") from None


def parse_dense_wire(wire: str) -> _core.Code:
    """The native code; raises ValueError."""
    codes = {"fp32": _core.identity_code, "bf16": _core.bf16_code, "fp16": _core.fp16_code}
    if wire not in codes:
        raise ValueError(f"Invalid dense_wire: {wire!r} (must be 'fp32', 'bf16' or 'fp16')")
    return codes[wire]()


def tell_others(communicator: _core.Communicator, failure: Exception) -> None:
    """Makes the other ranks, which are about to agree on something, raise this rank's failure."""
    try:
        _core.agree(communicator, [], f"{type(failure).__name__}: {failure}")
    except _core.DisagreementError:
        return  # this rank raises the failure itself


def local_gradients(module: DistributedDataParallel) -> DistributedDataParallel:
    """Opts ``module`` out of its own averaging: gradients stay those of this rank.

    Call it once, before the first backward pass. The module then sends nothing at all, buffers
    included (see :func:`average_buffers`), whatever ``find_unused_parameters`` and
    ``static_graph`` are, and ranks may make different numbers of passes.

    Raises:
        TypeError: ``module`` is not a ``DistributedDataParallel``.
    """
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(f"expected a DistributedDataParallel, got {type(module).__name__}")

    # No annotations: DistributedDataParallel refuses strings, which all are in this file.
    def keep(_, bucket):  # type: ignore[no-untyped-def]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module.register_comm_hook(None, keep)  # for programs that turn synchronisation on again
    # As within no_sync(): otherwise find_unused_parameters sends a map with every backward pass.
    module.require_backward_grad_sync = False
    module.static_graph = False  # which fails where the first pass does not synchronise
    module.broadcast_buffers = False
    return module


@torch.no_grad()
def average_buffers(module: torch.nn.Module, process_group: Group | None = None) -> None:
    """Makes the buffers of ``module``, such as BatchNorm's statistics, equal on all ranks.

    Floating-point buffers become their mean over the ranks, in their own type (summed in float64,
    in the order of ranks); all others become those of the first rank. Parameters stay as they are.
    Call it where all ranks do, before evaluation and export, together with ``optimizer.sync()``.

    A collective: one exchange, whatever the number of buffers, of their bytes from each rank to
    each other; that many times the number of ranks is held for its duration. Does nothing where
    ``torch.distributed`` is not initialised.

    Args:
        module: on every rank with buffers of the same names, shapes and types.
        process_group: the ranks to average over, a process group or a device mesh of one dimension
            (default None: all).

    Raises:
        DisagreementError: ranks have different buffers, or another rank failed. None is changed.
        CommunicationError: the exchange failed. No buffer is changed.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return
    operations = operations_on(process_group)
    communicator = _core.PythonCommunicator(operations.rank, operations.size, operations)
    buffers = dict(module.named_buffers())
    try:
        own = [buffer.cpu().reshape(-1).view(torch.uint8) for buffer in buffers.values()]
    except RuntimeError as failure:  # of a layout without bytes, such as a sparse one
        tell_others(communicator, failure)
        raise
    _core.agree(
        communicator,
        [(f"buffer {name}", f"{b.dtype} {list(b.shape)}") for name, b in buffers.items()],
    )
    sizes = [part.numel() for part in own]
    total = sum(sizes)
    if total == 0:
        return
    everything = operations.gather(torch.cat(own)).view(-1, total)
    parts = [part.split(sizes) for part in everything]
    results = []
    for index, buffer in enumerate(buffers.values()):
        # The clone is aligned for the buffer's type.
        values = [part[index].clone().view(buffer.dtype).view(buffer.shape) for part in parts]
        if buffer.is_floating_point():
            mean = torch.zeros(buffer.shape, dtype=torch.float64)
            for value in values:
                mean += value
            values[0] = mean / len(values)
        results.append(values[0].to(buffer.dtype))
    for buffer, result in zip(buffers.values(), results, strict=True):
        buffer.copy_(result)
