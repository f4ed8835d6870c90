"""Data-parallel training over slow networks: 0/1 Adam and its relatives for PyTorch.

    optimizer = zeroone.ZeroOneAdam(model.parameters(), lr=4e-4, weight_decay=0.01)

in a program that `torchrun` starts sends about 0.1 to 1 bit per parameter and step instead of 32.
"""

from zeroone import checkpoint, schedules
from zeroone._core import (
    CommunicationError,
    DisagreementError,
    Error,
    __version__,
    available_instruction_sets,
    instruction_set,
)
from zeroone.data import even_batches
from zeroone.distributed import OneBitAllReduce, average_buffers, local_gradients
from zeroone.optim import AdamW, OneBitAdam, ZeroOneAdam
from zeroone.stats import ResidualNorms, Stats, log_stats

__all__ = [
    "AdamW",
    "CommunicationError",
    "DisagreementError",
    "Error",
    "OneBitAdam",
    "OneBitAllReduce",
    "ResidualNorms",
    "Stats",
    "ZeroOneAdam",
    "__version__",
    "available_instruction_sets",
    "average_buffers",
    "checkpoint",
    "even_batches",
    "instruction_set",
    "local_gradients",
    "log_stats",
    "schedules",
]
