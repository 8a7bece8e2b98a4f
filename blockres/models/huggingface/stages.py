"""A Block AttnRes model of transformers cut into the stages of a pipeline, at any sublayer.

A stage's part is the model's own code over some of its modules: copies of the containers (the model, its decoder, the
list of layers, each layer) that hold what the stage runs, and None in the place of all else. Every layer keeps its
place, an empty one too, so that names are those of the unsplit model, and so that a decoder which goes by a layer's
number finds the right one. Masks and positions are computed on every stage, from the shape of the stream.

What comes before the layers belongs to the first stage, final norm and head to the last. Losses that balance experts
are products of means over all layers: their sums travel from stage to stage, as the tally of `BlockResStage`.

Letters: B batch, T tokens, D hidden size, E experts.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockres.models.gpt import next_token_loss
from blockres.models.huggingface.apply import SETTINGS
from blockres.models.huggingface.changed import (
    PLAN,
    Changed,
    ChangedDecoder,
    Plan,
    Travelling,
    build_stream,
    changed_class,
    decoder_of,
)
from blockres.models.huggingface.families import Family, Sublayer
from blockres.models.instance_class import take_class
from blockres.modules import BlockAttnRes
from blockres.streams import Stream

if TYPE_CHECKING:  # which refuses engines that are not tested, and only its users need one
    from blockres.pipeline import BlockRouting

State = tuple[Sequence[Tensor], Tensor | None]
_STATE = "blockres_state"
"""The argument by which a decoder hands its layers the state that came in."""


def pipeline_part(
    model: nn.Module, routing: "BlockRouting", index: int, *, dtype: torch.dtype | None = None
) -> "PipelinePart":
    """The part of a Hugging Face Block AttnRes model that one pipeline stage runs: the module of a `BlockResStage`.

    Stages begin and end at any sublayer, in the middle of a layer too. A part shares with `model` its configuration and
    the modules that it runs, attentions, MLPs and norms, and so their parameters, under the same names: `train`, `eval`
    and `to` on a part reach them in the model too. Cut all parts of a rank from one model and then let go of it, and so
    of what other ranks own; have the same model on all ranks, from the same seed or the same files.

    The first part takes tokens `[B, T]`, every other one `(sources, partial)`; the last returns logits
    `[B, T, vocabulary]`, every other one `(sources, partial)`. Arguments by name are the decoder's own
    (`attention_mask`, `position_ids`), to be given to the parts of all ranks.

    Where `config.output_router_logits` is set, parts have a `tally_shape`, to be given to `BlockResStage`; they take
    and return a tally, and the last one returns `(logits, router_loss)`: the auxiliary loss over all layers
    (transformers' `load_balancing_loss_func`), times its coefficient, `[1]`. `causal_lm_loss` takes either.

    Args:
        model: a causal language model that `apply_attn_res` has changed.
        routing: of the pipeline; its sublayers are the model's, an attention and an MLP being two.
        index: of the stage.
        dtype: of the residual stream; default: the embedding's, which is taken for that of all parameters. Where that
            is float32, bfloat16 and float16 can be given too: the part then computes under autocast.

    Raises:
        ValueError: where the model has not been changed, the routing is another model's, the dtype does not go with the
            parameters', head and embedding share a matrix, there are parameters that no stage would own, or buffers are
            on the meta device.
    """
    decoder = decoder_of(model)
    if not isinstance(decoder, ChangedDecoder) or isinstance(model, PipelinePart):
        raise ValueError(f"a whole model that apply_attn_res has changed is expected, got {type(model).__name__}")
    family, whole = decoder._plan.family, decoder._plan.residual
    _check_routing(routing, whole)
    _check_dtype(dtype, model)
    head = _check_model(model, decoder, family, split=routing.num_stages > 1)
    own, is_last = routing.sublayers(index), index == routing.num_stages - 1
    residual = _aggregations(whole, own, is_last)
    part, part_decoder = _twin(model, PipelinePart), _twin(decoder, _PartDecoder)
    setattr(part, str(model.base_model_prefix), part_decoder)
    setattr(part_decoder, SETTINGS, residual)
    setattr(part_decoder, family.layers, _layers(decoder, family, own))
    if index > 0:
        _leave_out_embeddings(part_decoder, family)
    if is_last:
        setattr(part_decoder, family.final_norm, _twin(getattr(decoder, family.final_norm)))
    else:
        setattr(part, head, None)
        setattr(part_decoder, family.final_norm, _Exit())
    plan = _PartPlan(family, residual, dtype)
    for module in part_decoder.modules():
        if isinstance(module, Changed):
            setattr(module, PLAN, plan)
    return part


def causal_lm_loss(output: Tensor | tuple[Tensor, Tensor], targets: Tensor, *, router_loss: bool = True) -> Tensor:
    """Mean cross-entropy in nats of what the last part returns and the tokens `[B, T]` that follow (-100 is none).

    The auxiliary loss of a model with experts is added to it, or left out with `router_loss=False`.
    """
    if isinstance(output, Tensor):
        return next_token_loss(output, targets)
    logits, auxiliary = output
    loss = next_token_loss(logits, targets)
    return loss + auxiliary.sum() if router_loss else loss


class PipelinePart(Changed):
    """What one stage runs of a model; `pipeline_part` makes it."""

    base_model: Any
    device: torch.device
    num_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float

    @property
    def depth_probe(self) -> Callable[[int, Tensor], None] | None:
        """Where it is set, every forward hands it each aggregation's index and softmax weights (`probe_depth`)."""
        return self.base_model._plan.probe

    @depth_probe.setter
    def depth_probe(self, probe: Callable[[int, Tensor], None] | None) -> None:
        self.base_model._plan.probe = probe

    @property
    def tally_shape(self) -> tuple[int, int] | None:
        """`[2, E]`: assignments to each expert, and the sum of its routing probabilities; None without their loss."""
        return (2, self.num_experts) if _balances_experts(self) else None

    def run(
        self,
        inputs: Tensor | Sequence[Tensor],
        partial: Tensor | None = None,
        tally: Tensor | None = None,
        **arguments: Any,
    ) -> Any:
        decoder = self.base_model
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else self._entering(inputs, partial)
        exit_ = getattr(decoder, decoder._plan.family.final_norm)
        with decoder._plan.autocast(self):
            if isinstance(exit_, _Exit):
                decoder(**given, use_cache=False, **arguments)
                left: Any = exit_.take()
            else:
                silence = {"output_router_logits": False} if _balances_experts(self) else {}
                left = self._original.forward(self, **given, use_cache=False, **silence, **arguments).logits
        if not _balances_experts(self):
            return left
        before = torch.zeros((2, self.num_experts), device=self.device) if tally is None else tally
        sums = _router_sums(
            before, decoder.take_router_logits(), self.num_experts_per_tok, arguments.get("attention_mask")
        )
        return (*left, sums) if isinstance(exit_, _Exit) else (left, self._router_loss(sums))

    def _entering(self, sources: Sequence[Tensor], partial: Tensor | None) -> dict[str, Any]:
        """What stands for the embedding has its shape, from which masks and positions are made, and repeats one zero.

        A decoder that scales it (Gemma 2) or adds to it (GPT-2) gives it memory; no layer reads it.
        """
        like = sources[0] if partial is None else partial
        dtype = next((parameter.dtype for parameter in self.parameters()), like.dtype)
        return {"inputs_embeds": like.new_zeros((), dtype=dtype).expand(like.shape), _STATE: (sources, partial)}

    def _router_loss(self, sums: Tensor) -> Tensor:
        assignments, probabilities = sums
        rows = assignments.sum() / self.num_experts_per_tok
        balance = self.num_experts * ((assignments / rows) * (probabilities / rows)).sum()
        return (self.router_aux_loss_coef * balance)[None]


class _PartDecoder(ChangedDecoder):
    _router_logits: tuple[Tensor, ...] = ()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if _balances_experts(self):
            kwargs["output_router_logits"] = True
        output = super().run(*args, **kwargs)
        self._router_logits = getattr(output, "router_logits", None) or ()
        return output

    def take_router_logits(self) -> tuple[Tensor, ...]:
        taken, self._router_logits = self._router_logits, ()
        return taken


class _PartPlan(Plan):
    """A part's plan; `dtype` is the stream's, None for the embedding's."""

    is_whole = False

    def __init__(self, family: Family, residual: BlockAttnRes, dtype: torch.dtype | None) -> None:
        super().__init__(family, residual)
        self._dtype = dtype

    def stream(self, hidden_states: Tensor | Travelling, arguments: dict[str, Any]) -> Stream:
        entering: State | None = arguments.pop(_STATE, None)
        if isinstance(hidden_states, dict):
            return super().stream(hidden_states, arguments)
        if entering is not None:
            return self.residual.stream(sources=entering[0], partial=entering[1])
        return self.residual.stream(hidden_states.to(self._dtype or hidden_states.dtype))

    def autocast(self, part: nn.Module) -> torch.autocast:
        parameter = next(part.parameters(), torch.empty(0))
        narrow = self._dtype is not None and self._dtype.itemsize < parameter.dtype.itemsize
        return torch.autocast(parameter.device.type, self._dtype if narrow else None, enabled=narrow)


class _Exit(nn.Module):
    """Stands for the final norm in all parts but the last: it keeps the stream's state, for the part to take."""

    _state: State | None = None

    def forward(self, hidden_states: Travelling) -> Tensor:
        self._state = sources, partial = build_stream(hidden_states).state()
        return sources[-1] if partial is None else partial

    def take(self) -> State:
        taken, self._state = self._state, None
        assert taken is not None
        return taken


class _NoEmbedding(nn.Module):
    """Stands for an embedding in all parts but the first: whatever it is added to stays as it is."""

    def forward(self, tokens: Tensor, *_: Any) -> Tensor:
        return torch.zeros((), device=tokens.device)


def _twin(module: nn.Module, change: type[Changed] | None = None) -> Any:
    """A module of its own over the same parameters and children; `change`: and of the class with that change."""
    kind = type(module)
    twin = kind.__new__(kind)
    vars(twin).update({name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(module).items()})
    if change is not None:
        take_class(twin, changed_class(module._original if isinstance(module, Changed) else kind, change))
    return twin


def _layers(decoder: nn.Module, family: Family, own: range) -> nn.ModuleList:
    layers, size = nn.ModuleList(), len(family.sublayers)
    for position, layer in enumerate(getattr(decoder, family.layers)):
        kept = tuple(sublayer for place, sublayer in enumerate(family.sublayers) if position * size + place in own)
        twin = _twin(layer)
        twin._sublayers = kept
        for name in _names(family.sublayers) - _names(kept):
            setattr(twin, name, None)
        layers.append(twin)
    return layers


def _names(sublayers: Iterable[Sublayer]) -> set[str]:
    parts = {name for sublayer in sublayers for name in (sublayer.module, sublayer.norm, sublayer.post_norm)}
    return {name for name in parts if name is not None}


def _aggregations(whole: BlockAttnRes, own: range, is_last: bool) -> BlockAttnRes:
    part = BlockAttnRes(
        whole.dim,
        whole.num_sublayers,
        whole.sublayers_per_block,
        start=own.start,
        stop=own.stop,
        final=is_last,
        recompute=whole.recompute,
        device="meta",
    )
    part.aggregations = nn.ModuleDict({index: whole.aggregations[index] for index in part.aggregations})
    return part


def _leave_out_embeddings(decoder: nn.Module, family: Family) -> None:
    for name, child in _around_layers(decoder, family):
        if isinstance(child, nn.Embedding):
            setattr(decoder, name, _NoEmbedding())


def _around_layers(decoder: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    within = (family.layers, family.final_norm, SETTINGS)
    return [(name, child) for name, child in decoder.named_children() if name not in within]


def _check_routing(routing: "BlockRouting", whole: BlockAttnRes) -> None:
    for name in ("num_sublayers", "sublayers_per_block"):
        routed, has = getattr(routing, name), getattr(whole, name)
        if routed != has:
            raise ValueError(
                f"the routing has {name}={routed}, the model {has}: "
                f"BlockRouting(split_sublayers({whole.num_sublayers}, num_stages), {whole.sublayers_per_block}, …) fits"
            )


def _check_dtype(dtype: torch.dtype | None, model: Any) -> None:
    parameters = model.get_input_embeddings().weight.dtype
    fitting = [parameters, *((torch.bfloat16, torch.float16) if parameters == torch.float32 else ())]
    if dtype is not None and dtype not in fitting:
        raise ValueError(
            f"a residual stream of {dtype} was asked for, and the parameters are {parameters}, with which only "
            f"{', '.join(map(str, fitting))} can go: pass what can, or cut model.to({dtype})"
        )


def _check_model(model: Any, decoder: nn.Module, family: Family, split: bool) -> str:
    """Make sure that a model can be cut; returns the name of its head."""
    head = model.get_output_embeddings()
    names = [name for name, child in model.named_children() if child is head]
    if not names:
        raise ValueError(f"a causal language model with a head is expected, got {type(model).__name__}")
    if split:
        _check_owners(model, decoder, family, head)
    if _balances_experts(model):
        _check_experts(model)
    empty = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"{empty} is a buffer on the meta device, and no state dict would fill it: build the model on a real device"
        )
    return names[0]


def _check_owners(model: Any, decoder: nn.Module, family: Family, head: nn.Module) -> None:
    """Make sure that each parameter has one stage that owns it."""
    if head.weight is model.get_input_embeddings().weight:
        raise ValueError(
            "head and embedding share a matrix, which the first and the last stage would each train on their own: use "
            "tie_word_embeddings=False in the configuration"
        )
    around = [(name, child) for name, child in _around_layers(decoder, family) if not isinstance(child, nn.Embedding)]
    beside = [(name, child) for name, child in model.named_children() if child is not decoder and child is not head]
    strays = [name for name, child in (*around, *beside) if any(True for _ in child.parameters())]
    strays += [name for owner in (model, decoder) for name in owner._parameters]
    if strays:
        raise ValueError(
            f"{type(model).__name__} has parameters outside of its embeddings, layers, final norm and head, which no "
            f"stage would own: {', '.join(strays)}"
        )


def _balances_experts(model: Any) -> bool:
    return bool(getattr(model.config, "output_router_logits", False))


def _check_experts(model: Any) -> None:
    for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef"):
        if not hasattr(model, name):
            raise ValueError(
                f"config.output_router_logits asks for the loss that balances experts, which takes {name}, and "
                f"{type(model).__name__} has none"
            )


def _router_sums(before: Tensor, router_logits: Iterable[Tensor], top_k: int, mask: Tensor | None) -> Tensor:
    """Assignments and routing probabilities by expert, `[2, E]`, summed over tokens and layers on top of `before`.

    Term by term what transformers' `load_balancing_loss_func` sums, of logits `[B T, E]` and a mask `[B, T]`.
    """
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(top_k, -1).indices
        weights = before.new_ones(len(logits)) if mask is None else mask.reshape(-1).to(before)
        assignments = torch.zeros_like(before[0]).scatter_add(0, chosen.flatten(), weights.repeat_interleave(top_k))
        before = before + torch.stack([assignments, (probabilities.float() * weights[:, None]).sum(0)])
    return before
