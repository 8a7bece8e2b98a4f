"""Do Attention Residuals learn better, and at what price? A short comparison on the built-in text.

    python -m bench.learning --json runs/learning.json                # five variants, three seeds: half an hour
    python -m bench.learning --part speed --json runs/speed.json      # tokens per second alone: a minute
    python -m bench.learning --part losses --variant standard --variant "block, S 4" --seed 0 --steps 100

A GPT of 16 sublayers trained as `blockres.train` trains it, in one process: the standard residual, Block AttnRes with
several block sizes S (in sublayers), and full AttnRes. Steps, batches, seeds, optimizer and all sublayers are the same;
Attention Residuals add 2 D parameters per sublayer, which the table shows. Losses are in nats per byte. For tokens per
second, the variants take turns, step by step, in one process, so that all see the same machine.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import environment
from bench.learned import table
from bench.timing import spread
from blockres.models.gpt import GPTConfig
from blockres.training.config import DataFlags, OptimizerFlags, ParallelFlags, RunFlags, TrainConfig
from blockres.training.data import Split, load_corpus
from blockres.training.launch import end_process
from blockres.training.trainer import Trainer

MODEL = GPTConfig(dim=128, num_layers=8)
VARIANTS = {
    "standard": replace(MODEL, residual="standard"),
    "block, S 8": replace(MODEL, sublayers_per_block=8),
    "block, S 4": replace(MODEL, sublayers_per_block=4),
    "block, S 2": replace(MODEL, sublayers_per_block=2),
    "full": replace(MODEL, residual="full"),
}
PARTS = ("speed", "losses")
SEEDS = (0, 1, 2)


def trainer_of(variant: str, seed: int, steps: int) -> Trainer:
    config = TrainConfig(
        run=RunFlags(steps=steps, seed=seed, device="cpu"),
        data=DataFlags(sequence_length=128, batch_size=8, eval_batches=8),
        model=VARIANTS[variant],
        optimizer=OptimizerFlags(warmup_steps=max(1, steps // 10)),
        parallel=ParallelFlags(virtual_stages=1, num_microbatches=1, schedule="GPipe"),
    )
    data = config.data
    corpus = load_corpus(None, config.model.vocab_size)
    split = Split.of(corpus, data.validation_fraction, data.sequence_length, data.batch_size)
    return Trainer(config, split, torch.device("cpu"))


def losses(variant: str, seed: int, steps: int, interval: int) -> dict[str, Any]:
    """One run: the validation loss before it, and every `interval` steps."""
    trainer = trainer_of(variant, seed, steps)
    at, validation = [0], [trainer.evaluate()]
    for step in range(steps):
        trainer.train_step(step)
        if (step + 1) % interval == 0 or step + 1 == steps:
            at.append(step + 1)
            validation.append(trainer.evaluate())
    parameters = trainer.num_parameters()
    row = {"part": "losses", "variant": variant, "seed": seed, "parameters": parameters}
    return row | {"steps": at, "validation": validation}


def speeds(variants: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Tokens per second of a training step, the variants in turn; the first steps warm up."""
    trainers = {variant: trainer_of(variant, 0, 1 + rounds) for variant in variants}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for step in range(1 + rounds):
        for variant, trainer in trainers.items():
            start = time.perf_counter()
            trainer.train_step(step)
            seconds[variant].append(time.perf_counter() - start)
    for variant, trainer in trainers.items():
        data, timed = trainer.config.data, seconds[variant][1:]
        tokens = data.batch_size * data.sequence_length
        speed = {"tokens_per_s": tokens / statistics.median(timed), "spread": spread(timed)}
        yield {"part": "speed", "variant": variant, "threads": torch.get_num_threads()} | speed


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    variants = options.variant or list(VARIANTS)
    parts = [options.part] if options.part else PARTS
    if "speed" in parts:
        yield from speeds(variants, options.rounds)
    if "losses" in parts:
        for seed in options.seed or SEEDS:
            for variant in variants:
                yield losses(variant, seed, options.steps, options.interval)


def _said(row: dict[str, Any]) -> str:
    if row["part"] == "speed":
        return f"{row['variant']}: {row['tokens_per_s']:.0f} tokens/s"
    return f"seed {row['seed']}, {row['variant']}: {row['validation'][-1]:.4f} nats per byte"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--seed", action="append", type=int, help=f"default: {SEEDS}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--interval", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--json", type=Path, help="write all rows there, for bench.report")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for row in measured(options):
        rows.append(row)
        print(_said(row), flush=True)
        environment.save(options.json, "learning", rows)
    dist.destroy_process_group()
    print(f"\n{environment.summary(environment.describe())}; {options.steps} steps\n\n{table(rows)}")


if __name__ == "__main__":
    main()
    end_process(0)
