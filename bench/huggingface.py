"""One training step of a small Llama with its standard residual, Attention Residuals by the formula in eager
PyTorch, and those of blockres. Peak memory counted at the allocator, tokens per second side by side in one run.

    python -m bench.huggingface                     # about two minutes on two cores
    python -m bench.huggingface --layers 4 --dim 128 --tokens 256 --rounds 3

The formula runs in the same model through the same machinery, as people write it: sources stacked, keys normalised in
float32, a softmax over depth, an einsum; then the model's own norm.

Peak memory is what the CPU's allocator has handed out and not got back, from the start of the step's forward to the
end of its backward; parameters and optimizer states were there before and do not count. Times are taken in turns; the
table gives medians, and the spread between the quartiles. Beside the clock's time stands the processor's, which other
programs on the machine change little.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import environment
from bench.cases import DTYPES
from bench.tables import markdown
from bench.timing import spread
from blockres.models import apply_attn_res
from blockres.modules import BlockAttnRes

STANDARD = "standard"
MODELS = ("eager formula", "blockres", "blockres, recompute")


class FormulaStream:
    """The residual stream by the formula, every aggregation over stacked sources."""

    def __init__(self, residual: BlockAttnRes, embedding: Tensor) -> None:
        self._residual, self.position = residual, 0
        self._sources: list[Tensor] = [embedding]
        self._partial: Tensor | None = None

    def read(self, norm: tuple[Tensor, float]) -> Tensor:
        own = self._residual.aggregations[str(self.position)]
        values = torch.stack(self._sources if self._partial is None else [*self._sources, self._partial]).float()
        keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + own.eps) * own.key_weight
        shares = torch.einsum("nbtd,d->nbt", keys, own.query).softmax(0)
        mixed = torch.einsum("nbt,nbtd->btd", shares, values)
        weight, eps = norm
        return (mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + eps) * weight).to(self._sources[0].dtype)

    def write(self, update: Tensor) -> None:
        self._partial = update if self._partial is None else self._partial + update
        self.position += 1
        if self.position % self._residual.sublayers_per_block == 0:
            self._sources, self._partial = [*self._sources, self._partial], None


class FormulaResidual(BlockAttnRes):
    def stream(self, embedding: Tensor) -> FormulaStream:
        return FormulaStream(self, embedding)


def models(options: argparse.Namespace) -> dict[str, nn.Module]:
    """By name, with equal weights wherever they have the same."""
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.dim,
        intermediate_size=options.dim * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.dim // 64,
        num_key_value_heads=options.dim // 64,
        use_cache=False,
        pad_token_id=0,
    )
    found = {}
    for name in (STANDARD, *(options.model or MODELS)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype]).train()
        if name != STANDARD:
            apply_attn_res(model, options.sublayers_per_block, recompute="recompute" in name)
            with torch.no_grad():
                for aggregation in model.model.attn_res.aggregations.values():
                    aggregation.query.normal_(std=0.02)
        if name == "eager formula":
            model.model.attn_res.__class__ = FormulaResidual
        found[name] = model
    return found


def step(model: nn.Module, ids: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator had out at a time, counted from the start of `run`."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    ids = torch.randint(3, options.vocabulary, (options.batch, options.tokens))
    found = models(options)
    losses = {name: float(step(model, ids)) for name, model in found.items()}
    clock, processor = ({name: [] for name in found} for _ in range(2))
    for done in range(options.rounds):
        print(f"round {done + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for name, model in found.items():
            began, worked = time.perf_counter(), time.process_time()
            step(model, ids)
            clock[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - worked)
    rows = []
    for name, model in found.items():
        model.zero_grad(set_to_none=True)
        rows.append(
            {
                "model": name,
                "loss": losses[name],
                "peak MiB": peak_bytes(lambda model=model: step(model, ids)) / 2**20,
                "tokens/s": ids.numel() / statistics.median(clock[name]),
                "spread": spread(clock[name]),
                "tokens per processor second": ids.numel() / statistics.median(processor[name]),
            }
        )
        model.zero_grad(set_to_none=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Each figure, and beside it how many times that of the standard residual it is."""
    columns = ("peak MiB", "tokens/s", "tokens per processor second")
    header = ("model", "loss", *(name for column in columns for name in (column, "× standard")), "spread")
    first = rows[0]
    lines = []
    for row in rows:
        figures = [cell for c in columns for cell in (f"{row[c]:.0f}", f"{row[c] / first[c]:.2f}")]
        lines.append((row["model"], f"{row['loss']:.4f}", *figures, f"{row['spread']:.0%}"))
    return markdown(header, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--sublayers-per-block", type=int, default=6)
    parser.add_argument("--model", action="append", choices=MODELS, help="beside the standard one; may be given again")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each model, in turns")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json", type=Path, help="write the table there, for bench.report")
    options = parser.parse_args(arguments)
    rows = measured(options)
    case = (
        f"Llama, {options.layers} layers of {options.dim}, {options.batch} × {options.tokens} tokens, {options.dtype}, "
        f"{options.sublayers_per_block} sublayers per block, {torch.get_num_threads()} threads"
    )
    print(f"{environment.summary(environment.describe())}\n{case}\n\n{table(rows)}")
    environment.save(options.json, "huggingface", [row | {"case": case} for row in rows])


if __name__ == "__main__":
    main()
