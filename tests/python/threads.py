"""Ranks that are threads of this process: for properties that need many small worlds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from zeroone import _core

SECONDS = 60  # after which a rank that is waited for counts as dead


class World:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._sent: list[torch.Tensor | None] = [None] * ranks

    def run(self, target: Callable[[int, _core.Communicator], Any]) -> list[Any]:
        """`target(rank, communicator)` on every rank; raises what the first failing one raised."""
        first: list[BaseException] = []

        def guarded(rank: int) -> Any:
            try:
                operations = _Operations(self, rank)
                return target(rank, _core.PythonCommunicator(rank, self.ranks, operations))
            except BaseException as error:
                first.append(error)
                self._barrier.abort()  # ends the others' waiting
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.ranks)]
        if first:
            raise first[0]
        return [future.result() for future in futures]

    def exchange(self, rank: int, sent: torch.Tensor) -> list[torch.Tensor]:
        """What every rank has sent. Valid till the caller calls `done`."""
        self._sent[rank] = sent
        self._barrier.wait(SECONDS)
        return [tensor for tensor in self._sent if tensor is not None]

    def done(self) -> None:
        self._barrier.wait(SECONDS)


class _Operations:
    """As zeroone.distributed._ProcessGroupOperations."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._buffers: dict[int, torch.Tensor] = {}
        self._next_id = 0

    def allocate(self, size: int) -> tuple[int, int]:
        self._next_id += 1
        self._buffers[self._next_id] = torch.zeros(size, dtype=torch.uint8)
        return self._next_id, self._buffers[self._next_id].data_ptr()

    def release(self, buffer: int) -> None:
        del self._buffers[buffer]

    def all_to_all(self, send: int, at: int, size: int, receive: int, to: int, got: int) -> None:
        parts = self._world.exchange(self._rank, self._buffers[send][at : at + size])
        part = size // self._world.ranks
        mine = [sent[self._rank * part : (self._rank + 1) * part] for sent in parts]
        self._buffers[receive][to : to + got] = torch.cat(mine)
        self._world.done()

    def all_gather(self, send: int, at: int, size: int, receive: int, to: int, got: int) -> None:
        parts = self._world.exchange(self._rank, self._buffers[send][at : at + size])
        self._buffers[receive][to : to + got] = torch.cat(parts)
        self._world.done()

    def broadcast(self, buffer: int, at: int, size: int, root: int) -> None:
        region = self._buffers[buffer][at : at + size]
        parts = self._world.exchange(self._rank, region)
        if self._rank != root:
            region.copy_(parts[root])
        self._world.done()
