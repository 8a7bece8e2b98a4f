"""Train a small Block AttnRes GPT over a pipeline of processes: `torchrun --nproc-per-node 2 -m blockres.train`.

The order of things: read the flags, meet the other ranks, agree that all can begin and were told the same, and only
then build anything. Whatever is wrong before that is said on every rank.
"""

import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import blockres
from blockres.pipeline.wire import lost_neighbour
from blockres.training.config import TrainConfig, flag, parse
from blockres.training.data import Split, load_corpus
from blockres.training.launch import (
    Launch,
    choose_device,
    end_process,
    leave,
    open_process_group,
    share_cores,
    tell_launcher,
)
from blockres.training.run import Interrupted, Run, Setup, TrainingStopped
from blockres.training.saving import SaveFailed, find_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 1 where training failed, 2 where the ranks could not begin, and after a
    signal 128 and its number.

    `--help` raises SystemExit, and where the other ranks may no longer answer, the process ends here.
    """
    config, problem = _parse(arguments)
    try:
        launch = Launch.find()
    except RuntimeError as error:
        print(f"blockres.train: {error}", file=sys.stderr)
        return 2
    return _begin(launch, config, problem)


def _begin(launch: Launch, config: TrainConfig | None, problem: str | None) -> int:
    """Train, once all ranks agree that they can; a `problem` found before comes instead of a config."""
    setup = None
    if config is not None:
        try:
            setup = _prepare(config, launch)
        except ValueError as error:
            problem = str(error)
    verdict = launch.agree(_facts(setup) if setup else {}, problem)
    if verdict is not None or setup is None:
        _complain(launch, str(verdict))
        launch.farewell()
        return 2
    return _run_guarded(setup, launch)


def _prepare(config: TrainConfig, launch: Launch) -> Setup:
    """Check the flags and find the data, the device, a place for the results and a checkpoint to go on from.

    Raises:
        ValueError: saying which of these is not as it must be.
    """
    config.check(launch.world_size)
    device = choose_device(config.run.device, launch)
    corpus = load_corpus(config.data.data, config.model.vocab_size)
    data = config.data
    split = Split.of(corpus, data.validation_fraction, data.sequence_length, data.batch_size)
    _check_writable(config.run.out)
    settings = {
        **{flag(name): value for name, value in config.flags().items()},
        "data (sha256)": corpus.digest(),
        "device": device.type,
        "torch": torch.__version__,
        "blockres": blockres.__version__,
    }
    return Setup(config, corpus, split, device, settings, find_checkpoint(config, settings, launch))


def _facts(setup: Setup) -> dict[str, Any]:
    """What must be equal on all ranks."""
    resumed = setup.resumed
    return setup.settings | {"checkpoint to go on from": f"{resumed.path}, step {resumed.step}" if resumed else None}


def _parse(arguments: Sequence[str] | None) -> tuple[TrainConfig | None, str | None]:
    try:
        return parse(arguments), None
    except ValueError as error:
        return None, str(error)
    except SystemExit as end:
        if not end.code:
            raise
        return None, "the flags could not be read (see above)"


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"--out {directory} cannot be written: {error.strerror}") from error


def _run_guarded(setup: Setup, launch: Launch) -> int:
    share_cores(launch, setup.config.run.num_threads)
    run = None
    try:
        open_process_group(launch, setup.device, setup.config.run.timeout)
        run = Run(setup, launch)
        run.to_the_end()
    except (TrainingStopped, SaveFailed, Interrupted) as end:
        _complain(launch, str(end))
        dist.destroy_process_group()
        launch.farewell()
        return end.exit_code if isinstance(end, Interrupted) else 1
    except BaseException as error:
        traceback.print_exc()
        _complain_of_crash(launch, error, f"at step {run.step}" if run else "before the first step")
        # An orderly exit would close the connections, and that can wait for ever for a rank that has ended.
        leave(1)
    dist.destroy_process_group()
    return 0


def _complain(launch: Launch, text: str) -> None:
    print(f"blockres.train, rank {launch.rank}: {text}", file=sys.stderr, flush=True)
    tell_launcher(text)


def _complain_of_crash(launch: Launch, error: BaseException, when: str) -> None:
    reason = str(error) or type(error).__name__
    if lost_neighbour(error):
        reason = "another rank has ended; the cause is in what that rank printed last"
    else:
        tell_launcher(f"stopped {when}: {reason}")
    print(f"blockres.train, rank {launch.rank} stopped {when}: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    end_process(main())
