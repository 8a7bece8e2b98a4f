"""Who can do it: one function adapts one implementation, and `find` says which of them are installed.

An adapter says how its package aggregates (`aggregate`), and, where it has two phases, `inter` and `merge`. Everything
else is derived: an operation that a package does not fuse is put together from what it has, as its users would.
Packages without a key weight are given `query * key_weight` as the query.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial as bind

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import EPS, Function
from blockres import reference

EVERYWHERE = ("cpu", "cuda")
Norm = Callable[[Tensor, Tensor], Tensor]
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), EPS)


@dataclass(frozen=True)
class Implementation:
    """One way to compute Attention Residuals.

    Args:
        aggregate: `(sources, query, key_weight, norm_weight | None) -> out`.
        inter: `(sources, queries, key_weights) -> (outputs, lse)`.
        merge: `(output, lse, partial, update | None, query, key_weight, norm_weight | None) -> (h, partial)`.
        fuses_norm: the output norm is part of its kernels; else it is given no weight, and a separate RMSNorm follows.
        two_phase: its users run a whole stack through `inter` and `merge`.
        devices, dtypes: where and in what it runs.
        note: what a reader of a table has to know.
    """

    name: str
    version: str
    aggregate: Callable[..., Tensor]
    inter: Function | None = None
    merge: Function | None = None
    fuses_norm: bool = False
    two_phase: bool = False
    devices: tuple[str, ...] = EVERYWHERE
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    note: str = ""

    def operation(self, name: str, norm: Norm = rms_norm) -> Function | None:
        """This implementation of `bench.cases.OPERATIONS[name]`; None where it has no such thing.

        `norm(x, weight)` is what normalises where its kernels do not.
        """

        def finish(out: Tensor, weight: Tensor | None) -> Tensor:
            return out if weight is None or self.fuses_norm else norm(out, weight)

        def aggregate(sources, query, key_weight, norm_weight=None):
            out = self.aggregate(sources, query, key_weight, norm_weight if self.fuses_norm else None)
            return (finish(out, norm_weight),)

        def merge(output, lse, partial, update, query, key_weight, norm_weight):
            assert self.merge is not None
            fused = norm_weight if self.fuses_norm else None
            h, partial = self.merge(output, lse, partial, update, query, key_weight, fused)
            return finish(h, norm_weight), partial

        if name == "merge":
            return None if self.merge is None else merge
        return self.inter if name == "inter" else aggregate

    def unsupported(self, device: str, dtype: torch.dtype) -> str | None:
        """Why it cannot run there, or None."""
        if device not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"takes {' or '.join(str(d).removeprefix('torch.') for d in self.dtypes)} only"
        return None


@dataclass(frozen=True)
class Missing:
    name: str
    reason: str


def blockres() -> Implementation:
    import blockres as package

    def aggregate(sources, query, key_weight, norm_weight):
        return package.attn_res(sources, query, key_weight, norm_weight=norm_weight, eps=EPS)

    def inter(sources, queries, key_weights):
        return package.attn_res_inter(sources, queries, key_weights, eps=EPS)

    def merge(output, lse, partial, update, query, key_weight, norm_weight):
        return package.attn_res_merge(
            output, lse, partial, query, key_weight, update=update, norm_weight=norm_weight, eps=EPS
        )

    return Implementation("blockres", package.__version__, aggregate, inter, merge, fuses_norm=True, two_phase=True)


def eager() -> Implementation:
    """The formula as it is written in papers: stack, widen to float32, normalise, score, softmax, mix."""
    return Implementation("eager", torch.__version__, _formula, _formula_inter, _formula_merge)


def compiled() -> Implementation:
    """The same formula under `torch.compile`, each phase one graph."""
    torch._dynamo.config.recompile_limit = 1000  # every number of sources is a graph of its own
    return replace(
        eager(),
        name="compiled",
        fuses_norm=True,
        aggregate=torch.compile(_formula, dynamic=False, fullgraph=True),
        inter=torch.compile(_formula_inter, dynamic=False, fullgraph=True),
        merge=torch.compile(_formula_merge, dynamic=False, fullgraph=True),
        note="steady state; compile time not counted",
    )


def _formula(sources, query, key_weight, norm_weight):
    return reference.attn_res(sources, query, key_weight, norm_weight=norm_weight, eps=EPS)


def _formula_inter(sources, queries, key_weights):
    return reference.attn_res_inter(sources, queries, key_weights, eps=EPS)


def _formula_merge(output, lse, partial, update, query, key_weight, norm_weight):
    return reference.attn_res_merge(
        output, lse, partial, query, key_weight, update=update, norm_weight=norm_weight, eps=EPS
    )


def fla_core(checkpoint_level: int = 1) -> Implementation:
    """flash-linear-attention; level 0 keeps the mixture for backward, level 1 mixes again."""
    from fla.ops.attnres import fused_attnres

    def aggregate(sources, query, key_weight, norm_weight):
        return fused_attnres(query, sources, key_weight, norm_weight, rms_eps=EPS, checkpoint_level=checkpoint_level)

    name = "fla-core" if checkpoint_level == 1 else f"fla-core level {checkpoint_level}"
    return Implementation(name, importlib.metadata.version("fla-core"), aggregate, fuses_norm=True, devices=("cuda",))


def liger_kernel() -> Implementation:
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    def aggregate(sources, query, key_weight, norm_weight):
        return LigerAttnResFunction.apply(torch.stack(list(sources)), query, key_weight, EPS)

    return Implementation(
        "liger-kernel",
        importlib.metadata.version("liger-kernel"),
        aggregate,
        devices=("cuda",),
        note="takes a stacked tensor: the stack is counted",
    )


def flash_attn_res() -> Implementation:
    from flash_attn_res import phase_1_batched_attention_triton_op, phase_2_online_softmax_merge_triton_op

    def inter(sources, queries, key_weights):
        values = torch.stack([source.unsqueeze(0) for source in sources])
        outputs, lse = phase_1_batched_attention_triton_op(values, queries * key_weights, EPS)
        return outputs.squeeze(1), lse.squeeze(1)

    def aggregate(sources, query, key_weight, norm_weight):
        return inter(sources, query[None], key_weight[None])[0].squeeze(0)

    def merge(output, lse, partial, update, query, key_weight, norm_weight):
        partial = partial if update is None else partial + update
        merged = phase_2_online_softmax_merge_triton_op(partial[None], query * key_weight, output[None], lse[None], EPS)
        return merged.squeeze(0), partial

    return Implementation(
        "flash-attn-res",
        importlib.metadata.version("flash-attn-res"),
        aggregate,
        inter,
        merge,
        two_phase=True,
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        note="takes a stacked tensor, D a power of two; outputs are bfloat16 whatever the input",
    )


def fast_attnres() -> Implementation:
    from attnres import attnres

    def aggregate(sources, query, key_weight, norm_weight):
        return attnres(sources, query * key_weight, eps=EPS)

    return Implementation(
        "fast-attnres",
        importlib.metadata.version("fast-attnres"),
        aggregate,
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
    )


REGISTRY: dict[str, Callable[[], Implementation]] = {
    "blockres": blockres,
    "eager": eager,
    "compiled": compiled,
    "fla-core": fla_core,
    "fla-core level 0": bind(fla_core, checkpoint_level=0),
    "liger-kernel": liger_kernel,
    "flash-attn-res": flash_attn_res,
    "fast-attnres": fast_attnres,
}


def find(name: str) -> Implementation | Missing:
    """The implementation of that name, or why there is none here."""
    try:
        return REGISTRY[name]()
    except ImportError as error:
        return Missing(name, f"missing: {error}")
