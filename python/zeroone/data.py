"""Ranks that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroone.distributed import Group, operations_on

__all__ = ["even_batches"]

Batch = TypeVar("Batch")


def even_batches(
    loader: Iterable[Batch], process_group: Group | None = None
) -> Iterator[Batch | None]:
    """One pass over ``loader`` that takes the same number of steps on all ranks.

    As many as the longest loader has by its ``len``: yields this rank's batches, then None. A rank
    without a batch steps without gradients, which count as zero in the mean over all ranks:

        for batch in zeroone.even_batches(loader):
            optimizer.zero_grad()
            if batch is not None:
                loss_of(batch).backward()
            optimizer.step()

    The call is a collective: 8 bytes from each rank to each other, once per pass.

    Args:
        loader: an iterable with a length, such as a ``DataLoader``.
        process_group: the ranks that train together, as given to the optimizer (default None: all,
            or this process alone where ``torch.distributed`` is not initialised).

    Raises:
        ValueError: a rank's loader has no length; raised on every rank.
        CommunicationError: the exchange failed.
    """
    try:
        length = len(loader)  # type: ignore[arg-type]
    except Exception:  # loaders raise what they like, and the others are about to ask
        length = -1
    lengths = [length]
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        own = torch.tensor([length]).view(torch.uint8)
        lengths = operations_on(process_group).gather(own).view(torch.int64).tolist()
    without = [rank for rank, found in enumerate(lengths) if found < 0]
    if without:
        raise ValueError(
            f"the loaders of ranks {without} have no length, so the number of steps is not known; "
            "pass a loader that has one, such as that of a dataset with __len__"
        )
    return _padded(loader, max(lengths))


def _padded(loader: Iterable[Batch], steps: int) -> Iterator[Batch | None]:
    count = 0
    for batch in islice(loader, steps):
        count += 1
        yield batch
    yield from repeat(None, steps - count)
