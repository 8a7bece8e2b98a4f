"""How the ranks of a run save checkpoints together, and find the one to go on from."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from blockres.models.gpt import GPTConfig
from blockres.training import checkpoint
from blockres.training.checkpoint import Checkpoint, FileRecord
from blockres.training.config import NEWEST, TrainConfig, flag
from blockres.training.launch import Launch, describe_problems

MODEL_FLAGS = (flag("model"), *(flag(field.name) for field in dataclasses.fields(GPTConfig)))

OF_NO_CONSEQUENCE = frozenset(
    map(
        flag,
        ("data", "out", "eval_interval", "checkpoint_interval", "keep_checkpoints", "resume", "num_threads", "timeout"),
    )
)
"""Settings that may change when a run is resumed without a word about it: no loss depends on them.

That of `--data` is the content, which is compared itself.
"""


class SaveFailed(Exception):
    """Raised on all ranks at the same point, with the same text."""


class Saver:
    """Writes a run's checkpoints; every rank has one and calls it at the same steps.

    Args:
        directory: of the run.
        settings: of the run by name, kept in each checkpoint.
        keep: how many checkpoints stay, the newest ones; None for all.
    """

    def __init__(self, directory: Path, launch: Launch, settings: dict[str, Any], keep: int | None) -> None:
        self._directory, self._launch, self._settings, self._keep = directory, launch, settings, keep

    def save(self, step: int, state: dict[str, Tensor]) -> Path:
        """Write `state`, each rank its own part, as the checkpoint after `step` steps.

        Raises:
            SaveFailed: where a rank cannot write; earlier checkpoints are as they were.
        """
        path = checkpoint.checkpoint_path(self._directory, step)
        reports = self._launch.exchange(f"parts of {path.name}", self._write_part(path, state))
        self._stop_at_problem(path, [report["problem"] for report in reports])
        files = {name: FileRecord(*record) for report in reports for name, record in report["files"].items()}
        whole = Checkpoint(path, step, self._settings, len(reports), files)
        problem = self._finish(whole) if dist.get_rank() == 0 else None
        self._stop_at_problem(path, self._launch.exchange(f"end of {path.name}", problem))
        return path

    def _write_part(self, path: Path, state: dict[str, Tensor]) -> dict[str, Any]:
        try:
            files = checkpoint.write_part(path, dist.get_rank(), state)
        except OSError as error:
            return {"problem": str(error), "files": {}}
        return {"problem": None, "files": {name: dataclasses.astuple(record) for name, record in files.items()}}

    def _finish(self, whole: Checkpoint) -> str | None:
        try:
            checkpoint.finish(whole)
            if self._keep is not None:
                for path in checkpoint.in_order(self._directory)[: -self._keep]:
                    checkpoint.remove(path)
        except OSError as error:
            return str(error)
        return None

    def _stop_at_problem(self, path: Path, problems: list[str | None]) -> None:
        verdict = describe_problems(problems)
        if verdict is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(checkpoint.unfinished(path), ignore_errors=True)
            raise SaveFailed(f"{path} cannot be written. {verdict}")


def find_checkpoint(config: TrainConfig, settings: dict[str, Any], launch: Launch) -> Checkpoint | None:
    """What `--resume` says to go on from, after a look at its files; the ranks share the reading.

    None where a run is to begin, which is also the case where the newest checkpoint is asked for and there is none yet.

    Raises:
        ValueError: where the checkpoint is damaged, or this run cannot go on from it.
    """
    wanted = config.run.resume
    if wanted is None:
        return None
    path = checkpoint.newest(config.run.out if wanted == NEWEST else wanted)
    if path is None and wanted == NEWEST:
        return None
    path = path or wanted
    found = Checkpoint.open(path)
    found.verify(launch.rank, launch.world_size)
    differing = [text for name, text in _differences(found, settings).items() if name in MODEL_FLAGS]
    if differing:
        raise ValueError(f"{path} is of another model: {', '.join(differing)}")
    if found.step >= config.run.steps:
        raise ValueError(f"{path} has all of --steps {config.run.steps} behind it; to train on, give a higher number")
    return found


def describe_differences(found: Checkpoint, settings: dict[str, Any]) -> str:
    """Which settings that losses depend on are not as in the run that wrote the checkpoint."""
    return ", ".join(text for name, text in _differences(found, settings).items() if name not in OF_NO_CONSEQUENCE)


def _differences(found: Checkpoint, settings: dict[str, Any]) -> dict[str, str]:
    there = {flag("model"): "gpt"} | found.settings  # the first checkpoints knew no other
    return {
        name: f"{name} {_plain(value)} (there {_plain(there.get(name))})"
        for name, value in settings.items()
        if there.get(name) != value
    }


def _plain(value: Any) -> str:
    """As on a command line, but for what has no such form."""
    return value if isinstance(value, str) else json.dumps(value)
