"""Attention Residuals (arXiv:2603.15031) for PyTorch."""

from blockres import reference
from blockres.functional import attn_res, attn_res_inter, attn_res_merge
from blockres.modules import AttnRes, BlockAttnRes

__version__ = "0.1.0"

__all__ = ["AttnRes", "BlockAttnRes", "attn_res", "attn_res_inter", "attn_res_merge", "reference"]
