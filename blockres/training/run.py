"""A training run: the loop, what it writes down, and what it says at the end."""

import json
import math
import signal
import time
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockres.pipeline import Traffic
from blockres.training import checkpoint
from blockres.training.checkpoint import Checkpoint
from blockres.training.config import TrainConfig
from blockres.training.data import Corpus, Split
from blockres.training.journal import Journal, closing_lines, counted, human_bytes
from blockres.training.launch import Launch, describe_problems
from blockres.training.optim import learning_rate
from blockres.training.saving import Saver, describe_differences
from blockres.training.signals import StopRequest
from blockres.training.trainer import StepReport, Trainer


class TrainingStopped(Exception):
    """Raised on all ranks at the same point: there is nothing to train on with."""


class Interrupted(Exception):
    """Raised on all ranks after the same step, which is saved: a signal has asked for the end."""

    def __init__(self, received: signal.Signals, saved: Path, steps_left: int) -> None:
        what_is_left = (
            "--resume goes on from there" if steps_left else "all steps are done, but the last evaluation is not"
        )
        super().__init__(f"{received.name}: the run is saved in {saved}, {what_is_left}")
        self.exit_code = 128 + received


@dataclass(frozen=True)
class Setup:
    """What a rank needs before anything heavy is built.

    Attributes:
        settings: by name, whatever must be equal on all ranks; JSON can carry it.
        resumed: the checkpoint to go on from, if any.
    """

    config: TrainConfig
    corpus: Corpus
    split: Split
    device: torch.device
    settings: dict[str, Any]
    resumed: Checkpoint | None


class Run:
    """A run on one rank, in an open process group. `step` is the number of steps done.

    Raises:
        TrainingStopped: where the checkpoint to resume from does not hold what it should.
    """

    def __init__(self, setup: Setup, launch: Launch) -> None:
        self.setup, self.config, self.corpus, self.split = setup, setup.config, setup.corpus, setup.split
        self.out, self.step = self.config.run.out, setup.resumed.step if setup.resumed else 0
        torch.manual_seed(self.config.run.seed + dist.get_rank())
        self.trainer = Trainer(self.config, self.split, setup.device)
        if setup.resumed:
            _load(self.trainer, setup.resumed, launch)
        if dist.get_rank() == 0:  # what is there stays in its place until nothing stands in the way of this run
            checkpoint.remove_unfinished(self.out)
            _set_earlier_run_aside(self.out, setup.resumed)
        dist.barrier()
        self.speaks = self.trainer.has_last and self.trainer.dp_rank == 0
        self.journal = Journal(self.out / "metrics.jsonl", self.config.run.steps, self.speaks, done=self.step)
        self.saver = Saver(self.out, launch, setup.settings, self.config.run.keep_checkpoints)
        self.request = StopRequest()
        self.seconds, self.steps_here = 0.0, 0

    def to_the_end(self) -> None:
        """Train, evaluate, save, and say how it went.

        Raises:
            TrainingStopped: where a step is not finite and the run should then stop.
            SaveFailed: where a checkpoint cannot be written.
            Interrupted: after a signal.
        """
        self._introduce()
        with self.request:
            self._train()
        traffic, peak = self.trainer.step_traffic(), self.trainer.cache_peak()
        depth = self.trainer.new_depth_weights()
        self.journal.evaluation(self.step, self.trainer.evaluate(depth))
        pictures = self._draw(depth.gather() if depth else None)
        self.journal.close()
        if self.speaks:
            last = checkpoint.checkpoint_path(self.out, self.step)
            names = ", ".join(path.name for path in (self.journal.path, last, *pictures))
            files = {"files": f"{self.out}: {names}"}
            print(closing_lines({**self._results(), **self._costs(traffic, peak), **files}))

    def _train(self) -> None:
        flags = self.config.run
        while self.step < flags.steps:
            if self.step % flags.eval_interval == 0:
                self.journal.evaluation(self.step, self.trainer.evaluate())
            report = self._train_step()
            due = flags.checkpoint_interval is not None and self.step % flags.checkpoint_interval == 0
            if due or report.stop is not None or self.step == flags.steps:
                saved = self.saver.save(self.step, self.trainer.state_to_save())
                if report.stop is not None:
                    self.journal.close()
                    raise Interrupted(report.stop, saved, flags.steps - self.step)

    def _train_step(self) -> StepReport:
        begin = time.perf_counter()
        report = self.trainer.train_step(self.step, lambda: self.request.received)
        seconds = time.perf_counter() - begin
        rate = learning_rate(self.step, self.config.run.steps, self.config.optimizer)
        self.seconds += seconds
        self.steps_here += 1
        self.step += 1
        self.journal.step(
            self.step,
            report.loss,
            tokens=self._tokens_per_step,
            seconds=seconds,
            learning_rate=rate,
            grad_norm=report.grad_norm,
        )
        if not report.is_finite:
            self._meet_broken_step(report)
        return report

    def _meet_broken_step(self, report: StepReport) -> None:
        ranks = ", ".join(map(str, self.trainer.ranks_with_broken_gradients())) or "none"
        what = f"step {self.step}: loss {report.loss}, gradient norm {report.grad_norm}, broken on ranks: {ranks}"
        if self.config.run.nan_policy == "stop":
            raise TrainingStopped(f"{what}. --nan-policy skip would leave out such steps")
        self.journal.say(f"{what}; the step is left out")

    @property
    def _tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.data.sequence_length

    def _introduce(self) -> None:
        config, routing, split, unit = self.config, self.trainer.routing, self.split, self.corpus.unit
        num_parameters = self.trainer.num_parameters()
        self._say_where_it_begins()
        self.journal.say(
            f"{self.corpus.name}: {len(self.corpus.tokens):,} {unit}s, {len(split.train):,} to train on, "
            f"{len(split.validation):,} for validation\n"
            f"an evaluation every {counted(config.run.eval_interval, 'step')}, on {self.trainer.num_eval_batches:,} of "
            f"{split.num_validation_batches:,} batches (--eval-batches)\n"
            f"{_model_words(config.run.model)}{config.model.num_sublayers} sublayers, {config.model.residual} residual"
            f"{_block_words(config.model.block)}, {num_parameters:,} parameters\n"
            f"{_replica_words(config.parallel.dp_size)}{counted(routing.pp_size, 'process', 'processes')} on "
            f"{self.trainer.device.type}, {counted(config.parallel.virtual_stages, 'stage')} each "
            f"({config.parallel.schedule}, {counted(config.parallel.num_microbatches, 'microbatch', 'microbatches')}), "
            f"sublayers per stage "
            f"{', '.join(map(str, routing.sublayers_per_stage))}"
        )

    def _say_where_it_begins(self) -> None:
        resumed = self.setup.resumed
        if resumed is not None:
            differences = describe_differences(resumed, self.setup.settings)
            otherwise = f", with other settings: {differences}" if differences else ""
            self.journal.say(f"going on after step {resumed.step} from {resumed.path}{otherwise}")
        elif self.config.run.resume is not None:
            self.journal.say(f"{self.out} has no checkpoint yet: beginning at step 0")
        if (self.out / "earlier").exists():
            self.journal.say(f"what an earlier run left in {self.out} is in {self.out / 'earlier'}")

    def _results(self) -> dict[str, str]:
        unit, journal = f"nats per {self.corpus.unit}", self.journal
        first_step, first_loss = journal.validation[0]
        last = [loss for _, loss in journal.training[-20:] if math.isfinite(loss)]
        tokens = self._tokens_per_step * self.steps_here
        return {
            "training loss": f"{sum(last) / max(1, len(last)):.4f} {unit} (mean of the last {len(last)} steps)",
            "validation loss": f"{journal.validation[-1][1]:.4f} {unit}, {first_loss:.4f} after step {first_step}; "
            f"unigram entropy {self.split.unigram_entropy():.4f}",
            "speed": f"{tokens / self.seconds:,.0f} tokens/s, {self.seconds:.0f} s of training",
        }

    def _costs(self, traffic: Traffic, peak: tuple[int, int]) -> dict[str, str]:
        """What one microbatch's forward sends over all hops; its backward sends as much the other way."""
        cached = {"cache peak": f"{counted(peak[0], 'source')}, {human_bytes(peak[1])} on the fullest rank"}
        if self.trainer.routing.pp_size == 1:
            return cached
        trainer = self.trainer
        microbatches = self.config.parallel.dp_size * self.config.parallel.num_microbatches
        units, sent = traffic.forward_units // microbatches, traffic.forward_bytes // microbatches
        everything = sum(trainer.routing.hop_units(cache=False))
        unit_bytes = self.config.pipeline_dtype.itemsize * torch.Size(trainer.microbatch_shape).numel()
        everything_bytes = sent + (everything - units) * unit_bytes  # tallies go with either
        how = "with the cache" if self.config.parallel.cache else "without a cache"
        return {
            "sent per microbatch": f"{counted(units, 'unit')}, {human_bytes(sent)} forward {how}, and as much "
            f"backward; everything at every hop is {counted(everything, 'unit')}, {human_bytes(everything_bytes)}",
            **cached,
        }

    def _draw(self, depth: Tensor | None) -> list[Path]:
        """Draw what can be drawn, and keep the depth weights as numbers; returns the files."""
        if not self.speaks:
            return []
        files = []
        if depth is None:
            self.journal.say("no depth_weights.json: a standard residual weighs no sources")
        else:
            files.append(self.out / "depth_weights.json")
            files[0].write_text(json.dumps(depth.tolist()))
        if find_spec("matplotlib") is None:
            self.journal.say("no plots: matplotlib is not installed (pip install 'blockres[plot]')")
            return files
        from blockres.training import plots

        files.append(self.out / "loss.png")
        baseline = self.split.unigram_entropy()
        plots.draw_losses(files[-1], self.journal.training, self.journal.validation, baseline, self.corpus.unit)
        if depth is not None and self.config.model.block is not None:
            files.append(self.out / "depth_weights.png")
            plots.draw_depth_weights(files[-1], depth.numpy(), self.config.model.block)
        return files


def _replica_words(dp_size: int) -> str:
    return "" if dp_size == 1 else f"{dp_size} replicas of "


def _model_words(model: str) -> str:
    return "" if model == "gpt" else f"{model} with random weights, "


def _block_words(sublayers_per_block: int | None) -> str:
    return "" if sublayers_per_block is None else f" ({sublayers_per_block} sublayers per block)"


def _load(trainer: Trainer, found: Checkpoint, launch: Launch) -> None:
    problem = None
    try:
        trainer.load(found)
    except ValueError as error:
        problem = str(error)
    verdict = describe_problems(launch.exchange("resumption", problem))
    if verdict is not None:
        raise TrainingStopped(verdict)


def _set_earlier_run_aside(out: Path, resumed: Checkpoint | None) -> None:
    """Move what an earlier run left to `earlier/<number>`, so that nothing is lost and nothing is mixed up.

    Where this run goes on with it, only what came after the checkpoint.
    """
    patterns = ("metrics.jsonl", "step-[0-9]*", "loss.png", "depth_weights.*")
    left = [path for pattern in patterns for path in out.glob(pattern)]
    if resumed is not None and resumed.path.parent.resolve() == out.resolve():
        left = [path for path in checkpoint.in_order(out) if checkpoint.steps_of(path) > resumed.step]
    if left:
        aside = next(path for number in count(1) if not (path := out / "earlier" / str(number)).exists())
        aside.mkdir(parents=True)
        for path in left:
            path.rename(aside / path.name)
