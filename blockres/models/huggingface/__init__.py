"""Block AttnRes in models of Hugging Face's transformers."""

from blockres.models.huggingface.apply import apply_attn_res, remove_attn_res
from blockres.models.huggingface.families import FAMILIES, Family, Sublayer
from blockres.models.huggingface.loading import from_pretrained
from blockres.models.huggingface.stages import PipelinePart, causal_lm_loss, pipeline_part

__all__ = [
    "FAMILIES",
    "Family",
    "PipelinePart",
    "Sublayer",
    "apply_attn_res",
    "causal_lm_loss",
    "from_pretrained",
    "pipeline_part",
    "remove_attn_res",
]
