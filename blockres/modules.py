"""The modules that replace a network's residuals: one aggregation's parameters, and a residual stream over many.

Counting: sublayers and sources from 0. With S sublayers per block, sublayer l reads sources 0 … l // S (source 0 is the
embedding, source n the sum of block n's outputs) and, where l % S != 0, the open block's partial sum. The aggregation
after the last of L sublayers has index L. Source: arXiv:2603.15031, section 3.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blockres.checks import source_list
from blockres.functional import attn_res, attn_res_inter, attn_res_inter_chained, attn_res_merge

Norm = nn.RMSNorm | tuple[Tensor, float]


class AttnRes(nn.Module):
    """One aggregation over depth: a pseudo-query and the weight of the key norm.

    The query starts at zero, so that every source weighs the same at the start of training (the paper requires it).

    Args:
        dim: hidden size D.
        eps: added to the mean square of a source before the root.
        scale: factor of the scores; the paper's is 1.
        key_weight: False leaves out the learned weight of the key norm.
    """

    query: Tensor
    key_weight: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-6,
        scale: float = 1.0,
        key_weight: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.scale = dim, eps, scale
        self.query = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.register_parameter(
            "key_weight", nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if key_weight else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.key_weight is not None:
            nn.init.ones_(self.key_weight)

    def forward(
        self,
        sources: Sequence[Tensor] | Tensor,
        *,
        norm: Norm | None = None,
        out_dtype: torch.dtype | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Aggregate N sources `[..., D]`, see `blockres.attn_res`, with an `nn.RMSNorm` or `(weight, eps)` fused."""
        sources = source_list(sources)
        norm_weight, norm_eps = _norm_arguments(norm, self.dim, sources[0].dtype)
        return attn_res(
            sources,
            self.query,
            self.key_weight,
            eps=self.eps,
            scale=self.scale,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            out_dtype=out_dtype,
            return_weights=return_weights,
        )

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, scale={self.scale}, key_weight={self.key_weight is not None}"


class BlockAttnRes(nn.Module):
    """The residual stream of a network, or of one pipeline stage of it, with Block Attention Residuals.

    It owns the aggregations of sublayers `start … stop - 1`, and the final one at the end of the network, under the
    name of their **global** index: `aggregations.{index}.query`. A checkpoint written under one split into stages
    therefore loads under any other.

    Args:
        dim: hidden size D.
        num_sublayers: L of the whole network; an attention and an MLP are two sublayers.
        sublayers_per_block: S. 1 is full AttnRes; None is the standard residual: no parameters, no cost.
        start, stop: the sublayers that this part of the network runs; all by default.
        final: whether this part ends the network and owns the final aggregation; by default where `stop` is
            `num_sublayers`. To be given where the last stage has no sublayer, since two stages then stop there.
        eps, scale, key_weight: as in `AttnRes`.
        recompute: keep the outputs of phase 1 out of the saved activations and compute them again in the backward, once
            per block: what is saved per sublayer is then what a standard pre-norm residual saves. Eager mode only.

    Raises:
        ValueError: where a size is not positive, or `start … stop` does not lie within the network.
    """

    def __init__(
        self,
        dim: int,
        num_sublayers: int,
        sublayers_per_block: int | None,
        *,
        start: int = 0,
        stop: int | None = None,
        final: bool | None = None,
        eps: float = 1e-6,
        scale: float = 1.0,
        key_weight: bool = True,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        stop = num_sublayers if stop is None else stop
        if dim < 1 or num_sublayers < 1:
            raise ValueError(f"dim and num_sublayers must be at least 1, got {dim} and {num_sublayers}")
        if sublayers_per_block is not None and sublayers_per_block < 1:
            raise ValueError(
                f"sublayers_per_block must be at least 1 (1 is full AttnRes) or None (the standard residual), "
                f"got {sublayers_per_block}"
            )
        if not 0 <= start <= stop <= num_sublayers:
            raise ValueError(
                f"a part runs sublayers start … stop - 1 with 0 <= start <= stop <= {num_sublayers}, "
                f"got start={start}, stop={stop}"
            )
        final = stop == num_sublayers if final is None else final
        if final and stop != num_sublayers:
            raise ValueError(f"the final part stops at sublayer {num_sublayers}, got final=True with stop={stop}")
        self.dim, self.num_sublayers, self.sublayers_per_block = dim, num_sublayers, sublayers_per_block
        self.start, self.stop, self.recompute = start, stop, recompute
        owned = () if sublayers_per_block is None else range(start, stop + final)
        self.aggregations = nn.ModuleDict(
            {
                str(index): AttnRes(dim, eps=eps, scale=scale, key_weight=key_weight, device=device, dtype=dtype)
                for index in owned
            }
        )

    def stream(
        self,
        embedding: Tensor | None = None,
        *,
        sources: Sequence[Tensor] | None = None,
        partial: Tensor | None = None,
    ) -> "BlockStream | StandardStream":
        """Open the stream at sublayer `start`: from the embedding `[..., D]`, or from what `state()` returned there.

        Raises:
            ValueError: where the number of sources, or whether there is a partial, is not what sublayer `start` finds.
        """
        if (embedding is None) == (sources is None) or (embedding is not None and partial is not None):
            raise ValueError("give either the embedding, or the sources (and the partial, where a block is open)")
        if self.sublayers_per_block is None:
            state = embedding if embedding is not None else partial
            if state is None or sources:
                raise ValueError(
                    "a standard residual stream is rebuilt from sources=() and its running sum as the partial, "
                    f"got {len(sources or ())} sources and {'a' if partial is not None else 'no'} partial"
                )
            return StandardStream(self, state)
        held = (embedding,) if embedding is not None else tuple(sources or ())
        self._check_state(len(held), partial is not None)
        return BlockStream(self, held, partial)

    def forward(
        self,
        embedding: Tensor,
        sublayers: Iterable[Callable[[Tensor], Tensor]],
        norms: Iterable[Norm | None] | None = None,
    ) -> Tensor:
        """Run all sublayers on the embedding `[..., D]` and return the output state `[..., D]`.

        `norms`, one for each sublayer, are fused into the aggregations: sublayer l then receives its normalised input.
        """
        stream = self.stream(embedding)
        if norms is None:
            for sublayer in sublayers:
                stream.write(sublayer(stream.read()))
        else:
            for sublayer, norm in zip(sublayers, norms, strict=True):
                stream.write(sublayer(stream.read(norm)))
        if stream.position != self.num_sublayers:
            raise ValueError(f"this network has {self.num_sublayers} sublayers, got {stream.position}")
        return stream.read()

    def _check_state(self, num_sources: int, has_partial: bool) -> None:
        blocks, inside = divmod(self.start, self.sublayers_per_block or 1)
        if num_sources != blocks + 1 or has_partial != (inside > 0):
            raise ValueError(
                f"at sublayer {self.start} with {self.sublayers_per_block} sublayers per block the stream has "
                f"{blocks + 1} sources and {'a' if inside else 'no'} partial, "
                f"got {num_sources} and {'a' if has_partial else 'no'} partial"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, num_sublayers={self.num_sublayers}, sublayers_per_block={self.sublayers_per_block}, "
            f"start={self.start}, stop={self.stop}"
        )


class _Stream:
    """What the streams share: the position, and the order read, write, read, write, …, read."""

    def __init__(self, residual: BlockAttnRes) -> None:
        self._residual = residual
        self.position = residual.start
        self._update: Tensor | None = None

    def _accept(self, update: Tensor, like: Tensor) -> None:
        if self.position >= self._residual.stop:
            raise ValueError(
                f"this stream ends before sublayer {self._residual.stop}: all of its sublayers have been written"
            )
        if update.shape != like.shape:
            raise ValueError(
                f"sublayer {self.position} wrote {tuple(update.shape)} into a stream of {tuple(like.shape)}"
            )
        self.position += 1


class BlockStream(_Stream):
    """The stream of a network with Block AttnRes; made by `BlockAttnRes.stream`.

    It keeps the dtype of the embedding: updates of another dtype are added in the stream's.
    """

    def __init__(self, residual: BlockAttnRes, sources: tuple[Tensor, ...], partial: Tensor | None) -> None:
        super().__init__(residual)
        self._sources, self._partial = sources, partial
        self._dtype = sources[0].dtype
        self._phase1: dict[int, tuple[Tensor, Tensor]] | None = None  # by aggregation; None until the block is opened
        self._recomputed: _RecomputedOutputs | None = None

    def read(self, norm: Norm | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The next sublayer's input `[..., D]`; after the last sublayer, the network's output state.

        `norm` (an `nn.RMSNorm` or `(weight, eps)`), the cast to `out_dtype` and the add of what was written last are
        fused into the aggregation. The results of phase 1 are kept in the `out_dtype` of the block's first read. What
        is returned may share memory with them: it must not be changed in place.
        """
        aggregation = self._aggregation()
        if self._phase1 is None:
            self._open(norm, out_dtype)
        assert self._phase1 is not None
        if self.position not in self._phase1:
            return self._read_directly(aggregation, norm, out_dtype)
        output, lse = self._phase1.pop(self.position)
        if self._partial is None:
            return output if self._recomputed is None else output.clone()  # a slice would keep all of the outputs
        return self._merge(aggregation, output, lse, norm, out_dtype)

    def weights(self) -> Tensor:
        """The softmax weights `[N, ...]` with which the next `read` weighs the sources, the partial sum last."""
        self._settle()
        _, weights = self._aggregation()(self._readable(), return_weights=True)
        return weights

    def write(self, update: Tensor) -> None:
        """Add a sublayer's output `[..., D]`; the block's last one makes the block a source."""
        self._accept(update, self._sources[0])
        self._settle()
        if self._partial is None:
            self._partial = update.to(self._dtype)
        else:
            self._update = update
        if self.position % self._size == 0:
            self._close()

    def state(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """`(sources, partial)`: the completed sources, and the open block's sum if a block is open."""
        self._settle()
        return self._sources, self._partial

    @property
    def _size(self) -> int:
        assert self._residual.sublayers_per_block is not None
        return self._residual.sublayers_per_block

    def _aggregation(self) -> AttnRes:
        if str(self.position) not in self._residual.aggregations:
            raise ValueError(
                f"this part of the network runs sublayers {self._residual.start} … {self._residual.stop - 1} and does "
                f"not own aggregation {self.position}: hand `state()` to the next part, which does"
            )
        return self._owned(self.position)

    def _owned(self, index: int) -> AttnRes:
        aggregation = self._residual.aggregations[str(index)]
        assert isinstance(aggregation, AttnRes)
        return aggregation

    def _readable(self) -> tuple[Tensor, ...]:
        return self._sources if self._partial is None else (*self._sources, self._partial)

    def _settle(self) -> None:
        """Add what was written last, where no merge has done so."""
        if self._update is not None:
            assert self._partial is not None
            self._partial = (self._partial + self._update).to(self._dtype)
            self._update = None

    def _close(self) -> None:
        self._settle()
        assert self._partial is not None
        self._sources = (*self._sources, self._partial)
        self._partial = self._phase1 = self._recomputed = None

    def _open(self, norm: Norm | None, out_dtype: torch.dtype | None) -> None:
        """Phase 1 for the queries of the open block that are still to come, where that moves less memory.

        It does not for a single query. Without gradients it does not over the embedding alone either: 6 [T, D] reads
        and writes per sublayer both ways, and no outputs to hold in between. With gradients it always does, since
        autograd adds up each direct reader's gradient of each source in a pass of its own.
        """
        end = (self.position // self._size + 1) * self._size
        indices = [index for index in range(self.position, end) if str(index) in self._residual.aggregations]
        direct = len(indices) == 1 or (len(self._sources) == 1 and not torch.is_grad_enabled())
        self._phase1 = {} if direct else self._run_phase1(indices, norm, out_dtype)

    def _run_phase1(
        self, indices: list[int], norm: Norm | None, out_dtype: torch.dtype | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        owned = [self._owned(index) for index in indices]
        queries = torch.stack([aggregation.query for aggregation in owned])
        weights = [aggregation.key_weight for aggregation in owned if aggregation.key_weight is not None]
        norm_weight, norm_eps = _norm_arguments(norm, self._residual.dim, self._dtype)
        settings: dict[str, Any] = {
            "eps": owned[0].eps,
            "scale": owned[0].scale,
            "norm_weight": norm_weight if self._partial is None else None,
            "norm_eps": norm_eps if self._partial is None else None,
            "out_dtype": out_dtype,
        }
        arguments = (queries, torch.stack(weights) if weights else None)
        outputs, lse, sources = attn_res_inter_chained(self._sources, *arguments, **settings)
        if self._residual.recompute and outputs[0].requires_grad:
            self._recomputed = _RecomputedOutputs(outputs, self._sources, arguments, settings)
        self._sources = sources
        return dict(zip(indices, zip(outputs, lse, strict=True), strict=True))

    def _read_directly(self, aggregation: AttnRes, norm: Norm | None, out_dtype: torch.dtype | None) -> Tensor:
        self._settle()
        out = aggregation(self._readable(), norm=norm, out_dtype=out_dtype)
        assert isinstance(out, Tensor)
        return out

    def _merge(
        self, aggregation: AttnRes, output: Tensor, lse: Tensor, norm: Norm | None, out_dtype: torch.dtype | None
    ) -> Tensor:
        assert self._partial is not None
        norm_weight, norm_eps = _norm_arguments(norm, self._residual.dim, self._dtype)
        with nullcontext() if self._recomputed is None else self._recomputed.instead_of_saving(output):
            h, self._partial = attn_res_merge(
                output,
                lse,
                self._partial,
                aggregation.query,
                aggregation.key_weight,
                update=self._update,
                eps=aggregation.eps,
                scale=aggregation.scale,
                norm_weight=norm_weight,
                norm_eps=norm_eps,
                out_dtype=out_dtype or self._dtype,
            )
        self._update = None
        return h


class _RecomputedOutputs:
    """Phase-1 outputs of one block that backward computes again instead of finding them saved.

    The first merge whose backward asks for its output recomputes those of the whole block; they are let go when the
    backward of phase 1, the block's last, has run.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        sources: Sequence[Tensor],
        arguments: tuple[Tensor, Tensor | None],
        settings: dict[str, Any],
    ) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "recompute=True works through hooks on saved tensors, which torch.compile does not take: compile the "
                "sublayers and leave the stream outside, or use recompute=False"
            )
        self._places = {output.data_ptr(): place for place, output in enumerate(outputs)}
        pack, self._unpack = _enclosing_hooks()
        self._sources = [pack(source.detach()) for source in sources]
        self._arguments, self._settings = arguments, settings
        self._outputs: Tensor | None = None
        assert outputs[0].grad_fn is not None
        outputs[0].grad_fn.register_hook(self._let_go)

    def instead_of_saving(self, output: Tensor) -> saved_tensors_hooks:
        """A context in which autograd saves a note of `output` where it would save `output`."""
        address, shape = output.data_ptr(), output.shape  # not `output`: autograd keeps the hooks, and what they hold
        note = _Note(self._places[address])
        pack_other, unpack_other = _enclosing_hooks()

        def pack(saved: Tensor) -> Any:
            return note if saved.data_ptr() == address and saved.shape == shape else pack_other(saved)

        def unpack(kept: Any) -> Tensor:
            return self._output(kept.place) if isinstance(kept, _Note) else unpack_other(kept)

        return saved_tensors_hooks(pack, unpack)

    def _output(self, place: int) -> Tensor:
        if self._outputs is None:
            sources = [self._unpack(source) for source in self._sources]
            with torch.no_grad():
                self._outputs, _ = attn_res_inter(sources, *self._arguments, **self._settings)
        return self._outputs[place]

    def _let_go(self, *_: Any) -> None:
        self._outputs = None


class _Note(NamedTuple):
    """Stands for a phase-1 output among saved tensors."""

    place: int


def _enclosing_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks on saved tensors in force here, activation checkpointing's for one.

    Autograd calls the innermost hooks alone, so those of a recomputed block must pass on what they leave be.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (_as_it_is, _as_it_is)


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


class StandardStream(_Stream):
    """The standard residual behind the same interface: the running sum is the only state, kept as the partial."""

    def __init__(self, residual: BlockAttnRes, state: Tensor) -> None:
        super().__init__(residual)
        self._sum = state

    def read(self, norm: Norm | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The running sum `[..., D]`, through `norm` where one is given."""
        weight, eps = _norm_arguments(norm, self._residual.dim, self._sum.dtype)
        out, out_dtype = self._sum, out_dtype or self._sum.dtype
        if weight is not None:
            widest = torch.promote_types(torch.promote_types(out.dtype, weight.dtype), out_dtype)
            out = nn.functional.rms_norm(out.to(widest), (self._residual.dim,), weight.to(widest), eps)
        return out.to(out_dtype)

    def weights(self) -> Tensor:
        """Ones `[1, ...]`: the sum is all that there is to read."""
        return torch.ones((1, *self._sum.shape[:-1]), device=self._sum.device)

    def write(self, update: Tensor) -> None:
        """Add a sublayer's output `[..., D]` to the running sum."""
        self._accept(update, self._sum)
        self._sum = self._sum + update.to(self._sum.dtype)

    def state(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """`((), running sum)`."""
        return (), self._sum


def _norm_arguments(norm: Norm | None, dim: int, dtype: torch.dtype) -> tuple[Tensor | None, float | None]:
    if norm is None:
        return None, None
    if isinstance(norm, tuple):
        return norm
    if not isinstance(norm, nn.RMSNorm):
        raise TypeError(
            f"the norm fused into an aggregation is an nn.RMSNorm or a tuple (weight, eps), got {type(norm).__name__}; "
            f"apply any other norm to what read() returns"
        )
    if norm.weight is None or tuple(norm.normalized_shape) != (dim,):
        raise ValueError(
            f"the norm fused into an aggregation has a weight [{dim}], got {norm}; apply it to what read() returns"
        )
    # nn.RMSNorm's own default is the epsilon of the dtype that it computes in, float32 for the narrower ones.
    default = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return norm.weight, default if norm.eps is None else norm.eps
