"""What `BlockResStage` and its schedules rely on in PyTorch's pipelining engine, checked on import.

Some of these members are private to PyTorch, so another version may have moved them. Then the import fails and says
what is missing, where a run would hang or train on wrong gradients.
"""

import dis
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

TESTED_TORCH = "2.13.x to 2.14.x"

# The methods of a stage that are overridden or called, with their parameters after `self`.
METHODS = {
    "_warmup_forward_vote": ("has_backward", "received_acc"),
    "_setup_forward_recv_info": ("num_microbatches", "has_backward"),
    "_create_grad_recv_info": ("act_send_info",),
    "_retrieve_recv_grads": ("bwd_chunk_id",),
    "forward_maybe_with_nosync": ("args", "kwargs"),
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs", "save_forward_output"),
    "backward_one_chunk": ("bwd_chunk_id", "loss", "full_backward", "last_backward"),
    "backward_maybe_with_nosync": ("backward_type", "bwd_kwargs", "last_backward"),
    "backward_weight_one_chunk": ("bwd_chunk_id", "last_backward"),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "get_local_bwd_output": ("mb_index",),
    "set_local_fwd_input": ("prev_stage_outputs", "mb_index"),
    "set_local_bwd_input": ("next_stage_bwd_outputs", "mb_index"),
    "clear_runtime_states": (),
    "perform_reduce_grad": ("grad_scale_factor",),
}

# What a stage's constructors assign.
ATTRIBUTES = (
    "submod",
    "stage_index",
    "num_stages",
    "device",
    "group",
    "group_rank",
    "group_size",
    "has_backward",
    "stage_index_to_group_rank",
    "args_recv_info",
    "output_chunks",
    "fwd_cache",
    "bwd_cache",
    "backward_state",
    "dw_runner",
    "_runtime_validate",
    "_stage_meta",
)

# The methods of a schedule that are overridden.
SCHEDULE_METHODS = {
    "_step_microbatches": ("arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs", "loss_kwargs"),
    "_merge_outputs": ("output_chunks",),
}

# What a failed step leaves in a schedule (the receives only in those with several stages per rank).
SCHEDULE_STATE = ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops")


def check_engine(stage_class: type = PipelineStage, schedule_class: type = ScheduleInterleaved1F1B) -> None:
    """Raise ImportError where the engine lacks a member that blockres overrides, or has it with other parameters."""
    complaints = [
        complaint
        for owner, methods in ((stage_class, METHODS), (schedule_class, SCHEDULE_METHODS))
        for name, parameters in methods.items()
        if (complaint := _complaint(owner, name, parameters))
    ]
    for owner, names in ((stage_class, ATTRIBUTES), (schedule_class, SCHEDULE_STATE)):
        assigned = _assigned_by_constructors(owner)
        complaints += [f"{owner.__name__} has no {name}" for name in names if name not in assigned]
    if complaints:
        raise ImportError(
            f"blockres.pipeline is tested with torch {TESTED_TORCH} and cannot use the pipelining engine of torch "
            f"{torch.__version__}: {'; '.join(complaints)}. Install a tested torch; the rest of blockres works without."
        )


def _assigned_by_constructors(owner: type) -> set[str]:
    constructors = [vars(base).get("__init__") for base in owner.__mro__]
    return {
        instruction.argval
        for constructor in constructors
        if inspect.isfunction(constructor)
        for instruction in dis.get_instructions(constructor)
        if instruction.opname == "STORE_ATTR"
    }


def _complaint(owner: type, name: str, expected: tuple[str, ...]) -> str | None:
    method = getattr(owner, name, None)
    if method is None:
        return f"{owner.__name__}.{name} is missing"
    parameters = tuple(inspect.signature(method).parameters)[1:]
    if parameters != expected:
        return f"{owner.__name__}.{name} takes {parameters}, expected {expected}"
    return None


@contextmanager
def quiet_schedule_tables() -> Iterator[None]:
    """While it lasts, the engine does not log all actions of a schedule as an error, unless its logger is set to DEBUG.

    It does so whenever an action raises, in hundreds of lines that bury the exception. The line that names the action
    stays.
    """
    logger = logging.getLogger(ScheduleInterleaved1F1B.__module__)

    def is_short(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "\n" not in record.getMessage() or logger.isEnabledFor(logging.DEBUG)

    logger.addFilter(is_short)
    try:
        yield
    finally:
        logger.removeFilter(is_short)
