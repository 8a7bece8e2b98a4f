"""Block AttnRes in models of Hugging Face's transformers."""

from blockres.models.huggingface.apply import apply_attn_res, remove_attn_res
from blockres.models.huggingface.families import FAMILIES, Family, Sublayer
from blockres.models.huggingface.loading import from_pretrained

__all__ = ["FAMILIES", "Family", "Sublayer", "apply_attn_res", "from_pretrained", "remove_attn_res"]
