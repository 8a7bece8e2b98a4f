"""A training run: the loop, what it writes down, and what it says at the end."""

import json
import math
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from blockres.pipeline import Traffic
from blockres.training.checkpoint import save_checkpoint, training_state
from blockres.training.config import TrainConfig
from blockres.training.data import Corpus, Split
from blockres.training.journal import Journal, closing_lines, human_bytes
from blockres.training.optim import learning_rate
from blockres.training.trainer import StepReport, Trainer


class TrainingStopped(Exception):
    """Raised on all ranks at the same point: there is nothing to train on with."""


class Run:
    """A run on one rank, in an open process group. `step` is the number of steps done."""

    def __init__(self, config: TrainConfig, corpus: Corpus, split: Split, device: torch.device) -> None:
        self.config, self.corpus, self.split = config, corpus, split
        self.out = config.run.out
        if dist.get_rank() == 0:
            _set_earlier_run_aside(self.out)
        dist.barrier()
        self.trainer = Trainer(config, split, device)
        self.speaks = self.trainer.has_last and self.trainer.dp_rank == 0
        self.journal = Journal(self.out / "metrics.jsonl", config.run.steps, self.speaks)
        self.step = 0
        self.seconds = 0.0

    def to_the_end(self) -> None:
        """Train, evaluate, save, and say how it went."""
        self._introduce()
        steps, interval = self.config.run.steps, self.config.run.eval_interval
        self.journal.evaluation(0, self.trainer.evaluate())
        while self.step < steps:
            self._train_step()
            if self.step % interval == 0 and self.step < steps:
                self.journal.evaluation(self.step, self.trainer.evaluate())
        traffic, peak = self.trainer.step_traffic(), self.trainer.cache_peak()
        depth = self.trainer.new_depth_weights()
        self.journal.evaluation(steps, self.trainer.evaluate(depth))
        checkpoint = self.out / f"step-{steps:06}"
        save_checkpoint(checkpoint, training_state(self.trainer.parts, self.trainer.optimizer))
        pictures = self._draw(depth.gather() if depth else None)
        self.journal.close()
        if self.speaks:
            names = ", ".join(path.name for path in (self.journal.path, checkpoint, *pictures))
            files = {"files": f"{self.out}: {names}"}
            print(closing_lines({**self._results(), **self._costs(traffic, peak), **files}))

    def _train_step(self) -> None:
        begin = time.perf_counter()
        report = self.trainer.train_step(self.step)
        seconds = time.perf_counter() - begin
        rate = learning_rate(self.step, self.config.run.steps, self.config.optimizer)
        self.seconds += seconds
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
        if (self.out / "earlier").exists():
            self.journal.say(f"what an earlier run left in {self.out} is in {self.out / 'earlier'}")
        self.journal.say(
            f"{self.corpus.name}: {len(self.corpus.tokens):,} {unit}s, {len(split.train):,} to train on, "
            f"{len(split.validation):,} for validation\n"
            f"{config.model.num_sublayers} sublayers, {config.model.residual} residual"
            f"{_block_words(config.model.block)}, {num_parameters:,} parameters\n"
            f"{config.parallel.dp_size} × {routing.pp_size} processes on {self.trainer.device.type}, "
            f"{config.parallel.virtual_stages} stages each ({config.parallel.schedule}, "
            f"{config.parallel.num_microbatches} microbatches), sublayers per stage "
            f"{', '.join(map(str, routing.sublayers_per_stage))}"
        )

    def _results(self) -> dict[str, str]:
        unit, journal = f"nats per {self.corpus.unit}", self.journal
        last = [loss for _, loss in journal.training[-20:] if math.isfinite(loss)]
        tokens = self._tokens_per_step * len(journal.training)
        return {
            "training loss": f"{sum(last) / max(1, len(last)):.4f} {unit} (mean of the last {len(last)} steps)",
            "validation loss": f"{journal.validation[-1][1]:.4f} {unit}, {journal.validation[0][1]:.4f} at the start; "
            f"unigram entropy {self.split.unigram_entropy():.4f}",
            "speed": f"{tokens / self.seconds:,.0f} tokens/s, {self.seconds:.0f} s of training",
        }

    def _costs(self, traffic: Traffic, peak: tuple[int, int]) -> dict[str, str]:
        """What one microbatch's forward sends over all hops; its backward sends as much the other way."""
        trainer = self.trainer
        microbatches = self.config.parallel.dp_size * self.config.parallel.num_microbatches
        units, sent = traffic.forward_units // microbatches, traffic.forward_bytes // microbatches
        everything = sum(trainer.routing.hop_units(cache=False))
        unit_bytes = self.config.pipeline_dtype.itemsize * torch.Size(trainer.microbatch_shape).numel()
        how = "with the cache" if self.config.parallel.cache else "without a cache"
        return {
            "sent per microbatch": f"{units} units, {human_bytes(sent)} forward {how}, and as much backward; "
            f"everything at every hop is {everything} units, {human_bytes(everything * unit_bytes)}",
            "cache peak": f"{peak[0]} sources, {human_bytes(peak[1])} on the fullest rank",
        }

    def _draw(self, depth: Tensor | None) -> list[Path]:
        """Draw what can be drawn, and keep the depth weights as numbers; returns the files."""
        if not self.speaks:
            return []
        files = []
        if depth is not None:
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


def _block_words(sublayers_per_block: int | None) -> str:
    return "" if sublayers_per_block is None else f" ({sublayers_per_block} sublayers per block)"


def _set_earlier_run_aside(out: Path) -> None:
    """Move what an earlier run left to `earlier/<number>`, so that nothing is lost and nothing is mixed up."""
    patterns = ("metrics.jsonl", "step-[0-9]*", "loss.png", "depth_weights.*")
    left = [path for pattern in patterns for path in out.glob(pattern)]
    if left:
        aside = next(path for number in count(1) if not (path := out / "earlier" / str(number)).exists())
        aside.mkdir(parents=True)
        for path in left:
            path.rename(aside / path.name)
