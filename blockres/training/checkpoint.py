"""Checkpoints: complete or absent, without pickle, and loadable under any other split of the model.

A checkpoint is a directory `step-000100` of safetensors files, one for each rank that had something to write, and of
`checkpoint.json`, which says what it is and has the sizes and SHA-256 digests of the others. Each rank writes and reads
its tensors by itself, through torch.distributed.checkpoint: what that exchanges between ranks is pickled, so the ranks
agree elsewhere, in JSON. A directory gets its name when all is in it and on the disk; until then it is called
`.unfinished-step-000100`.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

FORMAT = "blockres checkpoint, version 1"
MANIFEST = "checkpoint.json"
UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 digest of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        return cls(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk, as its manifest describes it.

    Attributes:
        step: optimizer steps done; with the seed among the settings, also the position in the data.
        settings: the flags of the run that wrote it, by name.
        num_ranks: the processes of that run.
        files: all others in the directory, by name.
    """

    path: Path
    step: int
    settings: dict[str, Any]
    num_ranks: int
    files: dict[str, FileRecord]

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read the manifest.

        Raises:
            ValueError: where there is none, or none of this format.
        """
        if not path.is_dir():
            raise ValueError(f"{path} is no directory, so no checkpoint")
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
        except FileNotFoundError as error:
            raise ValueError(f"{path} has no {MANIFEST}, so it is no checkpoint of blockres.train") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{path / MANIFEST} cannot be read as JSON: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise ValueError(f"{path / MANIFEST} is of another format: expected {FORMAT!r}, got {found!r}")
        try:
            return cls._from_manifest(path, manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path / MANIFEST} is damaged: {type(error).__name__} {error}") from error

    @classmethod
    def _from_manifest(cls, path: Path, manifest: dict[str, Any]) -> "Checkpoint":
        files = {str(name): FileRecord(int(f["size"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        if any(name != Path(name).name for name in files):
            raise ValueError("a file name with a path in it")
        settings = {str(name): value for name, value in manifest["settings"].items()}
        return cls(path, int(manifest["step"]), settings, int(manifest["num_ranks"]), files)

    def write_manifest(self) -> None:
        manifest = {"format": FORMAT, **dataclasses.asdict(self)}
        del manifest["path"]
        with (self.path / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare the files with what the manifest says: all names and sizes, and every `parts`-th file's digest.

        Raises:
            ValueError: naming a file that is missing, surplus, or has other contents.
        """
        for name in sorted({file.name for file in self.path.iterdir()} - {MANIFEST} - self.files.keys()):
            self._refuse(name, "does not belong here")
        for name, record in self.files.items():
            if not (self.path / name).is_file():
                self._refuse(name, "is missing")
            size = (self.path / name).stat().st_size
            if size != record.size:
                self._refuse(name, f"has {size:,} bytes, it was written with {record.size:,}")
        for name in sorted(self.files)[part::parts]:
            if FileRecord.of(self.path / name) != self.files[name]:
                self._refuse(name, "has other contents than were written")

    def _refuse(self, name: str, complaint: str) -> NoReturn:
        raise ValueError(f"{self.path / name} {complaint}: {self.path} is damaged, use another checkpoint")

    def load(self, state: dict[str, Tensor]) -> None:
        """Fill these tensors, by name and in place; sharded ones with their rank's part.

        Raises:
            ValueError: where one is not in the checkpoint, or has another shape there.
        """
        with _alone():
            try:
                dcp.load(state, storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)
            except CheckpointException as error:
                cause = _cause(error)
                raise ValueError(f"{self.path} cannot be loaded: {cause or type(cause).__name__}") from cause


def checkpoint_path(directory: Path, step: int) -> Path:
    """Of the checkpoint after so many steps in a run's directory."""
    return directory / f"step-{step:06}"


def steps_of(path: Path) -> int:
    """After how many steps a checkpoint was written, by its name."""
    return int(path.name.removeprefix("step-"))


def in_order(directory: Path) -> list[Path]:
    """All checkpoints in a run's directory, the newest last."""
    found = [path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=steps_of)


def newest(directory: Path) -> Path | None:
    """The checkpoint after the most steps in a run's directory, or None where it has none."""
    return next(reversed(in_order(directory)), None)


def unfinished(path: Path) -> Path:
    """Where a checkpoint is while it is written or deleted."""
    return path.with_name(UNFINISHED + path.name)


def remove(path: Path) -> None:
    """Delete a checkpoint; cut off in the middle, it does not look like one any more."""
    path.rename(unfinished(path))
    shutil.rmtree(unfinished(path))


def remove_unfinished(directory: Path) -> None:
    """Delete what is left in a run's directory where a save or a removal was cut off."""
    for path in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path)


def write_part(path: Path, rank: int, state: dict[str, Tensor]) -> dict[str, FileRecord]:
    """Write a rank's tensors to its file of the unfinished checkpoint at `path`; returns what it has written.

    Raises:
        OSError: where that is impossible.
    """
    directory = unfinished(path)
    directory.mkdir(exist_ok=True)
    writer = _RankWriter(directory, rank)
    with _alone():
        try:
            dcp.save(state, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            cause = _cause(error)
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(directory / writer.file_name)) from cause
            raise cause from None
    return {file.name: FileRecord.of(file) for file in directory.glob(writer.file_name)}


def finish(checkpoint: Checkpoint) -> None:
    """Make the checkpoint of the files that all ranks have written: one rank calls this, after all of them have.

    Raises:
        OSError: where that is impossible.
    """
    directory = unfinished(checkpoint.path)
    for name in checkpoint.files:
        if not (directory / name).exists():
            raise FileNotFoundError(errno.ENOENT, "rank 0 does not see what another rank wrote", str(directory / name))
    dataclasses.replace(checkpoint, path=directory).write_manifest()
    _sync(directory)
    directory.rename(checkpoint.path)
    _sync(checkpoint.path.parent)


class _RankWriter(HuggingFaceStorageWriter):
    """Writes one rank's tensors to a file that has the rank in its name."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(str(directory), save_distributed=True)
        self._number = rank + 1
        self.file_name = f"shard-{self._number:05}-model-00001-of-00001.safetensors"

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data={"shard_index": self._number}) for plan in plans]


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that torch.distributed.checkpoint is used by one rank, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
