"""What an optimizer has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """A snapshot; all counts start at zero in every process (they are not part of the state).

    Bytes are those this rank handed to the network in rounds, headers and padding included.
    """

    parameters: int
    """Elements of all parameters."""
    steps: int
    """Steps taken, skipped ones not included."""
    rounds: int
    """Exchanges: refreshes and syncs."""
    refreshes: int
    """Exact (dense) exchanges of the gradient."""
    syncs: int
    """Compressed exchanges."""
    alike_refreshes: int
    """Refreshes in which all ranks sent the same gradient, not zero: ``step`` warns of it."""
    skipped_steps: int
    """Steps in which no rank had a finite gradient: nothing was changed."""
    nonfinite_gradients: int
    """Steps in which this rank's gradient was not finite and counted as zero."""
    bytes_sent: int
    bytes_received: int
    dense_bytes: int
    """What averaging the gradients in fp32 would have sent: 8 n (W - 1) / W per step."""
    setup_bytes_sent: int
    """Parameters that this rank broadcast at construction."""
    bits_per_parameter_step: float
    """32 bytes_sent / dense_bytes: 32 for dense fp32 averaging, about 1 for a one-bit round."""
    local_seconds: float
    """Local steps."""
    encode_seconds: float
    exchange_seconds: float
    """In collectives, waiting for other ranks and the server's part of the work included."""
    commit_seconds: float
