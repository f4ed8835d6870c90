"""Real processes: a test file on every rank under torchrun, and a function on every rank.

The functions' processes are forked from one server that has torch imported, so that a rank costs
milliseconds instead of seconds; they are processes of their own in every other respect.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

HERE = Path(__file__).parent
# On a machine whose host name has no address, Gloo would find no interface.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "numpy", "pytest", "zeroone"])


def torchrun(ranks: int, files: Collection[Path], logs: Path, seconds: float) -> str:
    """Runs pytest on `files` on every rank; returns what all ranks printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--log-dir", str(logs), "--redirects", "3"),
        *("-m", "pytest", "-x", "-p", "no:cacheprovider", "--durations", "5"),
        *(str(HERE / file) for file in files),
    ]
    environment = os.environ | ENVIRONMENT
    agent = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = agent.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)  # the agent and its ranks: a session of their own
        printed = f"{agent.communicate()[0]}\ntook longer than {seconds} s"
    printed += "".join(
        f"\n--- {log.parent.name}/{log.name}\n{log.read_text(errors='replace')}"
        for log in sorted(logs.rglob("*.log"))
    )
    assert agent.returncode == 0, printed
    assert len(re.findall(r"=+ \d+ passed in ", printed)) == ranks, printed
    return printed


def run_ranks(
    target: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    seconds: float = 60,
    timeout: float = 30,
    dies: Collection[int] = (),
    death: signal.Signals = signal.SIGKILL,
    init: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """`target(*arguments)` in `ranks` new processes; returns what each returned.

    With `init` a Gloo group of that timeout exists during the call. Ranks in `dies` must be killed
    by the signal `death` (their result is None); all others must return within `seconds`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        **ENVIRONMENT,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun: the store outlives every rank
        "WORLD_SIZE": str(ranks),
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            _context.Process(
                target=_run_rank,
                args=(target, arguments, folder, variables | {"RANK": str(rank)}, timeout, init),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in late:  # told to say where it stands, then ended
            os.kill(processes[rank].pid or 0, signal.SIGABRT)
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        printed = "".join(
            f"\n--- rank {rank}, exit {codes[rank]}\n" + _read(folder / f"{rank}.log")
            for rank in range(ranks)
        )
        assert not late, f"ranks {late} took longer than {seconds} s:{printed}"
        assert codes == [-death if rank in dies else 0 for rank in range(ranks)], printed
        return [
            None if rank in dies else pickle.loads((folder / f"{rank}.pickle").read_bytes())
            for rank in range(ranks)
        ]


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else "(printed nothing)"


def _run_rank(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
    variables: Mapping[str, str],
    timeout: float,
    init: bool,
) -> None:
    log = os.open(folder / f"{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    warnings.simplefilter("error")
    os.environ.update(variables)
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        result = target(*arguments)
        (folder / f"{variables['RANK']}.pickle").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: what is left of the group may hang
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
