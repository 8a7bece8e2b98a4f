"""The streams that `BlockAttnRes` hands out for training: read, write, read, write, …, read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blockres import checks
from blockres.functional import attn_res_inter, attn_res_inter_chained, attn_res_merge
from blockres.norms import Norm, norm_arguments

if TYPE_CHECKING:
    from blockres.modules import AttnRes, BlockAttnRes


class Stream(ABC):
    """What the streams share: the position, and the order read, write, read, write, …, read."""

    _reads_in_place = True

    def __init__(self, residual: "BlockAttnRes") -> None:
        self._residual = residual
        self.position = residual.start
        self._update: Tensor | None = None

    @property
    def _size(self) -> int:
        assert self._residual.sublayers_per_block is not None
        return self._residual.sublayers_per_block

    def _accept(self, update: Tensor, like: Tensor) -> None:
        if self.position >= self._residual.stop:
            raise ValueError(
                f"this stream ends before sublayer {self._residual.stop}: all of its sublayers have been written"
            )
        if not isinstance(update, Tensor):
            hint = " (write its first element?)" if isinstance(update, (tuple, list)) else ""
            raise TypeError(
                f"sublayer {self.position} wrote {checks.kind(update)}; "
                f"a tensor [..., {self._residual.dim}] is expected{hint}"
            )
        if update.shape != like.shape:
            raise ValueError(
                f"sublayer {self.position} wrote {tuple(update.shape)} into a stream of {tuple(like.shape)}"
            )
        if update.dtype not in checks.FLOATS:
            raise TypeError(f"sublayer {self.position} wrote {update.dtype}; updates are floating point numbers")
        if self._reads_in_place:
            name = f"what sublayer {self.position} wrote"
            checks.rows(name, update)
            checks.one_cut(name, [update])
        self.position += 1

    @abstractmethod
    def read(self, norm: Norm | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The next sublayer's input `[..., D]`; after the last sublayer, the network's output state."""

    @abstractmethod
    def weights(self) -> Tensor:
        """The softmax weights `[N, ...]` with which the next `read` weighs the sources, the partial sum last."""

    @abstractmethod
    def write(self, update: Tensor) -> None:
        """Add a sublayer's output `[..., D]`.

        The add may wait for the next read: until then the tensor must not be changed in place. The one that opens a
        block is kept as it is, and must not be changed as long as the block is open.

        Raises:
            TypeError: for anything but a tensor of float32, bfloat16, float16 or float64, such as the tuple that many
                attentions return.
            ValueError: for another shape than the stream's, for strides that kernels cannot follow, or after the last
                sublayer.
        """

    @abstractmethod
    def state(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """`(sources, partial)`: the completed sources, and the open block's sum if a block is open."""


class BlockStream(Stream):
    """The stream of a network with Block AttnRes; made by `BlockAttnRes.stream`.

    It keeps the dtype of the embedding: updates of another dtype are added in the stream's.
    """

    def __init__(self, residual: "BlockAttnRes", sources: tuple[Tensor, ...], partial: Tensor | None) -> None:
        super().__init__(residual)
        self._sources, self._partial = sources, partial
        self._dtype = sources[0].dtype
        self._phase1: dict[int, _Answer] | None = None  # by aggregation; None until the block is opened
        self._recomputed: _RecomputedOutputs | None = None
        self._differentiable = False  # whether phase 1 was run with gradients

    def read(self, norm: Norm | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The next sublayer's input `[..., D]`; after the last sublayer, the network's output state.

        `norm` (an `nn.RMSNorm` or `(weight, eps)`), the cast to `out_dtype` and the add of what was written last are
        fused into the aggregation. The results of phase 1 are kept in the `out_dtype` of the block's first read. What
        is returned may share memory with them: it must not be changed in place.
        """
        aggregation = self._residual.aggregation(self.position)
        if self._phase1 is None or (torch.is_grad_enabled() and not self._differentiable):
            self._open(norm, out_dtype)
        assert self._phase1 is not None
        if self.position not in self._phase1:
            return self._read_directly(aggregation, norm, out_dtype)
        answer = self._phase1.pop(self.position)
        if self._partial is None:
            # A slice would keep all of the outputs.
            return answer.output if self._recomputed is None else answer.output.clone()
        return self._merge(aggregation, answer, norm, out_dtype)

    def weights(self) -> Tensor:
        """The softmax weights `[N, ...]` with which the next `read` weighs the sources, the partial sum last."""
        self._settle()
        _, weights = self._residual.aggregation(self.position)(self._readable(), return_weights=True)
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
        self._differentiable = torch.is_grad_enabled()
        direct = len(indices) == 1 or (len(self._sources) == 1 and not self._differentiable)
        self._phase1 = {} if direct else self._run_phase1(indices, norm, out_dtype)

    def _run_phase1(self, indices: list[int], norm: Norm | None, out_dtype: torch.dtype | None) -> dict[int, "_Answer"]:
        owned = [self._residual.aggregation(index) for index in indices]
        _check_alike(owned)
        weights = [aggregation.key_weight for aggregation in owned if aggregation.key_weight is not None]
        with _without_autocast(self._sources[0].device.type):  # it refuses to stack float16 where it casts to bfloat16
            queries = torch.stack([aggregation.query for aggregation in owned])
            key_weights = torch.stack(weights) if weights else None
        norm_weight, norm_eps = norm_arguments(norm, self._residual.dim, self._dtype)
        settings: dict[str, Any] = {
            "eps": owned[0].eps,
            "scale": owned[0].scale,
            "norm_weight": norm_weight if self._partial is None else None,
            "norm_eps": norm_eps if self._partial is None else None,
            "out_dtype": out_dtype,
        }
        arguments = (queries, key_weights)
        outputs, lse, sources = attn_res_inter_chained(self._sources, *arguments, **settings)
        if self._residual.recompute and outputs[0].requires_grad:
            self._recomputed = _RecomputedOutputs(outputs, self._sources, arguments, settings)
        self._sources = sources
        rows = queries.unbind(0), [None] * len(owned) if key_weights is None else key_weights.unbind(0)
        return dict(zip(indices, map(_Answer, outputs, lse, *rows), strict=True))

    def _read_directly(self, aggregation: "AttnRes", norm: Norm | None, out_dtype: torch.dtype | None) -> Tensor:
        self._settle()
        out = aggregation(self._readable(), norm=norm, out_dtype=out_dtype)
        assert isinstance(out, Tensor)
        return out

    def _merge(
        self, aggregation: "AttnRes", answer: "_Answer", norm: Norm | None, out_dtype: torch.dtype | None
    ) -> Tensor:
        assert self._partial is not None
        norm_weight, norm_eps = norm_arguments(norm, self._residual.dim, self._dtype)
        with nullcontext() if self._recomputed is None else self._recomputed.instead_of_saving(answer.output):
            h, self._partial = attn_res_merge(
                answer.output,
                answer.lse,
                self._partial,
                answer.query,
                answer.key_weight,
                update=self._update,
                eps=aggregation.eps,
                scale=aggregation.scale,
                norm_weight=norm_weight,
                norm_eps=norm_eps,
                out_dtype=out_dtype or self._dtype,
            )
        self._update = None
        return h


class _Answer(NamedTuple):
    """What phase 1 leaves to a query's merge: its output `[..., D]` and lse `[...]`, and its own row of the parameters.

    Query and key weight are rows of the stacks that phase 1 read: the gradients of both phases meet there, in one add
    for the block instead of one for every aggregation.
    """

    output: Tensor
    lse: Tensor
    query: Tensor
    key_weight: Tensor | None


def _without_autocast(device_type: str) -> AbstractContextManager:
    # `is_autocast_available` would say it of any device, but cannot be compiled by PyTorch 2.11.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _check_alike(aggregations: Sequence["AttnRes"]) -> None:
    settings = {(a.eps, a.scale, a.key_weight is None) for a in aggregations}
    if len(settings) > 1:
        raise ValueError(
            "the aggregations of a block must have one eps, one scale, and all or none of them a key weight; got "
            + ", ".join(f"eps={eps} scale={scale} key_weight={not without}" for eps, scale, without in settings)
        )


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
        self._versions = [kept._version if isinstance(kept, Tensor) else None for kept in self._sources]
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
            for kept, version in zip(self._sources, self._versions, strict=True):
                if version is not None and kept._version != version:
                    raise RuntimeError(
                        "a source of this block has been changed in place since the forward, and recompute=True reads "
                        "it again: leave sources as they are until the backward, or use recompute=False"
                    )
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


class StandardStream(Stream):
    """The standard residual behind the same interface: the running sum is the only state, kept as the partial."""

    _reads_in_place = False

    def __init__(self, residual: "BlockAttnRes", state: Tensor) -> None:
        super().__init__(residual)
        self._sum = state

    def read(self, norm: Norm | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The running sum `[..., D]`, through `norm` where one is given; else it must not be changed in place."""
        weight, eps = norm_arguments(norm, self._residual.dim, self._sum.dtype)
        out, out_dtype = self._sum, checks.result_dtype(out_dtype, self._sum.dtype)
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
