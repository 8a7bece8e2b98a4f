"""Triton kernels of Attention Residuals: one file an operation, its mathematics at the top of the file.

The functions take the places of those of `blockres.cpu`: same names, same arguments, same results.
"""

from blockres_kernels.aggregate import attn_res_backward, attn_res_forward
from blockres_kernels.cast import pack, unpack
from blockres_kernels.inter_backward import attn_res_inter_backward
from blockres_kernels.inter_forward import attn_res_inter_forward
from blockres_kernels.merge import attn_res_merge_backward, attn_res_merge_forward
from blockres_kernels.step import attn_res_step

__all__ = [
    "attn_res_backward",
    "attn_res_forward",
    "attn_res_inter_backward",
    "attn_res_inter_forward",
    "attn_res_merge_backward",
    "attn_res_merge_forward",
    "attn_res_step",
    "pack",
    "unpack",
]
