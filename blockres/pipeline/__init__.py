"""Pipeline parallelism for a block residual stream, on `torch.distributed.pipelining`.

routing = BlockRouting(sublayers_per_stage, sublayers_per_block, pp_size, placement="loop")
cache = BlockCache()
stages = [BlockResStage(part, index, routing, device=…, cache=cache, microbatch_shape=(B, T, D), dtype=…) for …]
schedule = build_schedule("Interleaved1F1B", stages, n_microbatches, loss_fn)    # or one of PyTorch's own
schedule.step(inputs, target=targets, losses=losses)

Every batch may have another shape, in training and in evaluation. A batch padded on the right is cut to the longest row
of each microbatch by `schedule.step(inputs, target=targets, variable_seq_lengths=lengths, …)`.
"""

from blockres.pipeline.cache import BlockCache, CachePeak
from blockres.pipeline.routing import BlockRouting, split_sublayers
from blockres.pipeline.schedules import SCHEDULES, build_schedule, check_schedule, evaluate, schedule_placement
from blockres.pipeline.stage import BlockResStage
from blockres.pipeline.wire import Traffic

__all__ = [
    "SCHEDULES",
    "BlockCache",
    "BlockResStage",
    "BlockRouting",
    "CachePeak",
    "Traffic",
    "build_schedule",
    "check_schedule",
    "evaluate",
    "schedule_placement",
    "split_sublayers",
]
