"""A tiny model on a block residual stream, whole and in stages, and what a rank needs to run it in a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockres.modules import BlockAttnRes
from blockres.pipeline import BlockCache, BlockResStage, BlockRouting, Traffic, build_schedule, schedule_placement

VOCABULARY = 11
TALLY_SHAPE = (2,)


@dataclass(frozen=True)
class Case:
    """A pipelined run: the model's split, the schedule, and the settings of the wire."""

    schedule: str
    pp_size: int
    sublayers_per_stage: tuple[int, ...]
    sublayers_per_block: int | None
    n_microbatches: int
    cache: bool = True
    dtype: torch.dtype = torch.float64
    pipeline_dtype: torch.dtype | None = None
    shape: tuple[int, int, int] = (2, 3, 5)
    model: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def routing(self) -> BlockRouting:
        placement = schedule_placement(self.schedule)
        return BlockRouting(
            self.sublayers_per_stage, self.sublayers_per_block, self.pp_size, placement, cache=self.cache
        )

    @property
    def batch(self) -> int:
        return self.shape[0] * self.n_microbatches

    @property
    def unsplit(self) -> "Case":
        """The same model and batch on one rank: equal for all splits of them."""
        whole = (sum(self.sublayers_per_stage),)
        return self.but(schedule="GPipe", pp_size=1, sublayers_per_stage=whole, cache=True, pipeline_dtype=self.dtype)

    def but(self, **changes: Any) -> "Case":
        return replace(self, **changes)

    def __str__(self) -> str:
        virtual = len(self.sublayers_per_stage) // self.pp_size
        stages = "".join(map(str, self.sublayers_per_stage))
        return (
            f"{self.schedule} P{self.pp_size} V{virtual} M{self.n_microbatches} S{self.sublayers_per_block} "
            f"[{stages}] {'cached' if self.cache else 'uncached'}"
        )


class ToyPart(nn.Module):
    """Sublayers `start … stop - 1` of a model; the whole of it when `first` and `last`."""

    def __init__(
        self,
        case: Case,
        start: int,
        stop: int,
        *,
        first: bool,
        last: bool,
        views: bool = False,
        strided: bool = False,
        frozen_below: int = 0,
        autocast: torch.dtype | None = None,
        causal: bool = False,
        tally: bool = False,
    ) -> None:
        super().__init__()
        total, dim = sum(case.sublayers_per_stage), case.shape[-1]
        self.views, self.strided, self.autocast, self.causal = views, strided, autocast, causal
        self.tally = tally
        self.embedding = nn.Embedding(VOCABULARY, dim) if first else None
        self.sublayers = nn.ModuleDict({str(l): nn.Linear(dim, dim) for l in range(start, stop)})
        self.residual = BlockAttnRes(dim, total, case.sublayers_per_block, start=start, stop=stop, final=last)
        self.head = nn.Linear(dim, VOCABULARY) if last else None
        self.to(case.dtype)
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()) + 7)
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(case.dtype) / 2
            parameter.requires_grad_(_depth(name) >= frozen_below)

    def forward(
        self,
        inputs: Tensor | Sequence[Tensor],
        partial: Tensor | None = None,
        tally: Tensor | None = None,
        *,
        shift: Tensor | None = None,
    ) -> Any:
        """`shift` [B, T] is added to what each sublayer reads."""
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            return self._run(inputs, partial, tally, shift)

    def _run(
        self,
        inputs: Tensor | Sequence[Tensor],
        partial: Tensor | None,
        tally: Tensor | None,
        shift: Tensor | None,
    ) -> Any:
        sums = torch.zeros(TALLY_SHAPE) if tally is None else tally
        if self.embedding is not None:
            stream = self.residual.stream(self.embedding(inputs))
        else:
            stream = self.residual.stream(sources=inputs, partial=partial)
        for sublayer in self.sublayers.values():
            h = stream.read() if shift is None else stream.read() + shift[..., None]
            stream.write(torch.tanh(sublayer(h.cumsum(1) if self.causal else h)))
            if self.tally:
                sums = sums + torch.stack([h.mean(), h.square().mean()]).float()
        if self.head is not None:
            logits = self.head(stream.read())
            return (logits, sums[None]) if self.tally else logits
        sources, partial = stream.state()
        came_in = 0 if self.embedding is not None else len(inputs)
        new = [self._disguise(source) for source in sources[came_in:]]
        state = (*sources[:came_in], *new), None if partial is None else self._disguise(partial)
        return (*state, sums) if self.tally else state

    def _disguise(self, tensor: Tensor) -> Tensor:
        """The same values as a view, or with strides that are not contiguous."""
        if self.strided:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        return tensor[:] if self.views else tensor


def _depth(name: str) -> int:
    """Where in the model a parameter is: 0 for the embedding, 1 + l for sublayer l, and past all for the head."""
    if name.startswith("embedding"):
        return 0
    digits = [piece for piece in name.split(".") if piece.isdigit()]
    return 1 + int(digits[0]) if digits else 10_000


def loss_fn(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross-entropy; with a tally, plus a product of what all layers have added to it."""
    if isinstance(output, tuple):
        logits, sums = output
        return loss_fn(logits, target) + sums.prod()
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, case.batch, case.shape[1]), generator=generator)
    return tokens[0], tokens[1]


def whole_model(case: Case) -> ToyPart:
    return ToyPart(case, 0, sum(case.sublayers_per_stage), first=True, last=True, **case.model)


def reference(case: Case, seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and all gradients of the unsplit model; by the name of the parameter. Not to be written to."""
    return _reference(case.unsplit, seed)


@lru_cache
def _reference(case: Case, seed: int) -> tuple[float, dict[str, Tensor]]:
    model = whole_model(case)
    inputs, target = batch_of(case, seed)
    microbatches = zip(inputs.chunk(case.n_microbatches), target.chunk(case.n_microbatches), strict=True)
    losses = [loss_fn(model(i), t) for i, t in microbatches]
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@dataclass
class Pipeline:
    """One rank's side of a case."""

    case: Case
    stages: list[BlockResStage]
    schedule: Any
    cache: BlockCache
    loss_fn: Callable[..., Tensor] = loss_fn

    def step(self, seed: int = 0, **options: Any) -> list[float]:
        """A training step; the losses where the last stage is."""
        inputs, target = batch_of(self.case, seed)
        losses: list[Tensor] = []
        args = (inputs,) if self.stages[0].is_first else ()
        self.schedule.step(*args, target=target, losses=losses, return_outputs=False, **options)
        return [loss.item() for loss in losses]

    def evaluate(self, seed: int = 0) -> list[float]:
        inputs, target = batch_of(self.case, seed)
        losses: list[Tensor] = []
        args = (inputs,) if self.stages[0].is_first else ()
        self.schedule.eval(*args, target=target, losses=losses, return_outputs=False)
        return [loss.item() for loss in losses]

    def zero_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        named = [pair for stage in self.stages for pair in stage.submod.named_parameters()]
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def traffic(self) -> Traffic:
        return sum((stage.traffic() for stage in self.stages), Traffic())

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]


def build(
    case: Case, rank: int, group: dist.ProcessGroup | None = None, *, plain: bool = False, **options: Any
) -> Pipeline:
    """The stages of a rank and their schedule; `plain` takes PyTorch's own schedule class."""
    routing, cache = case.routing, BlockCache()
    stages = [
        BlockResStage(
            _part(case, index),
            index,
            routing,
            device="cpu",
            cache=cache,
            microbatch_shape=case.shape,
            dtype=case.dtype,
            pipeline_dtype=case.pipeline_dtype,
            group=group,
            tally_shape=TALLY_SHAPE if case.model.get("tally") else None,
            **options,
        )
        for index in routing.stages_of(rank)
    ]
    return Pipeline(case, stages, _schedule(case, stages, plain), cache)


def _part(case: Case, index: int) -> ToyPart:
    run = case.routing.sublayers(index)
    return ToyPart(case, run.start, run.stop, first=index == 0, last=index == case.routing.num_stages - 1, **case.model)


def _schedule(case: Case, stages: list[BlockResStage], plain: bool) -> Any:
    if not plain:
        return build_schedule(case.schedule, stages, case.n_microbatches, loss_fn)
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    schedule_class = get_schedule_class(case.schedule)
    first = stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else stages
    return schedule_class(first, case.n_microbatches, loss_fn)


def largest_error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of any parameter's gradient; NaN where one is NaN, which `max` might pass over."""
    errors = [_error(gradients[name], expected[name]) for name in gradients]
    return torch.tensor([0.0, *errors], dtype=torch.float64).max().item()


def _error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


class _WatchedWork:
    """A work handle that remembers whether anybody waited for it."""

    def __init__(self, work: dist.Work) -> None:
        self._work, self.waited = work, False

    def wait(self, *args: Any) -> Any:
        self.waited = True
        return self._work.wait(*args)

    def is_completed(self) -> bool:
        return self._work.is_completed()


@dataclass
class Sent:
    """A message handed to `isend`: its content, where it lay in memory, in which group, and its handle."""

    content: Tensor
    address: int
    group: dist.ProcessGroup | None
    work: _WatchedWork

    @property
    def is_header(self) -> bool:
        return self.content.dtype == torch.int64

    @property
    def is_payload(self) -> bool:
        return self.content.is_floating_point()


@contextmanager
def sent_messages(change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[list[Sent]]:
    """While it lasts, records every call of `torch.distributed.isend` in this process; `change` may tamper with it."""
    module, original = dist.distributed_c10d, dist.isend
    sent: list[Sent] = []

    def recording(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, **peer: Any) -> _WatchedWork:
        work = _WatchedWork(original(change(tensor), dst, group, tag, **peer))
        sent.append(Sent(tensor.clone(), tensor.data_ptr(), group, work))
        return work

    dist.isend = module.isend = recording
    try:
        yield sent
    finally:
        dist.isend = module.isend = original
