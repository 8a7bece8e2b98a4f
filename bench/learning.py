"""Do Attention Residuals learn better, and at what price? A short comparison on the built-in text.

    python -m bench.learning --json runs/learning.json                     # five variants, three seeds: some minutes
    python -m bench.learning --variant standard --variant "block, S 4" --seeds 1 --steps 100

A GPT of 16 sublayers trained as `blockres.train` trains it, in one process: the standard residual, Block AttnRes with
several block sizes S (in sublayers), and full AttnRes. Steps, batches, seeds, optimizer and all sublayers are the same;
Attention Residuals add 2 D parameters per sublayer, which the table shows. Losses are in nats per byte.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import environment
from bench.tables import markdown, number
from blockres.models.gpt import GPTConfig
from blockres.training.config import DataFlags, OptimizerFlags, ParallelFlags, RunFlags, TrainConfig
from blockres.training.data import Split, load_corpus
from blockres.training.trainer import Trainer

MODEL = GPTConfig(dim=128, num_layers=8)
VARIANTS = {
    "standard": replace(MODEL, residual="standard"),
    "block, S 8": replace(MODEL, sublayers_per_block=8),
    "block, S 4": replace(MODEL, sublayers_per_block=4),
    "block, S 2": replace(MODEL, sublayers_per_block=2),
    "full": replace(MODEL, residual="full"),
}


def train(variant: str, seed: int, steps: int, interval: int) -> dict[str, Any]:
    """One run: the validation loss every `interval` steps, and tokens per second of the steps alone."""
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
    trainer = Trainer(config, split, torch.device("cpu"))
    at, validation, seconds = [0], [trainer.evaluate()], []
    for step in range(steps):
        start = time.perf_counter()
        trainer.train_step(step)
        seconds.append(time.perf_counter() - start)
        if (step + 1) % interval == 0 or step + 1 == steps:
            at.append(step + 1)
            validation.append(trainer.evaluate())
    return {
        "variant": variant,
        "seed": seed,
        "steps": at,
        "validation": validation,
        "parameters": trainer.num_parameters(),
        "tokens_per_s": data.batch_size * data.sequence_length / statistics.median(seconds),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Last losses by variant: mean and range over the seeds, and the gain over the standard residual, seed by seed."""
    header = ("", "last loss", "lowest", "highest", "over standard", "tokens/s", "parameters")
    last = {(row["variant"], row["seed"]): row["validation"][-1] for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        losses = [row["validation"][-1] for row in own]
        pairs = [last[variant, r["seed"]] - last["standard", r["seed"]] for r in own if ("standard", r["seed"]) in last]
        lines.append(
            (
                variant,
                f"{statistics.mean(losses):.4f}",
                f"{min(losses):.4f}",
                f"{max(losses):.4f}",
                f"{statistics.mean(pairs):+.4f}" if pairs else "-",
                number(statistics.median(row["tokens_per_s"] for row in own)),
                f"{own[0]['parameters']:,}",
            )
        )
    return markdown(header, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--interval", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--json", type=Path, help="write all losses there, for bench.report")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for seed in range(options.seeds):
        for variant in options.variant or VARIANTS:
            rows.append(train(variant, seed, options.steps, options.interval))
            said = f"{rows[-1]['validation'][-1]:.4f} nats per byte, {rows[-1]['tokens_per_s']:.0f} tokens/s"
            print(f"seed {seed}, {variant}: {said}", flush=True)
            environment.save(options.json, "learning", rows)
    dist.destroy_process_group()
    print(f"\n{environment.summary(environment.describe())}; {options.steps} steps\n\n{table(rows)}")


if __name__ == "__main__":
    main()
