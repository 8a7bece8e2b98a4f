"""Block AttnRes in place of the residual of a Hugging Face decoder, on the instance that is given.

The model's own code keeps running: embedding, masks, positions and cache are its own, and so are attentions and MLPs.
What changes is what its layers hand to each other. Instead of the residual sum it is a residual stream
(`blockres.modules`): the first layer opens one on the embedding, each sublayer reads its input from it and writes its
update to it, and the final norm reads the output state. From layer to layer the stream travels as a plain dictionary of
its parts, and each layer builds its own from it (references; no tensor is copied). So a layer stays a function of what
it receives, which activation checkpointing and recorded hidden states rely on, and the tensors stay visible to whatever
hooks a layer's inputs and outputs, as FSDP2 does.

Decoder, layers and final norm change by taking a subclass of their class, of the same name, made for this model. No
class and no module of Python is touched, and `remove_attn_res` gives the classes back.
"""

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from blockres.models.huggingface.families import Family, Sublayer, check_family, find_family, rms_norm
from blockres.models.instance_class import InstanceClass, instance_class, take_class
from blockres.modules import BlockAttnRes
from blockres.streams import Stream

SETTINGS = "attn_res"
"""The configuration's attribute with the settings; the decoder's, with the aggregations, has the same name."""

Travelling = dict[str, Any]
_KIND = "blockres_stream"
_PLAN = "_plan"


def apply_attn_res(
    model: nn.Module,
    sublayers_per_block: int | None,
    *,
    family: Family | None = None,
    eps: float = 1e-6,
    scale: float = 1.0,
    key_weight: bool = True,
    recompute: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Turn a Hugging Face decoder into a Block AttnRes model, in place.

    The aggregations become `model.base_model.attn_res` (a `BlockAttnRes`), so that optimizers, `state_dict` and
    `save_pretrained` find their parameters; the settings go into `model.config.attn_res`, in a configuration of the
    model's own (one that other models share stays as it is). Load a saved model with `blockres.models.from_pretrained`.

    RMSNorms are fused into the aggregations, the final one too. A family that computes its norm in float32 and rounds
    before and after the weight (Llama does) differs from the fused norm in bfloat16: that rounds once, and its input
    was not rounded either. In float32 they agree to rounding. All other norms are called as they are.

    Args:
        model: a decoder of `transformers` of a known family (`blockres.models.FAMILIES`), with or without a head.
        sublayers_per_block: sublayers, not layers, in a block: an attention and an MLP are two
            (`blockres.models.sublayers_from_layers` converts). 1 is full AttnRes. None keeps the standard residual, run
            through this same machinery: the model must then compute what it did before, which tests a description.
        family: a description of the decoder, for one that is not known by name.
        eps, scale, key_weight, recompute: as in `BlockAttnRes`.
        dtype: of the aggregations' parameters; default: the embedding's.

    Returns:
        The same model.

    Raises:
        ValueError: for an unknown family, a description that does not fit, or a model that has been changed before.
    """
    if isinstance(_decoder(model), _Changed):
        raise ValueError("this is a Block AttnRes model already; remove_attn_res(model) gives it its residual back")
    if getattr(model.config, SETTINGS, None) is not None:
        raise ValueError(
            f"this configuration says that the model was saved as a Block AttnRes model, but its aggregations are not "
            f"here: load it with blockres.models.from_pretrained, or delete config.{SETTINGS} to begin anew"
        )
    settings = {
        "sublayers_per_block": sublayers_per_block,
        "eps": eps,
        "scale": scale,
        "key_weight": key_weight,
        "recompute": recompute,
        "family": None if family is None else family.to_dict(),
    }
    _own_config(model)
    graft(model, settings, dtype)
    return model


def remove_attn_res(model: nn.Module) -> nn.Module:
    """Give a model its own residual back, as it was before `apply_attn_res`. The aggregations are dropped.

    Raises:
        ValueError: where the model is no Block AttnRes model, or a wrapper has been put around its parts since.
    """
    decoder = _decoder(model)
    changed = [module for module in decoder.modules() if isinstance(module, _Changed)]
    if not all(module.is_outermost() for module in changed) or decoder not in changed:
        raise ValueError(
            f"{type(model).__name__} is no Block AttnRes model, or its layers have been wrapped since: "
            f"remove what was added last first"
        )
    for module in changed:
        take_class(module, module._original)
        delattr(module, _PLAN)
    delattr(decoder, SETTINGS)
    delattr(model.config, SETTINGS)
    return model


def graft(model: nn.Module, settings: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """`apply_attn_res` by settings as a configuration holds them; nothing is changed where a check fails."""
    decoder = _decoder(model)
    family = find_family(decoder) if settings["family"] is None else Family.from_dict(settings["family"])
    check_family(decoder, family)
    residual = _aggregations(model, decoder, family, settings, dtype)
    plan = _Plan(family, residual)
    classes: dict[type, type] = {}  # layers of one class stay of one class, which keeps compiled code in common
    for layer in getattr(decoder, family.layers):
        _exchange(layer, _Layer, plan, classes)
    _exchange(getattr(decoder, family.final_norm), _FinalNorm, plan, {})
    _exchange(decoder, _Decoder, plan, {})
    setattr(decoder, SETTINGS, residual)
    setattr(model.config, SETTINGS, settings)


def finish_loading(model: nn.Module, model_class: type[nn.Module]) -> None:
    """Give a model that was loaded through a class of its own the class that it was loaded for."""
    take_class(model, _changed_class(model_class, model._change) if isinstance(model, _Changed) else model_class)
    decoder = _decoder(model)
    assert isinstance(decoder, _Changed)
    check_family(decoder, decoder._plan.family)


def _decoder(model: nn.Module) -> nn.Module:
    decoder = getattr(model, "base_model", None)
    if not isinstance(decoder, nn.Module) or not hasattr(model, "config"):
        raise ValueError(f"a model of transformers is expected (a PreTrainedModel), got {type(model).__name__}")
    return decoder


def _own_config(model: nn.Module) -> None:
    """Models built from one configuration object share it; the settings belong to this one alone."""
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        for name, value in vars(module).items():
            if value is shared:
                setattr(module, name, own)


def _aggregations(
    model: Any, decoder: nn.Module, family: Family, settings: dict[str, Any], dtype: torch.dtype | None
) -> BlockAttnRes:
    embedding = model.get_input_embeddings().weight
    return BlockAttnRes(
        embedding.shape[1],
        len(getattr(decoder, family.layers)) * len(family.sublayers),
        settings["sublayers_per_block"],
        eps=settings["eps"],
        scale=settings["scale"],
        key_weight=settings["key_weight"],
        recompute=settings["recompute"],
        device=embedding.device,
        dtype=dtype or embedding.dtype,
    )


class _Plan:
    """What the changed modules know of. No `nn.Module`, so that no parameter gets a second name through them."""

    def __init__(self, family: Family, residual: BlockAttnRes) -> None:
        self.family, self.residual = family, residual

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """What a layer runs."""
        return self.family.sublayers

    def stream(self, hidden_states: Tensor | Travelling, arguments: dict[str, Any]) -> Stream:
        """A layer's own stream, from the layer before or, in the first one, on the embedding."""
        return _build(hidden_states) if isinstance(hidden_states, dict) else self.residual.stream(hidden_states)


class _Changed(InstanceClass):
    """A module that has taken a subclass made for it, of its class and of one of the changes below."""

    _change: type["_Changed"]
    _argument_names: tuple[str, ...]
    _plan: _Plan

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward` does instead of the original's."""
        raise NotImplementedError


def _exchange(module: nn.Module, change: type[_Changed], plan: _Plan, classes: dict[type, type]) -> None:
    original = type(module)
    if original not in classes:
        classes[original] = _changed_class(original, change)
    take_class(module, classes[original])
    setattr(module, _PLAN, plan)


def _changed_class(original: type[nn.Module], change: type[_Changed]) -> type[_Changed]:
    @functools.wraps(original.forward)
    def forward(self: _Changed, *args: Any, **kwargs: Any) -> Any:
        return change.run(self, *args, **kwargs)

    _, _, *names = inspect.signature(original.forward).parameters
    namespace = {"forward": forward, "_change": change, "_argument_names": tuple(names)}
    changed: type[_Changed] = instance_class(original, change, namespace, _changed_class, original, change)
    return changed


class _Layer(_Changed):
    def run(self, hidden_states: Tensor | Travelling, *args: Any, **kwargs: Any) -> Travelling:
        _check_checkpointing(self)
        plan = self._plan
        arguments = _arguments(self, plan.family, args, kwargs)
        stream = plan.stream(hidden_states, arguments)
        for sublayer in plan.sublayers:
            stream.write(_update(self, sublayer, plan.family, stream, arguments))
        return _take_down(stream)


class _FinalNorm(_Changed):
    def run(self, hidden_states: Tensor | Travelling) -> Tensor:
        if not isinstance(hidden_states, dict):
            return self._original.forward(self, hidden_states)
        stream = _build(hidden_states)
        fused = rms_norm(self, self._plan.family)
        return self._original.forward(self, stream.read()) if fused is None else stream.read(fused)


class _Decoder(_Changed):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return _without_streams(self._original.forward(self, *args, **kwargs))


def _take_down(stream: Stream) -> Travelling:
    return {_KIND: type(stream), **vars(stream)}


def _build(parts: Travelling) -> Stream:
    """A stream of one's own from a travelling one: its containers are copied, since a stream writes into them."""
    stream = object.__new__(parts[_KIND])
    for name, part in parts.items():
        if name != _KIND:
            setattr(stream, name, type(part)(part) if isinstance(part, (list, dict)) else part)
    return stream


def _update(layer: nn.Module, sublayer: Sublayer, family: Family, stream: Stream, arguments: dict[str, Any]) -> Tensor:
    inputs = _read(stream, None if sublayer.norm is None else getattr(layer, sublayer.norm), family)
    update = getattr(layer, sublayer.module)(inputs, **(arguments if sublayer.takes_arguments else {}))
    if isinstance(update, tuple):
        update = update[0]
    return update if sublayer.post_norm is None else getattr(layer, sublayer.post_norm)(update)


def _read(stream: Stream, norm: nn.Module | None, family: Family) -> Tensor:
    if norm is None:
        return stream.read()
    fused = rms_norm(norm, family)
    return norm(stream.read()) if fused is None else stream.read(fused)


def _arguments(layer: _Layer, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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
        return _build(output).read()
    if isinstance(output, dict):
        for key, value in output.items():
            if isinstance(value, tuple) and any(map(_is_travelling, value)):
                output[key] = _without_streams(value)
    elif isinstance(output, tuple):
        return tuple(_without_streams(value) for value in output)
    return output


def _is_travelling(value: Any) -> bool:
    return isinstance(value, dict) and _KIND in value
