"""Block sizes in other people's units. blockres counts sublayers: an attention is one, an MLP is one.

The paper counts as blockres does and calls it "layer". Kimi K3 and Megatron-LM count transformer layers, two sublayers
each; flash-linear-attention counts sublayers.
"""

from collections.abc import Mapping
from typing import Any

_SUBLAYERS_PER_UNIT = {"attn_res_block_size": 2, "attn_res_block_layers": 2, "attnres_block_size": 1}


def sublayers_from_layers(layers: int, sublayers_per_layer: int = 2) -> int:
    """Transformer layers in sublayers: Kimi K3's `attn_res_block_size = 12` is 24."""
    _check_positive(layers=layers, sublayers_per_layer=sublayers_per_layer)
    return layers * sublayers_per_layer


def layers_from_sublayers(sublayers: int, sublayers_per_layer: int = 2) -> int:
    """Sublayers in transformer layers.

    Raises:
        ValueError: where that is no whole number: the other side cannot express such a block.
    """
    _check_positive(sublayers=sublayers, sublayers_per_layer=sublayers_per_layer)
    layers, rest = divmod(sublayers, sublayers_per_layer)
    if rest:
        raise ValueError(
            f"{sublayers} sublayers are no whole number of layers of {sublayers_per_layer} sublayers; "
            f"{layers * sublayers_per_layer} or {(layers + 1) * sublayers_per_layer} are"
        )
    return layers


def sublayers_per_block_of(config: Any) -> int | None:
    """The block size that somebody else's configuration asks for, in sublayers; None is the standard residual.

    Args:
        config: an object or a mapping with `attn_res_block_size` (Kimi K3: layers), `attn_res_block_layers`
            (Megatron-LM: layers) or `attnres_block_size` (flash-linear-attention: sublayers), itself or in its
            `text_config`.

    Raises:
        ValueError: where none of these is there, or two are.
    """
    found = {name: _entry(config, name) for name in _SUBLAYERS_PER_UNIT if _has(config, name)}
    if not found and _has(config, "text_config"):
        return sublayers_per_block_of(_entry(config, "text_config"))
    if len(found) != 1:
        raise ValueError(
            f"exactly one of {', '.join(_SUBLAYERS_PER_UNIT)} is expected in the configuration, "
            f"got {', '.join(found) or 'none'}"
        )
    [(name, size)] = found.items()
    return None if size is None else sublayers_from_layers(size, _SUBLAYERS_PER_UNIT[name])


def _has(config: Any, name: str) -> bool:
    return name in config if isinstance(config, Mapping) else hasattr(config, name)


def _entry(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, Mapping) else getattr(config, name)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
