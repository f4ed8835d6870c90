"""The optimizer step without communication against torch's fused AdamW, one thread each.

Alternates the two in one run and prints medians and their ratio: a local step of 0/1 Adam passes
over 32 bytes per parameter (gradient, m, u, anchor, v read; m, u, parameter written), fused AdamW
over 28. The gradient is also read once before, to see whether it is finite.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import zeroone


def parameters(numel: int) -> list[torch.nn.Parameter]:
    """Tensors of a transformer's proportions, with gradients."""
    shapes = [(1024, 1024)] * max(1, numel // 1024**2)
    result = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in result:
        parameter.grad = torch.randn_like(parameter)
    return result


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=24 * 1024**2, help="parameters")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    fused = torch.optim.AdamW(parameters(arguments.numel), lr=1e-4, fused=True)
    local = zeroone.ZeroOneAdam(
        parameters(arguments.numel),
        lr=1e-4,
        variance_schedule=zeroone.schedules.Steps([1]),
        sync_schedule=zeroone.schedules.Steps([1]),
    )
    for _ in range(3):  # the refresh, and warm caches and branch predictors
        fused.step()
        local.step()
    times: dict[str, list[float]] = {"fused": [], "local": []}
    for _ in range(arguments.repeats):
        times["fused"].append(seconds(fused.step))
        times["local"].append(seconds(local.step))
    assert local.stats.syncs == 0
    assert local.stats.refreshes == 1
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                "parameters": local.stats.parameters,
                "threads": arguments.threads,
                "instruction_set": zeroone.instruction_set(),
                "torch_fused_adamw_ms": round(medians["fused"] * 1e3, 2),
                "zeroone_local_step_ms": round(medians["local"] * 1e3, 2),
                "ratio": round(medians["local"] / medians["fused"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
