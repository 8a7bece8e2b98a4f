"""The command `blockres.train` in tests: as one process here, or as real ranks, which may be tampered with.

Ranks are forked from a process that has imported everything and draw no plots; apart from that they are what a launcher
would start, with nobody to end them but the test.
"""

import json
import multiprocessing
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from blockres import train
from blockres.training.launch import Launch, end_process
from tests.support.distributed import PRELOADED

TINY = shlex.split(
    "--steps 4 --eval-interval 2 --eval-batches 1 --num-layers 4 --dim 32 --num-heads 2 --num-kv-heads 1 "
    "--sequence-length 16 --batch-size 8 --num-microbatches 4 --warmup-steps 2 --num-threads 1 --device cpu"
)
EXACT = shlex.split("--dtype float64 --tie-weights --sublayers-per-block 3 --clip-norm 0.5")
BOUND = 60  # seconds; far more than any of these needs on a busy machine

Fault = Callable[[], None]
T = TypeVar("T")


def run_alone(out: Path, *flags: str, plots: bool = False) -> list[dict]:
    """Run the command as a single process, here; returns the metrics. Plots take as long as all else."""
    assert exit_code(out, *flags, plots=plots) == 0
    return metrics(out)


def exit_code(out: Path, *flags: str, plots: bool = False) -> int:
    """Run the command as a single process, here, to an orderly end."""
    failed = AssertionError("the run failed, see above")
    with nullcontext() if plots else without_matplotlib(), mock.patch.object(os, "_exit", side_effect=failed):
        return train.main([*TINY, "--out", str(out), *flags])


def without_matplotlib() -> AbstractContextManager:
    return mock.patch("blockres.training.run.find_spec", return_value=None)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict]) -> list[float]:
    keys = ("loss", "validation_loss", "grad_norm")
    return [record[key] for record in records for key in keys if key in record]


def after(step: int, records: list[dict]) -> list[dict]:
    """The records that a run which goes on after a step writes."""
    return [r for r in records if r["step"] > step or (r["step"] == step and "validation_loss" in r)]


@dataclass
class Rank:
    """A process that runs the command, and the file with all that it prints."""

    process: BaseProcess
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def last_words(self) -> str:
        """What comes after a traceback."""
        return self.said.rpartition("\n  File ")[2]

    def code(self, timeout: float = BOUND) -> int | None:
        """The exit code; None where the process has not ended in time."""
        self.process.join(timeout)
        return self.process.exitcode


@contextmanager
def ranks(folder: Path, *flags_of_rank: Sequence[str], faults: dict[int, Fault] | None = None) -> Iterator[list[Rank]]:
    """One rank for each list of flags, which come after `TINY`; `faults`, importable functions, are called first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    started = []
    for rank, flags in enumerate(flags_of_rank):
        output, fault = folder / f"rank-{rank}.txt", (faults or {}).get(rank)
        output.unlink(missing_ok=True)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(flags_of_rank))}
        arguments = (meeting | {"RANK": str(rank)}, [*TINY, *flags], fault, output)
        process = context.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        started.append(Rank(process, output))
    try:
        yield started
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.join()


def run_ranks(folder: Path, count: int, *flags: str, fault: Fault | None = None) -> list[dict]:
    """Run the command on some ranks, which must end well; returns the metrics. Every rank has the fault."""
    out = folder / "out"
    faults = dict.fromkeys(range(count), fault) if fault else None
    with ranks(folder, *[["--out", str(out), *flags]] * count, faults=faults) as started:
        for rank in started:
            assert rank.code() == 0, rank.said
    return metrics(out)


def refusals(capsys: pytest.CaptureFixture[str], *flags_of_rank: list[str]) -> str:
    """Start ranks as threads; all must exit with 2. Returns what they said, one copy of it, the same for each."""
    store, count = dist.HashStore(), len(flags_of_rank)
    launches = [Launch(rank, count, rank, count, store) for rank in range(count)]
    configs, problems = zip(*[train._parse([*TINY, *flags]) for flags in flags_of_rank], strict=True)
    began = AssertionError("the run was not refused")
    with mock.patch.object(train, "_run_guarded", side_effect=began), ThreadPoolExecutor(count) as pool:
        codes = list(pool.map(train._begin, launches, configs, problems))
    assert codes == [2] * count
    said = capsys.readouterr().err
    texts = set()
    for rank in range(count):
        (text,) = re.findall(rf"^blockres.train, rank {rank}: (.*?)(?=^blockres\.train, rank|\Z)", said, re.M | re.S)
        texts.add(text)
    assert len(texts) == 1
    return texts.pop()


def seconds_to_end(started: Sequence[Rank], first: Rank, bound: float = BOUND) -> float:
    """How long the others take to end once the first one has."""
    first.process.join(bound)
    began = time.monotonic()
    for rank in started:
        rank.process.join(max(0.0, began + bound - time.monotonic()))
    return time.monotonic() - began


def wait_for(condition: Callable[[], T], seconds: float = BOUND) -> T:
    """What the condition returns once that counts as true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def _rank_main(environment: dict[str, str], arguments: list[str], fault: Fault | None, output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ |= environment
    if fault is not None:
        fault()
    with without_matplotlib():
        end_process(train.main(arguments))
