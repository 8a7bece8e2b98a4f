"""The modules that replace a network's residuals: one aggregation's parameters, and a residual stream over many.

Counting: sublayers and sources from 0. With S sublayers per block, sublayer l reads sources 0 … l // S (source 0 is the
embedding, source n the sum of block n's outputs) and, where l % S != 0, the open block's partial sum. The aggregation
after the last of L sublayers has index L. Source: arXiv:2603.15031, section 3.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from blockres import checks
from blockres.functional import attn_res
from blockres.inference import Bank, InferenceStream
from blockres.norms import Norm, norm_arguments
from blockres.streams import BlockStream, StandardStream, Stream


class AttnRes(nn.Module):
    """One aggregation over depth: a pseudo-query and the weight of the key norm.

    The query starts at zero, so that every source weighs the same at the start of training (the paper requires it).

    Args:
        dim: hidden size D.
        eps: added to the mean square of a source before the root.
        scale: factor of the scores; the paper's is 1.
        key_weight: False leaves out the learned weight of the key norm.

    Raises:
        TypeError: where `dim` is no integer.
        ValueError: where it, or `eps`, is not positive, or `dim` is above 16384.
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
        checks.integers(dim=dim)
        if not 1 <= dim <= checks.MAX_WIDTH:
            raise ValueError(f"dim must be at least 1 and at most {checks.MAX_WIDTH}, got {dim}")
        checks.numbers(eps, scale, None, None)
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
        sources = checks.source_list(sources)
        norm_weight, norm_eps = norm_arguments(norm, self.dim, sources[0].dtype)
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
        TypeError: where a size is no integer.
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
        checks.integers(dim=dim, num_sublayers=num_sublayers, start=start, stop=stop)
        if sublayers_per_block is not None:
            checks.integers(sublayers_per_block=sublayers_per_block)
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
        bank: Bank | None = None,
    ) -> Stream:
        """Open the stream at sublayer `start`: from the embedding `[..., D]`, or from what `state()` returned there.

        Under `torch.inference_mode()` it is an inference stream (`blockres.inference`), which runs one kernel for each
        sublayer, and has no gradients. Elsewhere, under `torch.no_grad()` and in what `torch.compile` traces too, it is
        the stream for training. What it is opened with is read where it is, and must not be changed in place while the
        stream is in use. With a `bank` (from `self.bank`) it is an inference stream wherever gradients are off,
        and allocates nothing; see `Bank` for how long what it returns is valid.

        Raises:
            TypeError: where what is given is no tensor of float32, bfloat16, float16 or float64, or parameters are
                sharded.
            ValueError: where it is not `dim` wide; where an aggregation has hooks, which no stream runs; where the
                number of sources, or whether there is a partial, is not what sublayer `start` finds; where the stream
                does not fit into the bank.
            RuntimeError: with a bank where gradients are on.
        """
        if (embedding is None) == (sources is None) or (embedding is not None and partial is not None):
            raise ValueError("give either the embedding, or the sources (and the partial, where a block is open)")
        self._check_width(embedding, sources, partial)
        _check_readable(self.aggregations)
        if self.sublayers_per_block is None:
            state = embedding if embedding is not None else partial
            if state is None or sources:
                raise ValueError(
                    "a standard residual stream is rebuilt from sources=() and its running sum as the partial, "
                    f"got {len(sources or ())} sources and {'a' if partial is not None else 'no'} partial"
                )
            if bank is not None:
                raise ValueError("a standard residual (sublayers_per_block=None) has no sources: it takes no bank")
            return StandardStream(self, state)
        held = (embedding,) if embedding is not None else tuple(sources or ())
        self._check_state(len(held), partial is not None)
        if partial is not None:
            checks.same_shape("the partial sum", partial, "source 0", held[0])
            checks.same_dtype("the partial sum", partial, "source 0", held[0])
        if bank is None and not _infers():
            return BlockStream(self, held, partial)
        if not isinstance(bank, Bank | None):
            raise TypeError(f"bank must be one that residual.bank(…) has made, got {checks.kind(bank)}")
        if torch.is_grad_enabled():
            raise RuntimeError("a stream on a bank has no gradients: open it under inference_mode() or no_grad()")
        return InferenceStream(self, held, partial, bank)

    def bank(
        self, max_tokens: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Bank:
        """Memory for inference streams of up to `max_tokens` tokens (batch times length), one after the other.

        `blocks + 1` slots of `[max_tokens, D]` and two more; the blocks are those that exist where this part stops.

        Args:
            dtype: of the stream, which is that of the embedding; device: where it is. By default those of the
                aggregations' parameters.

        Raises:
            TypeError: where `max_tokens` is no integer.
            ValueError: for a standard residual, or where `max_tokens` is not positive.
        """
        if self.sublayers_per_block is None:
            raise ValueError("a standard residual (sublayers_per_block=None) has no sources, and needs no bank")
        checks.integers(max_tokens=max_tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        parameter = next(self.parameters(), torch.empty(0))
        slots = -(-self.stop // self.sublayers_per_block) + 1
        dtype = checks.result_dtype(dtype, parameter.dtype)
        return Bank(slots, max_tokens, self.dim, dtype, device or parameter.device)

    def forward(
        self,
        embedding: Tensor,
        sublayers: Iterable[Callable[[Tensor], Tensor]],
        norms: Iterable[Norm | None] | None = None,
    ) -> Tensor:
        """Run all sublayers on the embedding `[..., D]` and return the output state `[..., D]`.

        `norms`, one for each sublayer, are fused into the aggregations: sublayer l then receives its normalised input.

        Raises:
            ValueError: where the network has another number of sublayers, or there is another number of norms.
        """
        stream = self.stream(embedding)
        if norms is None:
            for sublayer in sublayers:
                stream.write(sublayer(stream.read()))
        else:
            sublayers, norms = list(sublayers), list(norms)
            if len(sublayers) != len(norms):
                raise ValueError(
                    f"each sublayer has one norm, got {len(sublayers)} sublayers and {len(norms)} norms; "
                    "the norm after the last sublayer is applied to what forward returns"
                )
            for sublayer, norm in zip(sublayers, norms, strict=True):
                stream.write(sublayer(stream.read(norm)))
        if stream.position != self.num_sublayers:
            raise ValueError(f"this network has {self.num_sublayers} sublayers, got {stream.position}")
        return stream.read()

    def aggregation(self, index: int) -> AttnRes:
        """The aggregation with this global index.

        Raises:
            ValueError: where another part of the network owns it.
        """
        if str(index) not in self.aggregations:
            raise ValueError(
                f"this part of the network runs sublayers {self.start} … {self.stop - 1} and does not own aggregation "
                f"{index}: hand `state()` to the next part, which does"
            )
        aggregation = self.aggregations[str(index)]
        assert isinstance(aggregation, AttnRes)
        return aggregation

    def _check_width(self, embedding: Tensor | None, sources: Sequence[Tensor] | None, partial: Tensor | None) -> None:
        """Here rather than at the first read, which may be far from where the stream was opened."""
        if isinstance(sources, Tensor):
            raise TypeError(
                f"sources must be a sequence of tensors [..., {self.dim}], got one tensor: unbind(0) splits it"
            )
        if embedding is not None:
            checks.stream_rows("the embedding", embedding, self.dim)
        for j, source in enumerate(() if sources is None else sources):
            checks.stream_rows(f"source {j}", source, self.dim)
        if partial is not None:
            checks.stream_rows("the partial sum", partial, self.dim)

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


def _check_readable(aggregations: nn.ModuleDict) -> None:
    """A stream reads most aggregations' parameters without a call of the module: what is to happen then would not."""
    for index, aggregation in aggregations.items():
        if any(hasattr(parameter, "to_local") for parameter in aggregation.parameters()):
            raise TypeError(
                f"the parameters of aggregation {index} are sharded (DTensors): FSDP2 gathers them around the forward "
                "of the module that it wraps; wrap one whose forward runs the stream"
            )
        if checks.has_hooks(aggregation):
            raise ValueError(
                f"aggregation {index} has hooks (of FSDP2 or weight_norm, perhaps), which a stream does not run: put "
                "them on a module whose forward runs the stream; torch.nn.utils.parametrize works without"
            )


def _infers() -> bool:
    """What is compiled keeps to functions, which the compiler need not protect from writes into their inputs."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
