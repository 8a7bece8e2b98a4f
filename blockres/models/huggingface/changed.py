"""What the parts of a changed Hugging Face decoder do, and the classes by which they do it.

Instead of the residual sum the layers hand each other a residual stream (`blockres.streams`): the first layer opens one
on the embedding, each sublayer reads its input from it and writes its update to it, and the final norm reads the output
state. From layer to layer the stream travels as a plain dictionary of its parts, and each layer builds its own from it
(references; no tensor is copied). So a layer stays a function of what it receives, which activation checkpointing and
recorded hidden states rely on, and the tensors stay visible to whatever hooks a layer's inputs and outputs, as FSDP2
does. Under inference mode the blocks lie in the stream's one memory, into which such hooks do not look.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from blockres.checks import has_hooks
from blockres.models.huggingface.families import Family, Sublayer, rms_norm
from blockres.models.instance_class import InstanceClass, instance_class, take_class
from blockres.modules import BlockAttnRes
from blockres.streams import Stream

Travelling = dict[str, Any]
PLAN = "_plan"
"""The attribute of a changed module that holds its plan."""

_KIND = "blockres_stream"


def decoder_of(model: nn.Module) -> nn.Module:
    decoder = getattr(model, "base_model", None)
    if not isinstance(decoder, nn.Module) or not hasattr(model, "config"):
        raise ValueError(f"a model of transformers is expected (a PreTrainedModel), got {type(model).__name__}")
    return decoder


class Plan:
    """What the changed modules know of. No `nn.Module`, so that no parameter gets a second name through them.

    Attributes:
        probe: where it is set, every forward hands it each aggregation's index and softmax weights `[N, B, T]`.
    """

    is_whole = True
    """Whether the modules are a model, and not one stage's part of it."""

    def __init__(self, family: Family, residual: BlockAttnRes) -> None:
        self.family, self.residual = family, residual
        self.probe: Callable[[int, Tensor], None] | None = None

    def stream(self, hidden_states: Tensor | Travelling, arguments: dict[str, Any]) -> Stream:
        """A layer's own stream, from the layer before or, in the first one, on the embedding."""
        return build_stream(hidden_states) if isinstance(hidden_states, dict) else self.residual.stream(hidden_states)

    def read(self, stream: Stream, fused: tuple[Tensor, float] | None) -> Tensor:
        """What comes next in a stream, through a norm that is fused."""
        if self.probe is not None:
            self.probe(stream.position, stream.weights())
        return stream.read(fused)


class Changed(InstanceClass):
    """A module that has taken a subclass made for it, of its class and of one of the changes below."""

    _change: type["Changed"]
    _argument_names: tuple[str, ...]
    _plan: Plan
    run: Callable[..., Any]
    """What `forward` does instead of the original's."""


def exchange(module: nn.Module, change: type[Changed], plan: Plan, classes: dict[type, type]) -> None:
    original = type(module)
    if original not in classes:
        classes[original] = changed_class(original, change)
    take_class(module, classes[original])
    setattr(module, PLAN, plan)


def changed_class(original: type[nn.Module], change: type[Changed]) -> type[Changed]:
    @functools.wraps(original.forward)
    def forward(self: Changed, *args: Any, **kwargs: Any) -> Any:
        return change.run(self, *args, **kwargs)

    _, _, *names = inspect.signature(original.forward).parameters
    namespace = {"forward": forward, "_change": change, "_argument_names": tuple(names)}
    changed: type[Changed] = instance_class(original, change, namespace, changed_class, original, change)
    return changed


class ChangedLayer(Changed):
    _sublayers: tuple[Sublayer, ...] | None = None
    """What the layer runs, where that is not what its family says."""

    def run(self, hidden_states: Tensor | Travelling, *args: Any, **kwargs: Any) -> Travelling:
        _check_checkpointing(self)
        plan = self._plan
        arguments = _arguments(self, plan.family, args, kwargs)
        stream = plan.stream(hidden_states, arguments)
        for sublayer in plan.family.sublayers if self._sublayers is None else self._sublayers:
            stream.write(_update(self, sublayer, stream, arguments))
        return _take_down(stream)


class ChangedFinalNorm(Changed):
    def run(self, hidden_states: Tensor | Travelling) -> Tensor:
        if not isinstance(hidden_states, dict):
            return self._original.forward(self, hidden_states)
        stream = build_stream(hidden_states)
        fused = rms_norm(self, self._plan.family)
        output = self._plan.read(stream, fused)
        return self._original.forward(self, output) if fused is None else output


class ChangedDecoder(Changed):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        _check_layers(self)
        return _without_streams(self._original.forward(self, *args, **kwargs))


def _check_layers(decoder: ChangedDecoder) -> None:
    plan = decoder._plan
    has = len(getattr(decoder, plan.family.layers)) * len(plan.family.sublayers)
    if has != plan.residual.num_sublayers:
        raise ValueError(
            f"this decoder has {has} sublayers now, and aggregations for {plan.residual.num_sublayers}: call "
            f"remove_attn_res(model), change its layers, and apply_attn_res(model, …) again"
        )


def _take_down(stream: Stream) -> Travelling:
    return {_KIND: type(stream), **vars(stream)}


def build_stream(parts: Travelling) -> Stream:
    """A stream of one's own from a travelling one: its containers are copied, since a stream writes into them."""
    stream = object.__new__(parts[_KIND])
    for name, part in parts.items():
        if name != _KIND:
            setattr(stream, name, type(part)(part) if isinstance(part, (list, dict)) else part)
    return stream


def _update(layer: ChangedLayer, sublayer: Sublayer, stream: Stream, arguments: dict[str, Any]) -> Tensor:
    norm = None if sublayer.norm is None else getattr(layer, sublayer.norm)
    fused = None if norm is None or _does_more(norm) else rms_norm(norm, layer._plan.family)
    inputs = layer._plan.read(stream, fused)
    if norm is not None and fused is None:
        inputs = norm(inputs)
    update = getattr(layer, sublayer.module)(inputs, **(arguments if sublayer.takes_arguments else {}))
    if isinstance(update, tuple):
        update = update[0]
    return update if sublayer.post_norm is None else getattr(layer, sublayer.post_norm)(update)


def _does_more(module: nn.Module) -> bool:
    """Whether a call does more than the class's `forward`: hooks, or a `forward` put on the instance."""
    return has_hooks(module) or "forward" in vars(module)


def _arguments(layer: ChangedLayer, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A layer's arguments by name, without those that its attention does not take."""
    arguments = {**dict(zip(layer._argument_names, args, strict=False)), **kwargs}
    for name in family.withheld:
        if arguments.pop(name, None) is not None:
            raise ValueError(f"{name} was given: this Block AttnRes model has no cross-attention")
    return arguments


def _check_checkpointing(layer: Any) -> None:
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return
    if getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            "reentrant checkpointing sees only tensors, and the layers of a Block AttnRes model hand on a stream of "
            "them: enable it with gradient_checkpointing_kwargs={'use_reentrant': False}, the default"
        )


def _without_streams(output: Any) -> Any:
    """Recorded hidden states are the streams between the layers; each becomes what the next sublayer would read."""
    if _is_travelling(output):
        return build_stream(output).read()
    if isinstance(output, dict):
        for key, value in output.items():
            if isinstance(value, tuple) and any(map(_is_travelling, value)):
                output[key] = _without_streams(value)
    elif isinstance(output, tuple):
        return tuple(_without_streams(value) for value in output)
    return output


def _is_travelling(value: Any) -> bool:
    return isinstance(value, dict) and _KIND in value
