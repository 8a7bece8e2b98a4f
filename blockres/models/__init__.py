"""Models on a Block AttnRes residual stream, and Block AttnRes in the models of others.

`transformers` is imported by `from_pretrained` alone, when it is called.
"""

from blockres.models.foreign import fused_attnres, kimi_k3_attn_res, liger_attn_res
from blockres.models.gpt import GPT, GPTConfig, next_token_loss
from blockres.models.huggingface import (
    FAMILIES,
    Family,
    PipelinePart,
    Sublayer,
    apply_attn_res,
    causal_lm_loss,
    from_pretrained,
    pipeline_part,
    remove_attn_res,
)
from blockres.models.rerouting import Replaced, replace_attn_res, restore_attn_res
from blockres.models.units import layers_from_sublayers, sublayers_from_layers, sublayers_per_block_of

__all__ = [
    "FAMILIES",
    "GPT",
    "Family",
    "GPTConfig",
    "PipelinePart",
    "Replaced",
    "Sublayer",
    "apply_attn_res",
    "causal_lm_loss",
    "from_pretrained",
    "fused_attnres",
    "kimi_k3_attn_res",
    "layers_from_sublayers",
    "liger_attn_res",
    "next_token_loss",
    "pipeline_part",
    "remove_attn_res",
    "replace_attn_res",
    "restore_attn_res",
    "sublayers_from_layers",
    "sublayers_per_block_of",
]
