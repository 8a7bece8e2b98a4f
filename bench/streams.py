"""A whole residual stream by each implementation, behind one interface: `read(norm_weight)`, `write(update)`.

    stream = open_stream(implementation, parameters, embedding, sublayers_per_block)
    out = run(stream, parameters, sublayer)

Sublayers are stand-ins: what is measured is everything that stands between them. A package with one-pass aggregation
only adds each update to the partial sum with PyTorch and aggregates all sources anew for each sublayer; one with two
phases runs phase 1 when a block opens. A norm that a package cannot fuse is a separate RMSNorm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bench.cases import EPS
from bench.implementations import Implementation, Norm, rms_norm
from blockres import BlockAttnRes
from blockres.inference import Bank


class Stream(Protocol):
    def read(self, norm_weight: Tensor | None) -> Tensor: ...
    def write(self, update: Tensor) -> None: ...


@dataclass(frozen=True)
class StackShape:
    """A network: sublayers, sublayers per block, tokens, hidden size; written as `128x16x4096x4096`."""

    sublayers: int
    per_block: int
    tokens: int
    dim: int

    @staticmethod
    def parse(text: str) -> "StackShape":
        sizes = text.split("x")
        if len(sizes) != 4 or not all(size.isdigit() for size in sizes):
            raise ValueError(
                f"a stack is sublayers x sublayers per block x tokens x dim, as in 128x16x4096x4096; got {text!r}"
            )
        return StackShape(*(int(size) for size in sizes))

    def __str__(self) -> str:
        return f"{self.sublayers}x{self.per_block}x{self.tokens}x{self.dim}"


class Parameters:
    """Queries and key weights `[L + 1, D]`, norm weights `[L, D]`, as lists of leaves."""

    def __init__(self, shape: StackShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def leaf(mean: float, std: float) -> nn.Parameter:
            values = torch.randn(shape.dim, generator=generator, device=device) * std + mean
            return nn.Parameter(values.to(dtype))

        self._residuals: dict[tuple[int, bool], BlockAttnRes] = {}
        self.queries: list[Tensor] = [leaf(0, shape.dim**-0.5) for _ in range(shape.sublayers + 1)]
        self.key_weights: list[Tensor] = [leaf(1, 0.1) for _ in range(shape.sublayers + 1)]
        self.norms: list[Tensor] = [leaf(1, 0.1) for _ in range(shape.sublayers)]

    def by_kind(self, *, norms_only: bool = False) -> dict[str, list[Tensor]]:
        norms = {"norms": list(self.norms)}
        return norms if norms_only else norms | {"queries": list(self.queries), "key weights": list(self.key_weights)}

    def used_by(self, implementation: "Implementation | str") -> list[Tensor]:
        """The leaves that the stream of this implementation reads: the standard residual has norms only."""
        kinds = self.by_kind(norms_only=implementation == "standard")
        return [leaf for kind in kinds.values() for leaf in kind]

    def residual(self, per_block: int, recompute: bool) -> BlockAttnRes:
        """blockres's module around these parameters, built once."""
        if (per_block, recompute) not in self._residuals:
            dim, sublayers = len(self.queries[0]), len(self.norms)
            residual = BlockAttnRes(dim, sublayers, per_block, eps=EPS, device="meta", recompute=recompute)
            for index, aggregation in residual.aggregations.items():
                aggregation.query = self.queries[int(index)]
                aggregation.key_weight = self.key_weights[int(index)]
            self._residuals[per_block, recompute] = residual
        return self._residuals[per_block, recompute]

    def to(self, dtype: torch.dtype) -> "Parameters":
        """The same values in another dtype, as new leaves."""
        copy = object.__new__(Parameters)
        copy._residuals = {}
        for name in ("queries", "key_weights", "norms"):
            setattr(copy, name, [nn.Parameter(x.detach().to(dtype)) for x in getattr(self, name)])
        return copy


def run(stream: Stream, parameters: Parameters, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    for norm_weight in parameters.norms:
        stream.write(sublayer(stream.read(norm_weight)))
    return stream.read(None)


def open_stream(
    implementation: Implementation | str,
    parameters: Parameters,
    embedding: Tensor,
    per_block: int,
    norm: Norm = rms_norm,
    *,
    recompute: bool = False,
) -> Stream:
    """The stream of an implementation, or of `"standard"`, the plain sum."""
    if implementation == "standard":
        return StandardStream(embedding, norm)
    assert isinstance(implementation, Implementation)
    if implementation.name == "blockres":
        return BlockresStream(parameters, embedding, per_block, recompute)
    if implementation.two_phase:
        return TwoPhaseStream(implementation, parameters, embedding, per_block, norm)
    return OnePassStream(implementation, parameters, embedding, per_block, norm)


class StandardStream:
    """The residual that Attention Residuals replace: one running sum, one norm before each sublayer."""

    def __init__(self, embedding: Tensor, norm: Norm) -> None:
        self._sum, self._norm = embedding, norm

    def read(self, norm_weight: Tensor | None) -> Tensor:
        return self._sum if norm_weight is None else self._norm(self._sum, norm_weight)

    def write(self, update: Tensor) -> None:
        self._sum = self._sum + update


class _BlockStream:
    """The sources, the open block's sum, and the position."""

    def __init__(self, parameters: Parameters, embedding: Tensor, per_block: int) -> None:
        self._parameters, self._per_block = parameters, per_block
        self._sources: list[Tensor] = [embedding]
        self._partial: Tensor | None = None
        self._position = 0

    def _advance(self, partial: Tensor) -> None:
        self._position += 1
        self._partial = partial
        if self._position % self._per_block == 0:
            self._sources = [*self._sources, partial]
            self._partial = None


class OnePassStream(_BlockStream):
    """Every read aggregates all sources."""

    def __init__(
        self, implementation: Implementation, parameters: Parameters, embedding: Tensor, per_block: int, norm: Norm
    ) -> None:
        super().__init__(parameters, embedding, per_block)
        self._implementation, self._norm = implementation, norm

    def read(self, norm_weight: Tensor | None) -> Tensor:
        sources = self._sources if self._partial is None else [*self._sources, self._partial]
        query, key_weight = (x[self._position] for x in (self._parameters.queries, self._parameters.key_weights))
        fused = norm_weight if self._implementation.fuses_norm else None
        out = self._implementation.aggregate(sources, query, key_weight, fused)
        return out if norm_weight is None or fused is not None else self._norm(out, norm_weight)

    def write(self, update: Tensor) -> None:
        self._advance(update if self._partial is None else self._partial + update)


class TwoPhaseStream(_BlockStream):
    """Phase 1 for all queries when a block opens; phase 2 for each sublayer after the first."""

    def __init__(
        self, implementation: Implementation, parameters: Parameters, embedding: Tensor, per_block: int, norm: Norm
    ) -> None:
        super().__init__(parameters, embedding, per_block)
        assert implementation.inter is not None
        assert implementation.merge is not None
        self._inter, self._merge, self._norm = implementation.inter, implementation.merge, norm
        self._update: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._lse: tuple[Tensor, ...] = ()

    def read(self, norm_weight: Tensor | None) -> Tensor:
        index = self._position % self._per_block
        if index == 0:
            self._open_block()
            return self._normalised(self._outputs[0], norm_weight)
        queries, key_weights = self._parameters.queries, self._parameters.key_weights
        assert self._partial is not None
        h, self._partial = self._merge(
            self._outputs[index],
            self._lse[index],
            self._partial,
            self._update,
            queries[self._position],
            key_weights[self._position],
            None,
        )
        self._update = None
        return self._normalised(h, norm_weight)

    def write(self, update: Tensor) -> None:
        closes = (self._position + 1) % self._per_block == 0
        if self._partial is None or closes:
            self._advance(update if self._partial is None else self._partial + update)
        else:
            self._position += 1
            self._update = update

    def _open_block(self) -> None:
        block = slice(self._position, self._position + self._per_block)
        outputs, lse = self._inter(
            self._sources,
            torch.stack(self._parameters.queries[block]),
            torch.stack(self._parameters.key_weights[block]),
        )
        self._outputs, self._lse = outputs.unbind(0), lse.unbind(0)

    def _normalised(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)


class BlockresStream:
    """What users of blockres run: `BlockAttnRes`, with these parameters."""

    def __init__(
        self, parameters: Parameters, embedding: Tensor, per_block: int, recompute: bool, bank: Bank | None = None
    ) -> None:
        self._stream = parameters.residual(per_block, recompute).stream(embedding, bank=bank)

    def read(self, norm_weight: Tensor | None) -> Tensor:
        return self._stream.read(None if norm_weight is None else (norm_weight, EPS))

    def write(self, update: Tensor) -> None:
        self._stream.write(update)
