"""The whole model of a checkpoint in one safetensors file: `python -m blockres.training.export CHECKPOINT FILE`.

Tensors have the names of the unsplit model, however the run was split; the file's metadata say how to build it.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from blockres.models.gpt import GPT, GPTConfig
from blockres.training import checkpoint
from blockres.training.checkpoint import Checkpoint
from blockres.training.config import flag
from blockres.training.networks import random_model

METADATA = "blockres"
"""The key under which the file describes its model."""


@dataclass(frozen=True)
class Exported:
    """What was written: the number of parameters, and the checkpoint that they are of, after so many steps."""

    num_parameters: int
    checkpoint: Path
    step: int


def export_model(source: Path, file: Path) -> Exported:
    """Write the model of a checkpoint, or of the newest in a run's directory, to `file`: complete, or not at all.

    Raises:
        ValueError: where the checkpoint is damaged or is none.
        OSError: where the file is there already, or cannot be written.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists already: give another name, or remove it")
    found = Checkpoint.open(checkpoint.newest(source) or source)
    found.verify()
    model = _build(_description(found))
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found.load({f"model.{name}": value for name, value in state.items()})
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.touch()
    mode = unfinished.stat().st_mode  # of any new file here; safetensors writes one that only its owner may read
    save_file(state, unfinished, metadata={"format": "pt", METADATA: json.dumps(_description(found))})
    unfinished.chmod(mode)
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.replace(file)
    return Exported(sum(parameter.numel() for parameter in state.values()), found.path, found.step)


def load_model(file: Path) -> nn.Module:
    """The unsplit model from a file that `export_model` has written: a `GPT`, or a model of transformers.

    Raises:
        ValueError: where the file is another, or damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            description = json.loads((opened.metadata() or {})[METADATA])
        model = _build(description)
        model.load_state_dict(load_file(file))
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{file} is no model that blockres has exported: {type(error).__name__} {error}") from error
    return model


def _description(found: Checkpoint) -> dict[str, Any]:
    try:
        model = {field.name: found.settings[flag(field.name)] for field in dataclasses.fields(GPTConfig)}
        others = {name: found.settings[flag(name)] for name in ("dtype", "sequence_length")}
        return {"family": found.settings.get(flag("model"), "gpt"), "model": model, "step": found.step, **others}
    except KeyError as error:
        raise ValueError(f"{found.path / checkpoint.MANIFEST} is damaged: it has no {error}") from error


def _build(description: dict[str, Any]) -> nn.Module:
    shape, dtype = GPTConfig(**description["model"]), getattr(torch, description["dtype"])
    family = description.get("family", "gpt")
    if family == "gpt":
        return GPT(shape, dtype=dtype)
    return random_model(family, shape, sequence_length=description["sequence_length"], dtype=dtype)


@dataclass(frozen=True)
class Arguments:
    """Write the whole model of a checkpoint to one safetensors file.

    Args:
        checkpoint: a checkpoint, or the directory of a run, of which the newest is taken.
        file: a new file.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m blockres.training.export")
    try:
        done = export_model(arguments.checkpoint, arguments.file)
    except (ValueError, OSError) as error:
        sys.exit(f"blockres.training.export: {error}")
    print(f"{arguments.file}: {done.num_parameters:,} parameters of {done.checkpoint}, after step {done.step}")


if __name__ == "__main__":
    main()
