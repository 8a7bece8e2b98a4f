"""The command's flags."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from blockres.models.gpt import GPTConfig
from blockres.pipeline import check_schedule

Model = Literal["gpt", "gpt2", "llama", "qwen3", "mixtral"]
Dtype = Literal["float64", "float32", "bfloat16"]
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


SPLIT_BACKWARD: tuple[Schedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""The schedules that compute the gradients of weights apart from those of inputs."""

NEWEST = Path("newest")
"""As the checkpoint to resume from: the newest that the run's directory has."""

UNUSED: Mapping[Model, tuple[str, ...]] = MappingProxyType(
    {
        "gpt": (),
        "gpt2": ("tie_weights", "compile", "num_kv_heads", "rope_theta"),
        "llama": ("tie_weights", "compile"),
        "qwen3": ("tie_weights", "compile"),
        "mixtral": ("tie_weights", "compile"),
    }
)
"""The flags that mean nothing to a model."""

RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            "steps", "eval_interval", "checkpoint_interval", "keep_checkpoints", "eval_batches", "num_threads",
            "sequence_length", "batch_size", "dp_size", "virtual_stages", "num_microbatches",
        ),
    ),
    ("at least 0", lambda value: value >= 0, ("warmup_steps",)),
    ("at least 0 and less than 2**63", lambda value: 0 <= value < 2**63, ("seed",)),
    ("at least 0 and finite", lambda value: 0 <= value < math.inf, ("min_learning_rate", "weight_decay")),
    ("at least 0 and less than 1", lambda value: 0 <= value < 1, ("beta1", "beta2")),
    ("greater than 0 and less than 1", lambda value: 0 < value < 1, ("validation_fraction",)),
    ("greater than 0 and finite", lambda value: 0 < value < math.inf, ("learning_rate", "norm_eps", "rope_theta")),
    ("greater than 0", lambda value: value > 0, ("clip_norm",)),
    ("greater than 0 and at most 1e9", lambda value: 0 < value <= 1e9, ("timeout",)),
)  # fmt: skip
"""What numbers are allowed, in words and as a test that nan fails, and for which flags. `GPTConfig` checks sizes."""


def flag(name: str) -> str:
    """As it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def _resume_from(words: list[str]) -> Path:
    if len(words) > 1:
        raise ValueError(f"--resume takes one checkpoint at most, got {' '.join(words)}")
    return Path(words[0]) if words else NEWEST


_OPTIONAL_CHECKPOINT = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[CHECKPOINT]",
    instance_from_str=_resume_from,
    is_instance=lambda value: value is None or isinstance(value, Path),
    str_from_instance=lambda value: [] if value is None else [str(value)],
)


@dataclass(frozen=True)
class DataFlags:
    """The text and how it is cut.

    Args:
        data: a text file, read as bytes, or a .bin file of uint16 tokens; by default the prose of Python's own help
            topics.
        sequence_length: tokens in a sequence.
        batch_size: sequences in a step, over all data-parallel replicas and microbatches.
        validation_fraction: share of the data, at its end, that is held out.
        eval_batches: validation batches that an evaluation reads; all by default.
    """

    data: Path | None = None
    sequence_length: int = 256
    batch_size: int = 16
    validation_fraction: float = 0.1
    eval_batches: int | None = None


@dataclass(frozen=True)
class ParallelFlags:
    """How the model is spread over processes. The pipeline has (number of processes / dp_size) ranks.

    Args:
        dp_size: data-parallel replicas of the pipeline. Each has its share of a batch, of every parameter and of the
            optimizer's state (FSDP2), and puts a stage's parameters together while it runs.
        virtual_stages: pipeline stages on each rank; 1 for GPipe and 1F1B.
        schedule: the pipeline schedule of torch.distributed.pipelining.
        num_microbatches: parts that a replica's batch is cut into.
        pipeline_dtype: of what travels between ranks; by default that of --dtype.
        cache: keep received blocks on each rank and send only new ones; --no-cache sends everything at every hop.
    """

    dp_size: int = 1
    virtual_stages: int = 2
    schedule: Schedule = "Interleaved1F1B"
    num_microbatches: int = 4
    pipeline_dtype: Dtype | None = None
    cache: bool = True


@dataclass(frozen=True)
class OptimizerFlags:
    """AdamW with linear warm-up and cosine decay.

    Args:
        learning_rate: the highest, reached after the warm-up.
        min_learning_rate: the last, at the end of the decay.
        warmup_steps: steps of the warm-up; a run that has no more steps ends in it.
        weight_decay: of matrices; vectors (norms, queries, key weights) have none.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        clip_norm: the gradient over all stages is scaled down to this norm where it is longer; inf leaves it.
    """

    learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0


@dataclass(frozen=True)
class RunFlags:
    """The run itself.

    Args:
        model: gpt is the built-in one; the others are models of transformers (pip install 'blockres[hf]') of the same
            shape, with random weights. gpt2 has neither --num-kv-heads nor --rope-theta; mixtral has 4 experts of that
            shape in each layer, of which each token takes 2.
        steps: optimizer steps.
        eval_interval: steps between evaluations; one more follows the last step.
        checkpoint_interval: steps between checkpoints; there is one after the last step in any case, and where SIGTERM
            or Ctrl-C end the run.
        keep_checkpoints: how many of a run's checkpoints stay, the newest ones; all by default.
        resume: go on from this checkpoint or the newest of this run's directory; without a value from the newest in
            --out, if there is one yet.
        out: directory of metrics, plots and checkpoints.
        seed: of the initial values and of the order of the data.
        device: cpu or cuda; by default cuda where there is a GPU.
        dtype: of the residual stream and the matrix products; parameters are at least float32.
        activation_checkpointing: keep no activations inside of sublayers, compute them again in the backward.
        compile: compile every sublayer with torch.compile; not with the zero-bubble schedules and DualPipeV.
        nan_policy: what follows a loss or gradient that is not finite: stop, or skip (leave the step out and go on).
        num_threads: CPU threads of each process; by default the machine's cores, shared evenly.
        timeout: seconds that a rank waits for another before it gives up.
    """

    model: Model = "gpt"
    steps: int = 200
    eval_interval: int = 50
    checkpoint_interval: int | None = None
    keep_checkpoints: int | None = None
    resume: Annotated[Path | None, _OPTIONAL_CHECKPOINT, tyro.conf.arg(help_behavior_hint="(default: begin anew)")] = (
        None
    )
    out: Path = Path("runs/blockres")
    seed: int = 0
    device: Literal["cpu", "cuda"] | None = None
    dtype: Dtype = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    nan_policy: Literal["stop", "skip"] = "stop"
    num_threads: int | None = None
    timeout: float = 300.0


@dataclass(frozen=True)
class TrainConfig:
    """Train a small language model with Block Attention Residuals over a pipeline of processes.

    Start it with `torchrun --standalone --nproc-per-node N -m blockres.train`, or as one process without torchrun.
    """

    run: RunFlags = field(default_factory=RunFlags)
    data: DataFlags = field(default_factory=DataFlags)
    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)

    def flags(self) -> dict[str, Any]:
        """All flags by name, as JSON can carry them."""
        groups = dataclasses.asdict(self).values()
        flat = {name: value for group in groups for name, value in group.items()}
        return {name: str(value) if isinstance(value, Path) else value for name, value in flat.items()}

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.run.dtype)

    @property
    def pipeline_dtype(self) -> torch.dtype:
        return getattr(torch, self.parallel.pipeline_dtype or self.run.dtype)

    def check(self, world_size: int) -> None:
        """Refuse what cannot work with `world_size` processes, before anything is built.

        Raises:
            ValueError: with the flags at fault and values that would work.
        """
        self._check_ranges()
        self._check_model()
        self._check_all_is_used()
        if world_size % self.parallel.dp_size:
            divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            raise ValueError(
                f"--dp-size must divide the number of processes, got {self.parallel.dp_size} and {world_size}; "
                f"{' or '.join(divisors)} would do"
            )
        pp_size, stages_per_rank = world_size // self.parallel.dp_size, self.parallel.virtual_stages
        check_schedule(self.parallel.schedule, pp_size, stages_per_rank, self.parallel.num_microbatches)
        num_stages = pp_size * stages_per_rank
        if num_stages > self.model.num_sublayers:
            raise ValueError(
                f"{num_stages} pipeline stages (ranks × --virtual-stages) need as many sublayers at least, the model "
                f"has {self.model.num_sublayers}: lower --virtual-stages, or use --num-layers {-(-num_stages // 2)} or "
                f"more (a layer is two sublayers)"
            )
        if self.run.compile and self.parallel.schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"--compile does not go with --schedule {self.parallel.schedule}, which runs a backward in two halves: "
                f"a compiled one runs once. Use Interleaved1F1B, or leave out --compile"
            )
        pieces = self.parallel.dp_size * self.parallel.num_microbatches
        if self.data.batch_size % pieces:
            raise ValueError(
                f"--batch-size must be a multiple of --dp-size × --num-microbatches = {pieces}, "
                f"got {self.data.batch_size}; {-(-self.data.batch_size // pieces) * pieces} would do"
            )

    def _check_ranges(self) -> None:
        flags = self.flags()
        for allowed, is_allowed, names in RANGES:
            for name in names:
                if flags[name] is not None and not is_allowed(flags[name]):
                    raise ValueError(f"{flag(name)} must be {allowed}, got {flags[name]}")

        if flags["min_learning_rate"] > flags["learning_rate"]:
            raise ValueError(
                f"--min-learning-rate must be at most --learning-rate, got {flags['min_learning_rate']} and "
                f"{flags['learning_rate']}"
            )

    def _check_model(self) -> None:
        name = self.run.model
        if name == "gpt":
            return
        if find_spec("transformers") is None:
            raise ValueError(f"--model {name} is built by transformers, which is missing: pip install 'blockres[hf]'")

    def _check_all_is_used(self) -> None:
        """Refuse what would be left aside in silence: flags that mean nothing here and are not at their defaults."""
        unused = dict.fromkeys(UNUSED[self.run.model], f"--model {self.run.model}")
        if self.model.residual != "block":
            unused["sublayers_per_block"] = f"--residual {self.model.residual}"
        flags, defaults = self.flags(), TrainConfig().flags()
        for name, where in unused.items():
            allowed, way_out = [defaults[name]], "leave it out"
            if name == "num_kv_heads":  # all heads is the truth, and what another number of heads may need here
                allowed, way_out = [*allowed, self.model.num_heads], "leave it out, or give as many as --num-heads"
            if flags[name] not in allowed:
                raise ValueError(f"{flag(name)} means nothing with {where}: {way_out}")


def parse(arguments: Sequence[str] | None) -> TrainConfig:
    """The flags on a command line, by default on this process'.

    Raises:
        ValueError: where a value is refused as it is read.
        SystemExit: after the help, or after a message on what cannot be read.
    """
    return tyro.cli(TrainConfig, prog="python -m blockres.train", args=arguments, config=(tyro.conf.OmitArgPrefixes,))
