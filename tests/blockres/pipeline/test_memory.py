"""Memory during and after steps, counted by weak references to storages in real processes."""

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from bench.live import LiveStorages, memory_of, of_size
from blockres.pipeline import BlockCache
from tests.support.distributed import Check
from tests.support.pipeline import Case, Pipeline, build

LOOP = Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4, shape=(2, 3, 7))  # no parameter has the size of a source
CASES = [
    LOOP,
    LOOP.but(sublayers_per_stage=(4, 4), schedule="GPipe"),
    LOOP.but(sublayers_per_stage=(4, 4), schedule="1F1B"),
    LOOP.but(schedule="LoopedBFS"),
    LOOP.but(schedule="InterleavedZeroBubble"),
    LOOP.but(schedule="ZBVZeroBubble"),
    LOOP.but(schedule="DualPipeV", n_microbatches=7),
]


@contextmanager
def without_collector() -> Iterator[None]:
    """What is dead is so by its reference count, not because a collection happened to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bytes_of_source(case: Case) -> int:
    return torch.Size(case.shape).numel() * case.dtype.itemsize


def nothing_remains_after_a_step(rank: int) -> None:
    narrow_wire = LOOP.but(dtype=torch.float32, pipeline_dtype=torch.bfloat16)
    for case in [*CASES, LOOP.but(cache=False), narrow_wire]:
        pipeline = build(case, rank)
        with without_collector(), LiveStorages(of_size(bytes_of_source(case))) as live:
            for step in (pipeline.step, pipeline.evaluate):
                step()
                assert live.peak > 0
                assert live.count() == 0, f"{case}: {live.count()} tensors of the stream are alive after {step}"
                assert len(pipeline.cache) == 0


def forwards_of(pipeline: Pipeline) -> list[tuple[int, int]]:
    """The (stage, microbatch) forwards of this rank, in the order of its schedule."""
    schedule = pipeline.schedule
    if not hasattr(schedule, "pipeline_order_with_comms"):
        return [(pipeline.stages[0].stage_index, microbatch) for microbatch in range(pipeline.case.n_microbatches)]
    actions = schedule.pipeline_order_with_comms[schedule.rank]
    flat = [sub for action in actions for sub in (action.sub_actions or (action,))]
    return [
        (action.stage_index, action.microbatch_index) for action in flat if action.computation_type.name == "FORWARD"
    ]


def the_cache_peaks_where_the_routing_says(rank: int) -> None:
    for case in [*CASES, LOOP.but(sublayers_per_stage=(2, 0, 1, 3, 1, 1), sublayers_per_block=1)]:
        pipeline = build(case, rank)
        pipeline.step()
        peak = pipeline.cache.peak
        assert peak.entries == case.routing.cache_peak(rank, forwards_of(pipeline)), str(case)
        assert peak.bytes == peak.entries * bytes_of_source(case)
        assert peak.deposits <= case.n_microbatches * case.routing.cache_entries(rank)


class WatchingCache(BlockCache):
    """Checks, whenever it is used, that the sources of microbatches that are over have no memory left."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, list[weakref.ref]] = defaultdict(list)
        self.ended: Counter[int] = Counter()
        self.stages = 0
        self.checked = 0

    def watch(self, pipeline: Pipeline) -> None:
        """Be the cache of a pipeline's stages, and count their whole backwards and second halves by microbatch."""
        self.stages = len(pipeline.stages)
        for stage in pipeline.stages:
            stage.cache = self
            stage.backward_one_chunk = partial(self._backward, stage.backward_one_chunk)
            stage.backward_weight_one_chunk = partial(self._backward_weight, stage.backward_weight_one_chunk)

    def put(self, microbatch: int, source: int, tensor: Tensor) -> None:
        self.check()
        self.memory[microbatch].append(memory_of(tensor))
        super().put(microbatch, source, tensor)

    def deposit(self, microbatch: int, source: int, gradient: Tensor | None) -> None:
        self.check()
        super().deposit(microbatch, source, gradient)

    def _backward(self, run: Callable[..., None], microbatch: int, *args: object, **settings: object) -> None:
        run(microbatch, *args, **settings)
        self.ended[microbatch] += settings.get("full_backward", True) is True
        self.check()

    def _backward_weight(self, run: Callable[..., None], microbatch: int, *args: object, **settings: object) -> None:
        run(microbatch, *args, **settings)
        self.ended[microbatch] += 1
        self.check()

    def check(self) -> None:
        for microbatch in [found for found, times in self.ended.items() if times == self.stages]:
            self.checked += len(self.memory[microbatch])
            assert all(reference() is None for reference in self.memory[microbatch]), f"microbatch {microbatch} is over"


def a_source_goes_when_its_last_user_is_done(rank: int) -> None:
    for case in CASES:
        pipeline, cache = build(case, rank), WatchingCache()
        cache.watch(pipeline)
        with without_collector():
            pipeline.step()
        assert set(cache.ended.values()) == {cache.stages}
        assert (cache.checked > 0) == (len(pipeline.stages) > 1), str(case)


def what_is_sent_and_not_kept_goes_before_backward(rank: int) -> None:
    """Blocks that the rank's last stage completes: nobody here reads them again."""
    case = LOOP.but(schedule="LoopedBFS", sublayers_per_stage=(2, 2, 2, 2), n_microbatches=6)
    pipeline = build(case, rank)
    stage = pipeline.stages[-1]
    sent: list[weakref.ref] = []
    stage.submod.register_forward_hook(partial(_watch_new_block, sent))
    with without_collector():
        pipeline.step()
    assert len(sent) == (0 if stage.is_last else 6)


def _watch_new_block(sent: list[weakref.ref], module: nn.Module, args: object, output: object) -> None:
    if isinstance(output, tuple):
        assert all(reference() is None for reference in sent[:-1]), "only the latest may still be on its way"
        sent.append(memory_of(output[0][-1]))


def wire_buffers_live_from_post_to_use(rank: int) -> None:
    """With bfloat16 on the wire of a float32 model, every bfloat16 tensor is a receive buffer or a wire copy."""
    for case in CASES[3:6]:
        pipeline = build(case.but(dtype=torch.float32, pipeline_dtype=torch.bfloat16, n_microbatches=6), rank)
        with without_collector(), LiveStorages(lambda tensor: tensor.dtype == torch.bfloat16) as live:
            pipeline.step()
            assert live.count() == 0
        assert 0 < live.peak <= _most_receives_at_once(pipeline) + 2 * len(pipeline.stages), str(case)


def _most_receives_at_once(pipeline: Pipeline) -> int:
    schedule = pipeline.schedule
    posted = peak = 0
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        for sub in action.sub_actions or (action,):
            posted += _receives(pipeline, sub.computation_type.name, sub.stage_index)
            peak = max(peak, posted)
    return peak


def _receives(pipeline: Pipeline, kind: str, stage: int) -> int:
    """1 where an action posts a receive, -1 where it uses what came in."""
    if kind in ("RECV_F", "RECV_B"):
        return 1
    uses_forward = kind == "FORWARD" and _comes_in(pipeline, stage)
    uses_backward = kind in ("FULL_BACKWARD", "BACKWARD_INPUT") and _comes_in(pipeline, stage + 1)
    return -1 if uses_forward or uses_backward else 0


def _comes_in(pipeline: Pipeline, stage: int) -> bool:
    routing = pipeline.case.routing
    return 0 < stage < routing.num_stages and not routing.is_local(stage - 1)


def an_evaluation_holds_as_much_for_many_microbatches_and_in_inference_mode(rank: int) -> None:
    for case in (LOOP, LOOP.but(schedule="ZBVZeroBubble"), LOOP.but(cache=False)):
        peaks = []
        for microbatches, inference in ((4, False), (8, False), (4, True)):
            pipeline = build(case.but(n_microbatches=microbatches), rank)
            live = LiveStorages(lambda x: x.untyped_storage().nbytes() >= bytes_of_source(case))  # noqa: B023
            with without_collector(), torch.inference_mode(inference), live:
                pipeline.evaluate()
            peaks.append((live.peak, pipeline.cache.peak.entries))
        assert peaks[0] == peaks[1] == peaks[2], str(case)


CHECKS: dict[int, list[Check]] = {
    2: [
        nothing_remains_after_a_step,
        the_cache_peaks_where_the_routing_says,
        a_source_goes_when_its_last_user_is_done,
        what_is_sent_and_not_kept_goes_before_backward,
        wire_buffers_live_from_post_to_use,
        an_evaluation_holds_as_much_for_many_microbatches_and_in_inference_mode,
    ]
}


def test_in_real_processes(check_name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[check_name], "\n".join(failures[check_name])
