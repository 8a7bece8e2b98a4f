"""Loading what `save_pretrained` wrote of a Block AttnRes model."""

import os
from typing import Any

from torch import nn

from blockres.models.huggingface.apply import SETTINGS, finish_loading, graft
from blockres.models.instance_class import namesake

_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "trust_remote_code",
)


def from_pretrained(path: str | os.PathLike[str], model_class: type[nn.Module] | None = None, **kwargs: Any) -> Any:
    """Load a Block AttnRes model that `model.save_pretrained(path)` wrote: weights, aggregations and settings.

    `transformers`' own `from_pretrained` loads the same files as a model with its standard residual: it reports the
    aggregations as unexpected weights and leaves them out.

    Args:
        path: a folder, or a name on the Hugging Face hub.
        model_class: a model class of `transformers`; default: the one that the configuration names.
        kwargs: handed to `model_class.from_pretrained` (`dtype`, `device_map`, `attn_implementation`, …).

    Raises:
        ValueError: where the model was saved without Block AttnRes, the class is not known, or weights are missing.
    """
    import transformers

    hub_arguments = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    config = kwargs.pop("config", None) or transformers.AutoConfig.from_pretrained(path, **hub_arguments)
    settings = getattr(config, SETTINGS, None)
    if settings is None:
        raise ValueError(
            f"the configuration in {path} has no {SETTINGS!r}: this is not a saved Block AttnRes model. Load it with "
            f"transformers, then change it with blockres.models.apply_attn_res"
        )
    model_class = model_class or _named_class(config)
    wants_info = kwargs.pop("output_loading_info", False)
    loader = _loader(model_class, settings)
    model, info = loader.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    _check_complete(info["missing_keys"])
    finish_loading(model, model_class)
    return (model, info) if wants_info else model


def _named_class(config: Any) -> type[nn.Module]:
    import transformers

    names = config.architectures or []
    if len(names) != 1 or not hasattr(transformers, names[0]):
        raise ValueError(
            f"the configuration names the classes {names}, none that transformers knows: give model_class=…"
        )
    return getattr(transformers, names[0])


def _loader(model_class: type[nn.Module], settings: dict[str, Any]) -> Any:
    """A class that transformers can load the files into: the model's own, changed as it is built."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super(loader, self).__init__(config, *args, **kwargs)
        graft(self, settings)

    loader = namesake(model_class, (model_class,), {"__init__": __init__})
    return loader


def _check_complete(missing_keys: Any) -> None:
    missing = sorted(key for key in missing_keys if f"{SETTINGS}." in key)
    if missing:
        raise ValueError(
            f"the weights of {len(missing)} parameters of the aggregations are missing, {missing[0]} first"
        )
