"""Starting together and stopping together: which process this is, and the ranks' agreement before any work.

The agreement goes through the rendezvous store, as JSON: it works before there is a process group, whose backend
already depends on the flags, and nothing in it is ever executed.
"""

import atexit
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

START_UP_SECONDS = 120.0  # a slow disk may hold back one process' imports this long
FAREWELL_SECONDS = 10.0


@dataclass(frozen=True)
class Launch:
    """This process among the others, and the store that they share.

    `local_rank` of `local_world_size` counts the processes on the same machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: dist.Store

    @classmethod
    def find(cls) -> "Launch":
        """Meet the other processes as torchrun's variables say, or be the only one where there are none.

        Raises:
            RuntimeError: where the process that hosts the store cannot be reached.
        """
        if "RANK" not in os.environ:
            return cls(0, 1, 0, 1, dist.HashStore())
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_UP_SECONDS)))
        except dist.DistError as error:
            raise RuntimeError(f"the ranks' meeting point cannot be reached: {error}") from error
        return cls(
            rank,
            world_size,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            # After a restart torchrun's store still has what the processes before have said.
            dist.PrefixStore(f"blockres/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store),
        )

    def agree(self, facts: dict[str, Any], problem: str | None = None) -> str | None:
        """Compare `facts` (anything JSON can carry, one level deep) with the other ranks', and share any `problem`.

        Returns None where all ranks have equal facts and none has a problem; else what is wrong, the same text on every
        rank. Waits at most a little longer than `START_UP_SECONDS`.
        """
        self.store.set(f"facts/{self.rank}", json.dumps({"problem": problem, "facts": facts}))
        if self.rank == 0:
            self.store.set("verdict", json.dumps(self._verdict()))
        if not self._wait("verdict", START_UP_SECONDS + FAREWELL_SECONDS):
            return "rank 0 has not compared the ranks' flags in time: it has ended, or hangs"
        return json.loads(self.store.get("verdict"))

    def exchange(self, topic: str, message: Any) -> list[Any]:
        """What all ranks say about a topic, in their order (anything JSON can carry); a topic comes up once.

        Goes through the open process group, so that a rank which has ended is missed at once.
        """
        self.store.set(f"{topic}/{self.rank}", json.dumps(message))
        dist.barrier()
        return [json.loads(text) for text in self.store.multi_get([f"{topic}/{r}" for r in range(self.world_size)])]

    def farewell(self) -> None:
        """Wait, not for long, until every rank has come here.

        torchrun ends the others when one rank exits, and rank 0 may host the store: each gets to say what it has to.
        """
        self.store.set(f"farewell/{self.rank}", "")
        for rank in range(self.world_size):
            self._wait(f"farewell/{rank}", FAREWELL_SECONDS)

    def _verdict(self) -> str | None:
        reports = []
        for rank in range(self.world_size):
            if not self._wait(f"facts/{rank}", START_UP_SECONDS):
                return f"rank {rank} has not reported within {START_UP_SECONDS:.0f} s: it has ended, or hangs"
            reports.append(json.loads(self.store.get(f"facts/{rank}")))
        return describe_problems([r["problem"] for r in reports]) or _describe_differences(
            [r["facts"] for r in reports]
        )

    def _wait(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except dist.DistError:
            return False
        return True


def describe_problems(problems: list[str | None]) -> str | None:
    """The problems, each once, with the ranks that have it unless all do."""
    lines = []
    for problem in dict.fromkeys(p for p in problems if p):
        ranks = [rank for rank, p in enumerate(problems) if p == problem]
        lines.append(problem if len(ranks) == len(problems) else f"{problem} (on {_ranks(ranks)})")
    return "\n".join(lines) or None


def _describe_differences(facts: list[dict[str, Any]]) -> str | None:
    lines = []
    for name in dict.fromkeys(name for f in facts for name in f):
        holders: dict[str, list[int]] = {}
        for rank, f in enumerate(facts):
            holders.setdefault(json.dumps(f.get(name)), []).append(rank)
        if len(holders) > 1:
            lines.append(f"  {name}: " + ", ".join(f"{value} on {_ranks(r)}" for value, r in holders.items()))
    return "\n".join(["the ranks were started differently:", *lines]) if lines else None


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def tell_launcher(cause: str) -> None:
    """Leave the cause of this process' failure where torchrun looks for it, to print it in its summary."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        report = {"message": {"message": cause, "extraInfo": {"timestamp": str(int(time.time()))}}}
        try:
            Path(file).write_text(json.dumps(report))
        except OSError:  # a full disk, say; half a report would hide more than none
            Path(file).unlink(missing_ok=True)


def choose_device(name: str | None, launch: Launch) -> torch.device:
    """This process' device: the CPU, or one GPU of its own.

    Raises:
        ValueError: where there is no GPU, or fewer than this machine has processes.
    """
    available = torch.cuda.is_available()
    if name == "cpu" or (name is None and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError("--device cuda, but PyTorch sees no GPU here: pass --device cpu, or install a CUDA build")
    count = torch.cuda.device_count()
    if launch.local_world_size > count:
        raise ValueError(
            f"{launch.local_world_size} processes on a machine with {count} GPU{'s' * (count > 1)}: NCCL takes one GPU "
            f"for each. Start --nproc-per-node {count}, with more --virtual-stages on each if the model is to have as "
            f"many stages, or pass --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def open_process_group(launch: Launch, device: torch.device, timeout: float) -> None:
    """Connect the ranks: NCCL on GPUs, gloo elsewhere. `timeout` in seconds bounds every wait for a peer."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=launch.store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )


def share_cores(launch: Launch, num_threads: int | None) -> None:
    """Give this process its part of the machine's cores, or `num_threads`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(num_threads or max(1, cores // launch.local_world_size))


def end_process(exit_code: int) -> NoReturn:
    """Exit as Python does, but leave the interpreter whole.

    gloo's threads live as long as anything refers to a process group, as PyTorch's own caches do. While an interpreter
    is taken apart, one that has yet to let go of a collective's tensors aborts the process (PyTorch issue 190489).
    """
    atexit.register(_run_other_handlers_and_leave, exit_code)  # what is registered last runs first
    sys.exit(exit_code)


def _run_other_handlers_and_leave(exit_code: int) -> None:
    atexit.unregister(_run_other_handlers_and_leave)
    atexit._run_exitfuncs()
    leave(exit_code)


def leave(exit_code: int) -> NoReturn:
    """Exit at once; with 120 instead of 0, which is what Python does, where what was printed cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            exit_code = exit_code or 120
    os._exit(exit_code)
