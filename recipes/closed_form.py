"""How many rounds and bytes an optimizer must need, from the definitions alone.

Nothing here calls the library: what it counts is compared with this, so that a wrong count, a round
too many or a header forgotten shows. The definitions are those of arXiv 2202.06009 (0/1 Adam) and
2102.02888 (1-bit Adam); the layout of a message is that of docs/arithmetic.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

HEADER_BYTES = 40


@dataclass(frozen=True)
class Rounds:
    """The steps, counted from 1, at which something is exchanged."""

    refreshes: list[int]  # the exact mean of the gradients
    syncs: list[
        int
    ]  # one bit per parameter; a closing `optimizer.sync()` counts as the last step's


def adamw(steps: int) -> Rounds:
    return Rounds(refreshes=list(range(1, steps + 1)), syncs=[])


def one_bit_adam(steps: int, warmup_steps: int) -> Rounds:
    """Dense up to `warmup_steps`, then one bit in every step."""
    first = min(steps, warmup_steps)
    return Rounds(list(range(1, first + 1)), list(range(first + 1, steps + 1)))


def zero_one_adam(
    learning_rates: Sequence[float], kappa: int, until: float, max_interval: int
) -> Rounds:
    """`Doubling(kappa, until)` and `LearningRateTied(max_interval)`, one learning rate per step."""
    rounds = Rounds([], [])
    next_refresh, next_sync = 1.0, 1
    pending, peak, previous = False, 0.0, 0.0
    for step, lr in enumerate(learning_rates, start=1):
        peak = max(peak, lr)
        if step >= next_refresh and not pending:
            gap = 2 ** (len(rounds.refreshes) // kappa)
            next_refresh = step + gap if step + gap <= until else math.inf
            rounds.refreshes.append(step)
        else:
            pending = pending or lr > 0  # a local step at learning rate 0 changes nothing
            if step < next_sync or not pending:
                continue
            rounds.syncs.append(step)
            pending = False
        ratio = peak / lr if lr > 0 else math.inf
        interval = min(max_interval, 2 ** math.floor(math.log2(min(ratio, 2.0**62))))
        next_sync = step + (1 if lr > previous else interval)
        previous = lr
    if pending:
        rounds.syncs.append(len(learning_rates))
    return rounds


def bytes_sent(rounds: Rounds, numels: Sequence[int], world_size: int) -> int:
    """What each rank sends in `rounds` if one parameter group has tensors of these sizes.

    A round takes 2 (W - 1) messages of a header and a section for one of W chunks of L elements: L
    floats in a refresh; in a sync L bits and a scale per block, a tensor's part in the chunk.
    """
    length = 8 * math.ceil(sum(numels) / (8 * world_size))
    dense = HEADER_BYTES + 4 * length
    one_bit = HEADER_BYTES + length // 8 + 4 * max(_blocks(numels, length))
    messages = 2 * (world_size - 1)
    return messages * (len(rounds.refreshes) * dense + len(rounds.syncs) * one_bit)


def _blocks(numels: Sequence[int], length: int) -> list[int]:
    """The number of tensors that have elements in each chunk of `length` elements."""
    blocks = [0] * math.ceil(sum(numels) / length)
    begin = 0
    for numel in numels:
        end = begin + numel
        for chunk in range(begin // length, math.ceil(end / length) if numel else 0):
            blocks[chunk] += 1
        begin = end
    return blocks
