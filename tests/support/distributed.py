"""Real processes in a gloo group, each with a bounded life: what they return, how they end, and nothing left behind."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

PRELOADED = [
    "torch",
    "torch.distributed.pipelining",
    "blockres.pipeline",
    "blockres.train",
    "transformers.models.llama.modeling_llama",
]
"""What the process that ranks are forked from imports; it is started once, for all tests."""


@dataclass
class Outcome:
    """How one rank ended: what it yielded, the text of its exception if it raised one, and after how many seconds."""

    values: list[Any]
    error: str | None
    exit_code: int | None
    seconds: float


def run_ranks(world_size: int, worker: Callable[..., Iterable[Any]], *args: Any, timeout: float = 120) -> list[Outcome]:
    """Run the generator `worker(rank, *args)` on every rank; whoever is left after `timeout` seconds is killed.

    `worker` must be importable by name. Its exception ends its process with exit code 1, as it would a command.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, worker.__module__])
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


def run_all_well(world_size: int, worker: Callable[..., Iterable[Any]], *args: Any, timeout: float = 120) -> list[Any]:
    """`run_ranks` where every rank must end well: what they yielded, one list a rank."""
    outcomes = run_ranks(world_size, worker, *args, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}:\n{outcome.error}"
    return [outcome.values for outcome in outcomes]


Check = Callable[[int], None]


def run_checks(world_size: int, checks: list[Check], timeout: float = 120) -> dict[str, list[str]]:
    """Run many checks in one set of processes: what went wrong, by the name of the check.

    A check takes the rank and asserts. The first one that fails on a rank ends that rank, and so soon all of them.
    """
    names = [(check.__module__, check.__name__) for check in checks]
    failures: dict[str, list[str]] = {check.__name__: [] for check in checks}
    for rank, outcome in enumerate(run_ranks(world_size, _run_in_turn, names, timeout=timeout)):
        for position, name in enumerate(failures):
            if position == len(outcome.values):
                failures[name].append(f"rank {rank} failed here: {outcome.error or 'it did not come to an end'}")
            elif position > len(outcome.values):
                failures[name].append(f"rank {rank} did not get here")
        if len(outcome.values) == len(names) and outcome.exit_code != 0:
            failures[names[-1][1]].append(f"after the last check, rank {rank} ended with exit code {outcome.exit_code}")
    return failures


def errors_of_all_ranks(run: Callable[[], Any], kind: type[Exception], pattern: str | None = None) -> list[str]:
    """Called on all ranks: what `run` raised on each of them. It must raise `kind`, and its text match a pattern."""
    with pytest.raises(kind, match=pattern) as caught:
        run()
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    return messages


def _run_in_turn(rank: int, names: list[tuple[str, str]]) -> Iterator[str]:
    for module, name in names:
        dist.barrier()
        getattr(importlib.import_module(module), name)(rank)
        yield name


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    sender: Connection,
    worker: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # a collection would walk through, and so copy, all that was imported before the fork
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * timeout)  # where a rank that will not end is stuck
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        for value in worker(rank, *args):
            sender.send((value, None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        sender.close()
        os._exit(1)
    dist.destroy_process_group()


def _outcome(process: BaseProcess, receiver: Connection, began: float, deadline: float) -> Outcome:
    outcome = Outcome([], None, None, 0.0)
    try:
        while outcome.error is None and receiver.poll(max(0.0, deadline - time.monotonic())):
            value, outcome.error = receiver.recv()
            if outcome.error is None:
                outcome.values.append(value)
    except EOFError:
        pass
    process.join(max(0.1, deadline - time.monotonic()))
    outcome.exit_code, outcome.seconds = process.exitcode, time.monotonic() - began
    return outcome
