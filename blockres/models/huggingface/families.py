"""Where a family of decoders keeps its residual branches: all that blockres has to know about a model to change it.

A decoder is a list of layers; a layer is a list of sublayers, each `update = module(norm(x))` added to the residual.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """One residual branch of a layer; the names are attributes of the layer.

    Args:
        module: the branch itself, an attention or an MLP. Where it returns a tuple, the first entry is the update.
        norm: applied to what the branch reads; None where it reads the residual as it is.
        post_norm: applied to what the branch returns, before it is added; None where there is none.
        takes_arguments: hand the layer's other arguments (mask, positions, cache) on to the branch, by name.
    """

    module: str
    norm: str | None
    post_norm: str | None = None
    takes_arguments: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """Where a decoder keeps its layers, and its layers their sublayers.

    Args:
        layers: attribute of the decoder: the `nn.ModuleList` of layers.
        final_norm: attribute of the decoder: the norm after the last layer.
        sublayers: the branches of one layer, in the order in which they run.
        norm_eps: attribute of the norms that holds the epsilon of an RMSNorm `weight * x / sqrt(mean(x^2) + eps)`,
            which is then fused into the aggregation; None for any other norm (a LayerNorm, a weight stored as an offset
            from one), which is called as it is. Checked on numbers when the model is changed.
        withheld: arguments of a layer that its attention does not take. They must be None.
    """

    layers: str
    final_norm: str
    sublayers: tuple[Sublayer, ...]
    norm_eps: str | None = None
    withheld: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The description as plain values, fit for a JSON file."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Family":
        sublayers = tuple(Sublayer(**sublayer) for sublayer in values["sublayers"])
        return Family(**{**values, "sublayers": sublayers, "withheld": tuple(values["withheld"])})


_LLAMA = Family(
    layers="layers",
    final_norm="norm",
    sublayers=(
        Sublayer("self_attn", norm="input_layernorm", takes_arguments=True),
        Sublayer("mlp", norm="post_attention_layernorm"),
    ),
    norm_eps="variance_epsilon",
)
_GPT2 = Family(
    layers="h",
    final_norm="ln_f",
    sublayers=(Sublayer("attn", norm="ln_1", takes_arguments=True), Sublayer("mlp", norm="ln_2")),
    withheld=("encoder_hidden_states", "encoder_attention_mask"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "qwen3_moe": _LLAMA,
    }
)
"""The families known by name: by `config.model_type`."""


def find_family(decoder: nn.Module) -> Family:
    """The description of a known family.

    Raises:
        ValueError: where `config.model_type` is none of `FAMILIES`.
    """
    model_type = str(getattr(decoder.config, "model_type", None))
    if model_type not in FAMILIES:
        raise ValueError(
            f"{type(decoder).__name__} is of the family {model_type!r}; known are {', '.join(sorted(FAMILIES))}. "
            f"Describe another one with blockres.models.Family and pass it as family=…"
        )
    return FAMILIES[model_type]


def check_family(decoder: nn.Module, family: Family) -> None:
    """Hold a description against a decoder.

    Raises:
        ValueError: where an attribute is missing, a layer has parts that the description leaves out, or a norm that is
            to be fused computes something else than an RMSNorm.
    """
    layers = _part(decoder, family.layers)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ValueError(f"{type(decoder).__name__}.{family.layers} is to be a list of layers, got {type(layers)}")
    planned = getattr(decoder.config, "num_hidden_layers", len(layers))
    if planned != len(layers):
        raise ValueError(f"the configuration says {planned} layers, {type(decoder).__name__} has {len(layers)}")
    _check_fusable(_part(decoder, family.final_norm), family)
    for layer in layers:
        _check_layer(layer, family)


def _check_layer(layer: nn.Module, family: Family) -> None:
    named = {name for part in family.sublayers for name in (part.module, part.norm, part.post_norm) if name is not None}
    for part in family.sublayers:
        _part(layer, part.module)
        if part.norm is not None:
            _check_fusable(_part(layer, part.norm), family)
        if part.post_norm is not None:
            _part(layer, part.post_norm)
    stray = {name.split(".")[0] for name, _ in layer.named_parameters()} - named
    if stray:
        raise ValueError(
            f"{type(layer).__name__} has parameters that the description does not name, in {', '.join(sorted(stray))}; "
            f"it names {', '.join(sorted(named))}. They would be left out: a Family of yours can describe this layer"
        )


def _part(owner: nn.Module, name: str) -> nn.Module:
    part = getattr(owner, name, None)
    if not isinstance(part, nn.Module):
        raise ValueError(f"the description expects a module {type(owner).__name__}.{name}, got {part!r}")
    return part


def rms_norm(norm: nn.Module, family: Family) -> tuple[Tensor, float] | None:
    """`(weight, eps)` of a norm that can be fused, None for one that has to be called."""
    if family.norm_eps is None:
        return None
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight, getattr(norm, family.norm_eps)


def _check_fusable(norm: nn.Module, family: Family) -> None:
    if family.norm_eps is None:
        return
    weight, eps = getattr(norm, "weight", None), getattr(norm, family.norm_eps, None)
    if weight is None or eps is None:
        raise ValueError(
            f"{type(norm).__name__} has no weight or no {family.norm_eps}, and so cannot be fused as an RMSNorm: give "
            f"Family(norm_eps=…) the name of its epsilon, or None where it is another norm"
        )
    if weight.device.type == "meta":
        return
    sample = torch.linspace(-2, 3, weight.numel(), device=weight.device, dtype=weight.dtype)
    wide = sample.double()
    expected = wide * (wide.square().mean() + eps).rsqrt() * weight.detach().double()
    with torch.no_grad():
        error = (norm(sample[None])[0].double() - expected).norm()
    rounding = max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)  # the norms compute in float32
    if not error <= 4 * rounding * expected.norm():
        raise ValueError(
            f"{type(norm).__name__} is not the RMSNorm weight * x / sqrt(mean(x^2) + eps) that "
            f"Family(norm_eps={family.norm_eps!r}) says: off by {float(error):.2g} on a sample. "
            f"With norm_eps=None it is called as it is"
        )
