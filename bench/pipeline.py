"""The pipeline, measured on this machine over gloo, and simulated for more ranks than it has.

    python -m bench.pipeline measure      # a small GPT: tokens/s, bytes per hop, bubble, peak memory
    python -m bench.pipeline check        # the simulation against real runs of stages that sleep instead of computing
    python -m bench.pipeline simulate     # time per step over P, up to K3's size

Measured are the standard residual, Block AttnRes without the block cache and with it; P = 2 and 4 ranks, V = 1, 2 and
4 stages on each, the wire in float32 and bfloat16. `bubble` is the share of the step in which a rank runs none of its
stages: it waits, sends, or steps the optimizer. Ranks beyond the machine's cores share them.

`bench.simulation` says what the simulation models; its tables state the link that it assumes, and the seconds of one
sublayer's forward. Stages that sleep leave the cores free, so the check is fair for any P.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import environment
from bench.memory import peak_growth
from bench.simulation import Link, simulate
from bench.tables import markdown, number
from bench.timing import spread
from blockres.models.gpt import GPT, GPTConfig, Residual
from blockres.pipeline import BlockCache, BlockResStage, BlockRouting, build_schedule, split_sublayers
from blockres.training.config import DataFlags, Dtype, ParallelFlags, RunFlags, TrainConfig
from blockres.training.data import Split, load_corpus
from blockres.training.launch import end_process
from blockres.training.trainer import Trainer

VARIANTS = ("standard", "block", "block, cache")


@dataclass(frozen=True)
class Case:
    """One pipelined run of the small GPT."""

    variant: str
    pp_size: int
    virtual: int
    wire: Dtype
    steps: int = 3
    num_layers: int = 8
    dim: int = 128
    sequence_length: int = 128
    microbatches: int = 8
    batch_size: int = 8
    sublayers_per_block: int = 2

    def config(self) -> TrainConfig:
        residual: Residual = "standard" if self.variant == "standard" else "block"
        return TrainConfig(
            run=RunFlags(steps=1 + self.steps, device="cpu"),
            data=DataFlags(sequence_length=self.sequence_length, batch_size=self.batch_size),
            model=GPTConfig(
                dim=self.dim,
                num_layers=self.num_layers,
                residual=residual,
                sublayers_per_block=self.sublayers_per_block,
            ),
            parallel=ParallelFlags(
                virtual_stages=self.virtual,
                num_microbatches=self.microbatches,
                pipeline_dtype=self.wire,
                cache=self.variant.endswith("cache"),
            ),
        )


class Busy:
    """Seconds that a rank spends in its stages' forward and backward."""

    def __init__(self, stages: Sequence[BlockResStage]) -> None:
        self.seconds = 0.0
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                setattr(stage, name, self._clocked(getattr(stage, name)))

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return clocked


def run_case(case: Case) -> dict[str, Any]:
    """On every rank: build the model, take the steps, and report for all ranks together."""
    config = case.config()
    corpus = load_corpus(None, config.model.vocab_size)
    split = Split.of(corpus, config.data.validation_fraction, case.sequence_length, case.batch_size)
    with peak_growth() as peak:
        trainer = Trainer(config, split, torch.device("cpu"))
        trainer.train_step(0)
        busy = Busy(trainer.stages)
        seconds = [_timed_step(trainer, 1 + step) for step in range(case.steps)]
    traffic = trainer.step_traffic()
    shares = _gathered(busy.seconds / sum(seconds))
    tokens = case.batch_size * case.sequence_length
    hops = max(1, traffic.forward_hops)
    return asdict(case) | {
        "part": "measured",
        "tokens/s": tokens / statistics.median(seconds),
        "ms": statistics.median(seconds) * 1e3,
        "spread": spread(seconds),
        "bubble": 1 - sum(shares) / len(shares),
        "KiB per hop": traffic.forward_bytes / hops / 1024,
        "units per hop": traffic.forward_units / hops,
        "peak MiB": max(_gathered(peak.growth / 2**20)),
        "cached sources": trainer.cache_peak()[0],
    }


def _timed_step(trainer: Trainer, step: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    trainer.train_step(step)
    dist.barrier()
    return time.perf_counter() - start


def _gathered(value: float) -> list[float]:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepingPart(nn.Module):
    """A stage of sublayers that sleep, on a block stream of the given routing."""

    def __init__(self, routing: BlockRouting, stage: int, forward: float, backward: float) -> None:
        super().__init__()
        self._sublayers, self._per_block = routing.sublayers(stage), routing.sublayers_per_block
        self._is_last = stage == routing.num_stages - 1
        self._seconds = (forward, backward)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, sources: Tensor | tuple[Tensor, ...], partial: Tensor | None = None):
        if isinstance(sources, Tensor):
            first = sources * self.scale
            sources, partial = ((first,), None) if self._per_block else ((), first)
        for sublayer in self._sublayers:
            seen = sum(sources) if partial is None else sum(sources, start=partial)
            update = _Sleep.apply(seen, *self._seconds)
            partial = update if partial is None else partial + update
            if self._per_block and (sublayer + 1) % self._per_block == 0:
                sources, partial = (*sources, partial), None
        if self._is_last:
            return sum(sources) if partial is None else sum(sources, start=partial)
        return sources, partial


@dataclass(frozen=True)
class SleepCase:
    """One real run of sleeping stages, to hold the simulation against. A sublayer sleeps so many seconds."""

    cache: bool
    pp_size: int
    virtual: int
    microbatches: int = 8
    sublayers: int = 16
    per_block: int = 2
    forward: float = 0.010
    backward: float = 0.020
    shape: tuple[int, int, int] = (1, 256, 256)
    steps: int = 4

    def routing(self) -> BlockRouting:
        stages = split_sublayers(self.sublayers, self.pp_size * self.virtual)
        return BlockRouting(stages, self.per_block, self.pp_size, cache=self.cache)


def run_sleep_case(case: SleepCase) -> dict[str, Any]:
    """The median step of the real engine, and what the simulation says."""
    routing, cache = case.routing(), BlockCache()
    stages = [
        BlockResStage(
            SleepingPart(routing, index, case.forward, case.backward),
            index,
            routing,
            device="cpu",
            cache=cache,
            microbatch_shape=case.shape,
            dtype=torch.float32,
        )
        for index in routing.stages_of(dist.get_rank())
    ]
    schedule = build_schedule("Interleaved1F1B", stages, case.microbatches, lambda out, target: (out - target).mean())
    batch = torch.zeros(case.shape[0] * case.microbatches, *case.shape[1:])
    seconds = []
    for _ in range(1 + case.steps):
        dist.barrier()
        start = time.perf_counter()
        _step(schedule, stages, routing, batch)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    link = measured_link()
    unit = 4 * case.shape[0] * case.shape[1] * case.shape[2]
    simulated = simulate(
        routing,
        case.microbatches,
        lambda stage: len(routing.sublayers(stage)) * case.forward,
        lambda stage: len(routing.sublayers(stage)) * case.backward,
        unit,
        link,
    )
    real = statistics.median(seconds[1:])
    return {
        "part": "check",
        "cache": case.cache,
        "P": case.pp_size,
        "V": case.virtual,
        "link MB/s": link.bandwidth / 1e6,
        "ms real": real * 1e3,
        "spread": spread(seconds[1:]),
        "ms simulated": simulated.seconds * 1e3,
        "real / simulated": real / simulated.seconds,
    }


def _step(schedule: Any, stages: Sequence[BlockResStage], routing: BlockRouting, batch: Tensor) -> None:
    inputs = (batch,) if stages[0].stage_index == 0 else ()
    target = batch if stages[-1].stage_index == routing.num_stages - 1 else None
    schedule.step(*inputs, target=target, losses=[] if target is not None else None)


def measured_link(nbytes: int = 2**22, rounds: int = 5) -> Link:
    """Bandwidth and latency between ranks 0 and 1 of this group, from messages there and back."""

    def seconds(size: int) -> float:
        message = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            elif dist.get_rank() == 1:
                dist.recv(message, 0)
                dist.send(message, 0)
            times.append((time.perf_counter() - start) / 2)
        return statistics.median(times)

    latency, large = seconds(1), seconds(nbytes)
    both = [nbytes / max(large - latency, 1e-9), latency]
    dist.broadcast_object_list(both)
    return Link(*both)


@dataclass(frozen=True)
class Network:
    """A model to simulate; `seconds` is one sublayer's forward for one microbatch, backward takes twice as long."""

    name: str
    sublayers: int
    per_block: int
    unit_bytes: float
    seconds: float
    link: Link
    microbatches: int


GPU_FLOPS = 400e12  # what a current GPU reaches in bfloat16 training, about two fifths of its peak
GPU_LINK = Link(50e9, 10e-6)  # one 400 Gb/s port for each GPU


def transformer(name: str, layers: int, dim: int, layers_per_block: int, tokens: int = 4096) -> Network:
    """A dense transformer of 12 D² parameters a layer on one GPU per rank, bfloat16 on the wire."""
    seconds = 2 * 12 * dim**2 * tokens / 2 / GPU_FLOPS
    return Network(name, 2 * layers, 2 * layers_per_block, 2 * tokens * dim, seconds, GPU_LINK, microbatches=128)


NETWORKS = (
    transformer("32 layers, D 4096", 32, 4096, 4),
    transformer("61 layers, D 7168", 61, 7168, 8),
    transformer("93 layers, D 7168 (K3's size)", 93, 7168, 12),
)


def measured_network(case: Case) -> Network:
    """The small GPT, its compute time measured here and now on one thread; the link is 10 Gb/s Ethernet."""
    config = case.config().model
    model = GPT(config)
    tokens = torch.zeros(case.batch_size // case.microbatches, case.sequence_length, dtype=torch.long)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        logits = model(tokens)
        assert isinstance(logits, Tensor)
        logits.sum().backward()
        seconds.append(time.perf_counter() - start)
    per_sublayer = statistics.median(seconds) / 3 / config.num_sublayers
    unit = 4 * tokens.numel() * config.dim
    link = Link(1.25e9, 50e-6)
    return Network("small GPT, measured here", config.num_sublayers, 2, unit, per_sublayer, link, microbatches=64)


def simulated_rows(networks: Sequence[Network], sizes: Sequence[int], virtual: int) -> Iterator[dict[str, Any]]:
    for network in networks:
        for pp_size in sizes:
            if pp_size * virtual > network.sublayers:
                continue
            split = split_sublayers(network.sublayers, pp_size * virtual)
            single = _simulated(network, BlockRouting([network.sublayers], None, 1)).seconds
            standard = _simulated(network, BlockRouting(split, None, pp_size)).seconds
            for variant in VARIANTS:
                per_block = None if variant == "standard" else network.per_block
                routing = BlockRouting(split, per_block, pp_size, cache=variant.endswith("cache"))
                outcome = _simulated(network, routing)
                yield {
                    "part": "simulated",
                    "model": network.name,
                    "variant": variant,
                    "P": pp_size,
                    "V": virtual,
                    "ms": outcome.seconds * 1e3,
                    "of standard": outcome.seconds / standard,
                    "efficiency": single / pp_size / outcome.seconds,
                    "bubble": outcome.bubble,
                    "largest hop": max(routing.hop_units(), default=0),
                    "ms per sublayer": network.seconds * 1e3,
                    "link GB/s": network.link.bandwidth / 1e9,
                }


def _simulated(network: Network, routing: BlockRouting):
    def forward(stage: int) -> float:
        return len(routing.sublayers(stage)) * network.seconds

    return simulate(
        routing, network.microbatches, forward, lambda stage: 2 * forward(stage), network.unit_bytes, network.link
    )


def _in_processes(part: str, cases: Sequence[Case] | Sequence[SleepCase]) -> list[dict[str, Any]]:
    """Run the cases of one number of ranks in that many processes, one set for all of them."""
    ranks = cases[0].pp_size
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "cases.json"), Path(folder, "rows.json")
        request.write_text(json.dumps([asdict(case) for case in cases]))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, "-m", "bench.pipeline", f"work-{part}", str(request), str(answer)]
        subprocess.run(command, check=True)
        return json.loads(answer.read_text())


def _work(part: str, request: Path, answer: Path) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    cases = json.loads(request.read_text())
    if part == "measure":
        run_case(Case(**cases[0] | {"steps": 1}))  # what a process allocates once would count as the first case's
    for values in cases:
        row = run_case(Case(**values)) if part == "measure" else run_sleep_case(SleepCase(**values))
        rows.append(row)
        if dist.get_rank() == 0:
            said = (f"{key} {number(value) if isinstance(value, float) else value}" for key, value in row.items())
            print(", ".join(said), flush=True)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for pp_size in options.ranks or (2, 4):
        cases = [
            Case(variant, pp_size, virtual, wire, steps=options.steps)
            for virtual in options.virtual or (1, 2, 4)
            for variant in options.variant or VARIANTS
            for wire in options.wire or ("float32", "bfloat16")
        ]
        rows += _in_processes("measure", cases)
    return rows


def check_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for pp_size in options.ranks or (2, 4, 8):
        cases = [
            SleepCase(cache, pp_size, virtual, steps=options.steps)
            for virtual in options.virtual or (1, 2)
            for cache in (False, True)
        ]
        rows += _in_processes("check", cases)
    return rows


def simulate_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    virtual = (options.virtual or (2,))[0]
    torch.set_num_threads(1)
    networks = (measured_network(Case("block", 1, 1, "float32")), *NETWORKS)
    return list(simulated_rows(networks, options.ranks or (1, 2, 4, 8, 16, 32, 64), virtual))


COLUMNS = {
    "measure": ("variant", "pp_size", "virtual", "wire", "tokens/s", "ms", "spread", "bubble", "KiB per hop",
                "units per hop", "peak MiB", "cached sources"),
    "check": ("cache", "P", "V", "link MB/s", "ms real", "spread", "ms simulated", "real / simulated"),
    "simulate": ("model", "variant", "P", "V", "ms", "of standard", "efficiency", "bubble", "largest hop",
                 "ms per sublayer", "link GB/s"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].startswith("work-"):
        _work(arguments[0].removeprefix("work-"), Path(arguments[1]), Path(arguments[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=COLUMNS)
    parser.add_argument("--ranks", action="append", type=int)
    parser.add_argument("--virtual", action="append", type=int)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--wire", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--json", type=Path, help="write the table there, for bench.report")
    options = parser.parse_args(arguments)
    rows = {"measure": measure_rows, "check": check_rows, "simulate": simulate_rows}[options.part](options)
    columns = COLUMNS[options.part]
    cells = [[number(row[c]) if isinstance(row[c], float) else row[c] for c in columns] for row in rows]
    print(f"\n{environment.summary(environment.describe())}\n\n{markdown(columns, cells)}")
    environment.save(options.json, "pipeline", rows)


if __name__ == "__main__":
    main()
    end_process(0)
