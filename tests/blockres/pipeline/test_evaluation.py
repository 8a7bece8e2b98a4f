"""Forward-only passes before, between and after training steps, under every schedule."""

from contextlib import nullcontext

import pytest
import torch

from blockres.pipeline import evaluate
from tests.support.distributed import Check
from tests.support.pipeline import Case, Pipeline, batch_of, build, largest_error, loss_fn, reference, whole_model

SCHEDULES = {
    "GPipe": (3, 5),
    "1F1B": (3, 5),
    "Interleaved1F1B": (2, 3, 1, 2),
    "LoopedBFS": (2, 3, 1, 2),
    "InterleavedZeroBubble": (2, 3, 1, 2),
    "ZBVZeroBubble": (2, 3, 1, 2),
    "DualPipeV": (2, 3, 1, 2),
}


def pipelines(rank: int) -> list[Pipeline]:
    return [
        build(Case(name, 2, stages, 2, 4 if name == "DualPipeV" else 2, cache=cache), rank)
        for name, stages in SCHEDULES.items()
        for cache in (True, False)
    ]


def evaluation_and_training_take_turns(rank: int) -> None:
    for pipeline in pipelines(rank):
        loss, expected = reference(pipeline.case)
        _check_losses(pipeline, loss)
        for _ in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            pipeline.step()
            assert largest_error(pipeline.gradients(), expected) <= 1e-12, str(pipeline.case)
            before = {name: gradient.clone() for name, gradient in pipeline.gradients().items()}
            _check_losses(pipeline, loss)
            _check_losses(pipeline, loss)
            for name, gradient in pipeline.gradients().items():
                assert torch.equal(gradient, before[name]), "an evaluation must leave gradients alone"


def _check_losses(pipeline: Pipeline, expected: float) -> None:
    losses = pipeline.evaluate()
    assert len(pipeline.cache) == 0
    assert bool(losses) == any(stage.is_last for stage in pipeline.stages)
    if losses:
        assert len(losses) == pipeline.case.n_microbatches
        assert sum(losses) / len(losses) == pytest.approx(expected, rel=1e-12)
    for stage in pipeline.stages:
        assert not any(vars(stage._state).values()), "a forward-only pass leaves nothing behind"
        assert not stage.fwd_cache


def torchs_own_schedules_evaluate_in_a_loop(rank: int) -> None:
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        pipeline = build(Case(name, 2, SCHEDULES[name], 2, 4), rank, plain=True)
        loss, expected = reference(pipeline.case)
        _check_losses(pipeline, loss)
        pipeline.step()
        assert largest_error(pipeline.gradients(), expected) <= 1e-12, name
        _check_losses(pipeline, loss)
        assert largest_error(pipeline.gradients(), expected) <= 1e-12, "an evaluation must leave gradients alone"


def outputs_are_those_of_the_unsplit_model(rank: int) -> None:
    """Called in inference mode too, which an evaluation leaves."""
    for pipeline in pipelines(rank):
        inputs, _ = batch_of(pipeline.case)
        for guard in (nullcontext, torch.inference_mode):
            with guard():
                output = pipeline.schedule.eval(*((inputs,) if pipeline.stages[0].is_first else ()))
            if output is not None:
                expected = whole_model(pipeline.case)(inputs).detach()
                torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
                assert not output.requires_grad


def stages_run_without_a_schedule(rank: int) -> None:
    one, two = Case("GPipe", 4, (3, 5, 0, 2), 2, 8), Case("LoopedBFS", 4, (2, 3, 1, 2) * 2, 2, 8)
    for case in (one, two, two.but(cache=False), two.but(schedule="ZBVZeroBubble")):
        pipeline = build(case, rank)
        loss, _ = reference(case)
        inputs, target = batch_of(case)
        losses: list[torch.Tensor] = []
        args = (inputs,) if pipeline.stages[0].is_first else ()
        settings = {"target": target, "loss_fn": loss_fn, "losses": losses}
        assert evaluate(pipeline.stages, case.n_microbatches, *args, return_outputs=False, **settings) is None
        assert len(pipeline.cache) == 0
        if losses:
            assert torch.stack(losses).mean().item() == pytest.approx(loss, rel=1e-12)
        rank_peak = pipeline.cache.peak.entries
        assert rank_peak <= (case.routing.num_stages + 1) * case.routing.cache_entries(rank), "not all microbatches"


def one_rank_evaluates_all_stages(rank: int) -> None:
    case = Case("Interleaved1F1B", 1, (2, 0, 3), 2, 3)
    for run in (case, case.but(cache=False), case.but(schedule="GPipe", sublayers_per_stage=(5,))):
        pipeline = build(run, rank)
        loss, expected = reference(run)
        _check_losses(pipeline, loss)
        pipeline.step()
        assert largest_error(pipeline.gradients(), expected) <= 1e-12
        _check_losses(pipeline, loss)


CHECKS: dict[int, list[Check]] = {
    1: [one_rank_evaluates_all_stages],
    2: [
        evaluation_and_training_take_turns,
        torchs_own_schedules_evaluate_in_a_loop,
        outputs_are_those_of_the_unsplit_model,
    ],
    4: [stages_run_without_a_schedule],
}


def test_in_real_processes(check_name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[check_name], "\n".join(failures[check_name])
