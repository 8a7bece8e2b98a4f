"""Hugging Face models cut into pipeline stages, in real processes, against the unsplit models."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockres.models import Family, Sublayer, apply_attn_res, causal_lm_loss, pipeline_part, remove_attn_res
from blockres.pipeline import BlockCache, BlockResStage, BlockRouting, build_schedule, schedule_placement
from tests.support.distributed import run_all_well
from tests.support.huggingface import causal_lm, disturb, tokens
from tests.support.numerics import relative_error

BATCH, LENGTH, MICROBATCHES = 8, 9, 4
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
BOUND = 1e-10


@dataclass(frozen=True)
class Run:
    """A tiny model of a family on two ranks; of 3 layers, hence 6 sublayers, so that odd cuts are within a layer."""

    family: str
    split: tuple[int, ...]
    sublayers_per_block: int | None = 4
    schedule: str = "Interleaved1F1B"
    balanced: bool = False
    masked: bool = False

    @property
    def routing(self) -> BlockRouting:
        placement = schedule_placement(self.schedule)
        return BlockRouting(self.split, self.sublayers_per_block, 2, placement)

    def model(self) -> nn.Module:
        torch.manual_seed(17)  # the same on all ranks
        changes = BALANCED if self.balanced else {}
        model = causal_lm(self.family, tie_word_embeddings=False, **changes).double()
        apply_attn_res(model, self.sublayers_per_block)
        disturb(model.base_model.attn_res)
        return model

    def batch(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        inputs, targets = tokens(BATCH, LENGTH), tokens(BATCH, LENGTH)
        if not self.masked:
            return inputs, targets, {}
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[::3, :4] = 0
        return inputs, targets, {"attention_mask": mask}


RUNS = [
    Run("gpt2", (1, 2, 1, 2)),
    Run("llama", (1, 2, 1, 2)),
    Run("qwen3", (3, 0, 1, 2), 3),
    Run("mixtral", (1, 2, 1, 2), balanced=True),
    Run("mixtral", (2, 1, 2, 1), 1, balanced=True, masked=True),
    Run("mixtral", (3, 1, 0, 2), schedule="ZBVZeroBubble", balanced=True),
    Run("qwen3_moe", (1, 3, 2, 0), 2, balanced=True),
    Run("mixtral", (2, 1, 1, 2)),
    Run("llama", (1, 2, 1, 2), None),
]


def errors_of_rank(rank: int) -> Iterator[tuple[Run, dict[str, float], list[float], float]]:
    """For each run the errors of the rank's gradients, the losses where they are known, and the unsplit model's."""
    for run in RUNS:
        model = run.model()
        batch = run.batch()
        loss, expected = _unsplit(copy.deepcopy(model), batch)
        schedule, parts = _pipeline(run, model, rank)
        losses: list[Tensor] = []
        inputs, targets, masks = batch
        schedule.step(*[inputs] if rank == 0 else [], target=targets, losses=losses, **masks)
        named = [pair for part in parts for pair in part.named_parameters()]
        errors = {name: relative_error(parameter.grad, expected[name]) for name, parameter in named}
        yield run, errors, [each.item() for each in losses], loss


def _unsplit(model: nn.Module, batch: tuple[Tensor, Tensor, dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    inputs, targets, masks = batch
    losses = []
    for number, ids in enumerate(inputs.chunk(MICROBATCHES)):
        own = {name: mask.chunk(MICROBATCHES)[number] for name, mask in masks.items()}
        out = model(ids, use_cache=False, **own)
        loss = causal_lm_loss(out.logits, targets.chunk(MICROBATCHES)[number])
        if getattr(out, "aux_loss", None) is not None:
            loss = loss + model.config.router_aux_loss_coef * out.aux_loss
        (loss / MICROBATCHES).backward()
        losses.append(loss.item())
    return sum(losses) / MICROBATCHES, {name: p.grad for name, p in model.named_parameters()}


def _pipeline(run: Run, model: nn.Module, rank: int) -> tuple[Any, list[nn.Module]]:
    cache, own = BlockCache(), run.routing.stages_of(rank)
    parts = [pipeline_part(model, run.routing, index) for index in own]
    stages = [
        BlockResStage(
            part,
            index,
            run.routing,
            device="cpu",
            cache=cache,
            microbatch_shape=(BATCH // MICROBATCHES, LENGTH, model.config.hidden_size),
            dtype=torch.float64,
            tally_shape=part.tally_shape,
        )
        for part, index in zip(parts, own, strict=True)
    ]
    return build_schedule(run.schedule, stages, MICROBATCHES, causal_lm_loss), parts


def test_gradients_and_losses_are_those_of_the_unsplit_model():
    for one, other in zip(*run_all_well(2, errors_of_rank), strict=True):
        (run, errors, losses, expected), (_, more_errors, more_losses, _) = one, other
        found = errors | more_errors
        assert len(found) == len(errors) + len(more_errors) == len(dict(run.model().named_parameters()))
        assert all(error <= BOUND for error in found.values()), (run, found)
        (losses,) = filter(None, (losses, more_losses))
        assert sum(losses) / MICROBATCHES == pytest.approx(expected, rel=BOUND)


# In one process, the parts one after another.

SIX = BlockRouting((1, 2, 0, 3), 4, 2)
GEMMA2 = Family(
    layers="layers",
    final_norm="norm",
    sublayers=(
        Sublayer("self_attn", "input_layernorm", "post_attention_layernorm", takes_arguments=True),
        Sublayer("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
)


def cut(model: nn.Module, routing: BlockRouting = SIX, **options: Any) -> list[nn.Module]:
    return [pipeline_part(model, routing, index, **options) for index in range(routing.num_stages)]


def run_through(parts: list[nn.Module], ids: Tensor) -> Any:
    state = (ids,)
    for part in parts[:-1]:
        state = part(*state)
    return parts[-1](*state)


def changed(family: str, described: Family | None = None, **changes: Any) -> nn.Module:
    model = causal_lm(family, tie_word_embeddings=False, **changes)
    apply_attn_res(model, 4, family=described)
    disturb(model.base_model.attn_res)
    return model


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_parts_have_the_models_parameters_and_load_its_state(family):
    model = changed(family)
    expected = dict(model.named_parameters())
    parts = cut(model)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(expected)
    assert all(p is expected[name] for part in parts for name, p in part.named_parameters())
    other = changed(family)
    for part in cut(other):
        part.load_state_dict({name: model.state_dict()[name] for name in part.state_dict()})
    ids = tokens(2, 7)
    with torch.no_grad():
        logits = run_through(parts, ids)
        assert torch.equal(run_through(cut(other), ids), logits)
        assert relative_error(model(ids).logits, logits) <= 1e-6  # which cutting leaves whole
        assert torch.equal(run_through(copy.deepcopy(parts), ids), logits)


def test_a_described_family_with_a_head_of_its_own():
    """Gemma 2 scales its embeddings before the layers and caps its logits after the head."""
    model = changed("gemma2", GEMMA2, final_logit_softcapping=0.5)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert relative_error(run_through(cut(model), ids), model(ids).logits) <= 1e-6


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mixtral", BALANCED)])
def test_checkpointed_layers_give_the_same_gradients(family, changes):
    model = changed(family, **changes).train()
    ids, found = tokens(2, 9), []
    for checkpointing in (False, True):
        parts = cut(model)
        if checkpointing:
            for part in parts:
                part.gradient_checkpointing_enable()
        model.zero_grad()
        causal_lm_loss(run_through(parts, ids), ids).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert all(relative_error(found[1][name], grad) <= 1e-6 for name, grad in found[0].items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mixtral"])
def test_a_narrow_stream_through_wide_parameters(family):
    model = changed(family)
    ids = tokens(2, 9)
    expected = model(ids).logits
    parts = cut(model, dtype=torch.bfloat16)
    sources, partial = parts[0](ids)
    assert {tensor.dtype for tensor in (*sources, partial)} == {torch.bfloat16}
    logits = run_through(parts, ids)
    assert relative_error(logits, expected) <= 4e-2
    causal_lm_loss(logits, ids).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("parameters", "stream"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_a_stream_that_does_not_go_with_the_parameters(parameters, stream):
    model = changed("llama").to(parameters)
    with pytest.raises(ValueError, match=f"a residual stream of {stream} .* the parameters are {parameters}"):
        pipeline_part(model, SIX, 0, dtype=stream)
    ids = tokens(2, 9)
    assert run_through(cut(model.to(stream), dtype=stream), ids).dtype == stream  # as the message advises


def test_the_residual_of_a_part_alone_is_not_given_back():
    model = changed("llama")
    ids = tokens(2, 9)
    part = pipeline_part(model, BlockRouting((6,), 4, 1), 0)
    expected = model(ids).logits
    for of_part in (part, part.base_model):
        with pytest.raises(ValueError, match="one pipeline stage's part"):
            remove_attn_res(of_part)
    assert torch.equal(part(ids), expected)
    assert torch.equal(model(ids).logits, expected)
    assert model.config.attn_res["sublayers_per_block"] == 4


def test_the_router_loss_can_be_left_out():
    model = changed("mixtral", **BALANCED)
    ids = tokens(2, 9)
    with torch.no_grad():
        logits, auxiliary = output = run_through(cut(model), ids)
        plain = causal_lm_loss(output, ids, router_loss=False)
        assert plain == causal_lm_loss(logits, ids)
        torch.testing.assert_close(auxiliary[0], 0.5 * model(ids).aux_loss)
        assert causal_lm_loss(output, ids) == plain + auxiliary[0]


def test_what_cannot_be_cut():
    with pytest.raises(ValueError, match="whole model that apply_attn_res has changed"):
        pipeline_part(causal_lm("llama"), SIX, 0)
    model = changed("llama")
    with pytest.raises(ValueError, match="whole model"):
        pipeline_part(pipeline_part(model, SIX, 0), SIX, 0)
    with pytest.raises(ValueError, match=r"num_sublayers=4, the model 6: BlockRouting\(split_sublayers\(6"):
        pipeline_part(model, BlockRouting((2, 2), 4, 2), 0)
    with pytest.raises(ValueError, match="sublayers_per_block=None, the model 4"):
        pipeline_part(model, BlockRouting((3, 3), None, 2), 0)
    with pytest.raises(ValueError, match="a head is expected, got LlamaModel"):
        pipeline_part(model.model, SIX, 0)
    tied = apply_attn_res(causal_lm("gpt2"), 4)
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        pipeline_part(tied, SIX, 0)
    ids = tokens(2, 9)
    alone = pipeline_part(tied, BlockRouting((6,), 4, 1), 0)
    assert torch.equal(alone(ids), tied(ids).logits)
    model.model.register_parameter("extra", nn.Parameter(torch.ones(3)))
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no stage would own: adapter, extra"):
        pipeline_part(model, SIX, 0)
    with torch.device("meta"):
        empty = apply_attn_res(causal_lm("llama", "meta", tie_word_embeddings=False), 4)
    with pytest.raises(ValueError, match="inv_freq is a buffer on the meta device"):
        pipeline_part(empty, SIX, 0)
    model = changed("qwen3_moe", **BALANCED)
    del model.num_experts
    with pytest.raises(ValueError, match="takes num_experts"):
        pipeline_part(model, SIX, 0)
