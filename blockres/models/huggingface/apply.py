"""Block AttnRes in place of the residual of a Hugging Face decoder, on the instance that is given.

The model's own code keeps running: embedding, masks, positions and cache are its own, and so are attentions and MLPs.
What changes is what its layers hand to each other (`changed.py`).

Decoder, layers and final norm change by taking a subclass of their class, of the same name, made for this model. No
class and no module of Python is touched, and `remove_attn_res` gives the classes back.
"""

import copy
from typing import Any

import torch
from torch import nn

from blockres.models.huggingface.changed import (
    PLAN,
    Changed,
    ChangedDecoder,
    ChangedFinalNorm,
    ChangedLayer,
    Plan,
    changed_class,
    decoder_of,
    exchange,
)
from blockres.models.huggingface.families import FAMILIES, Family, check_family, find_family
from blockres.models.instance_class import take_class
from blockres.modules import BlockAttnRes

SETTINGS = "attn_res"
"""The configuration's attribute with the settings; the decoder's, with the aggregations, has the same name."""


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
        TypeError: where `family` is no `Family`, or `sublayers_per_block` no integer.
        ValueError: for an unknown family, a description that does not fit, or a model that has been changed before. The
            model is then as it was.
    """
    if not isinstance(family, (Family, type(None))):
        raise TypeError(
            f"family must be a blockres.models.Family, got {family!r}; a model of a family in blockres.models.FAMILIES "
            f"({', '.join(sorted(FAMILIES))}) needs none"
        )
    if isinstance(decoder_of(model), Changed):
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
    graft(model, settings, dtype)
    _own_config(model)
    setattr(model.config, SETTINGS, settings)
    return model


def remove_attn_res(model: nn.Module) -> nn.Module:
    """Give a model its own residual back, as it was before `apply_attn_res`. The aggregations are dropped.

    Raises:
        ValueError: where the model is no Block AttnRes model or a pipeline stage's part of one, or a wrapper has been
            put around its parts since.
    """
    decoder = decoder_of(model)
    if isinstance(decoder, Changed) and not decoder._plan.is_whole:
        raise ValueError(
            "this is one pipeline stage's part, and shares modules and configuration with the model that it was cut "
            "from: remove_attn_res takes that model"
        )
    changed = [module for module in decoder.modules() if isinstance(module, Changed)]
    if not all(module.is_outermost() for module in changed) or decoder not in changed:
        raise ValueError(
            f"{type(model).__name__} is no Block AttnRes model, or its layers have been wrapped since: "
            f"remove what was added last first"
        )
    for module in changed:
        take_class(module, module._original)
        delattr(module, PLAN)
    delattr(decoder, SETTINGS)
    delattr(model.config, SETTINGS)
    return model


def graft(model: nn.Module, settings: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Change a model by settings as a configuration holds them; nothing is changed where a check fails."""
    decoder = decoder_of(model)
    family = find_family(decoder) if settings["family"] is None else Family.from_dict(settings["family"])
    check_family(decoder, family)
    residual = _aggregations(model, decoder, family, settings, dtype)
    plan = Plan(family, residual)
    classes: dict[type, type] = {}  # layers of one class stay of one class, which keeps compiled code in common
    for layer in getattr(decoder, family.layers):
        exchange(layer, ChangedLayer, plan, classes)
    exchange(getattr(decoder, family.final_norm), ChangedFinalNorm, plan, {})
    exchange(decoder, ChangedDecoder, plan, {})
    setattr(decoder, SETTINGS, residual)


def finish_loading(model: nn.Module, model_class: type[nn.Module]) -> None:
    """Give a model that was loaded through a class of its own the class that it was loaded for."""
    take_class(model, changed_class(model_class, model._change) if isinstance(model, Changed) else model_class)
    decoder = decoder_of(model)
    assert isinstance(decoder, Changed)
    check_family(decoder, decoder._plan.family)


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
