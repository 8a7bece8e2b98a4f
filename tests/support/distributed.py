"""Real processes in a gloo group, each with a bounded life: what they return, how they end, and nothing left behind."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Outcome:
    """How one rank ended: what it returned, or the text of its exception, and after how many seconds."""

    value: Any
    error: str | None
    exit_code: int | None
    seconds: float


def run_ranks(world_size: int, worker: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Outcome]:
    """Run `worker(rank, *args)` on every rank and wait for all; whoever is left after `timeout` seconds is killed.

    `worker` must be importable by name. Its exception ends its process with exit code 1, as it would a command.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "blockres.pipeline", worker.__module__])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, folder, timeout, sender, worker, args), daemon=True
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return [_outcome(process, receiver, began, began + timeout) for process, receiver in ranks]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def run_all_well(world_size: int, worker: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
    """`run_ranks` where every rank must end well: what they returned."""
    outcomes = run_ranks(world_size, worker, *args, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}:\n{outcome.error}"
    return [outcome.value for outcome in outcomes]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    sender: Connection,
    worker: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        sender.send((worker(rank, *args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        sender.close()
        os._exit(1)
    dist.destroy_process_group()


def _outcome(process: BaseProcess, receiver: Connection, began: float, deadline: float) -> Outcome:
    value, error = None, None
    try:
        if receiver.poll(max(0.0, deadline - time.monotonic())):
            value, error = receiver.recv()
    except EOFError:
        error = "ended without a word"
    process.join(max(0.1, deadline - time.monotonic()))
    return Outcome(value, error, process.exitcode, time.monotonic() - began)
