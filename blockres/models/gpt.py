"""A small decoder-only language model on a Block AttnRes residual stream, whole or as the stages of a pipeline.

RMSNorm before every sublayer, rotary position embeddings, grouped-query attention, SwiGLU, no biases. Sublayers are
counted from 0 over the whole network: even ones are attentions, odd ones MLPs. Every parameter carries the **global**
index of its sublayer in its name, and its initial value depends on that name and on the seed alone: however the model
is split, the stages' parameters together are the unsplit model's, and so are their state dicts.

Letters: B batch, T tokens, D hidden size, H heads, K key-value heads, E head size.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blockres.modules import BlockAttnRes
from blockres.streams import Stream

Residual = Literal["block", "full", "standard"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model.

    Args:
        vocab_size: number of different tokens.
        dim: hidden size D.
        num_layers: transformer layers; each is two sublayers, an attention and an MLP.
        num_heads: query heads H; D / H must be an even number.
        num_kv_heads: key-value heads K, a divisor of H.
        mlp_dim: inner width of the SwiGLU MLP; None is 8/3 of D, rounded up to a multiple of 32.
        residual: block (Block AttnRes), full (every sublayer is a block) or standard (a plain sum).
        sublayers_per_block: S, where `residual` is `block`; an attention and an MLP are two sublayers.
        tie_weights: the output projection uses the embedding's matrix.
        rope_theta: base of the rotary frequencies.
        norm_eps: of all RMSNorms.

    Raises:
        ValueError: where a size is not positive or does not divide as said above.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_dim: int | None = None
    residual: Residual = "block"
    sublayers_per_block: int = 4
    tie_weights: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "sublayers_per_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mlp_dim is not None and self.mlp_dim < 1:
            raise ValueError(f"mlp_dim must be at least 1, or None for 8/3 of dim, got {self.mlp_dim}")
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim / num_heads must be an even number (rotary embeddings turn pairs), "
                f"got dim={self.dim} and num_heads={self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.residual not in get_args(Residual):
            raise ValueError(f"residual is one of {', '.join(get_args(Residual))}, got {self.residual!r}")

    @property
    def num_sublayers(self) -> int:
        return 2 * self.num_layers

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def inner_dim(self) -> int:
        """Width of the MLP."""
        return self.mlp_dim or -(-8 * self.dim // (3 * 32)) * 32

    @property
    def block(self) -> int | None:
        """Sublayers per block as `BlockAttnRes` and `BlockRouting` take it: 1 is full AttnRes, None the plain sum."""
        return {"block": self.sublayers_per_block, "full": 1, "standard": None}[self.residual]


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary embeddings, of an input that `norm` has been applied to."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        kv_dim = config.num_kv_heads * config.head_dim
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key_value = nn.Linear(config.dim, 2 * kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        query = rearrange(self.query(x), "b t (h d) -> b h t d", h=self.num_heads)
        key, value = rearrange(self.key_value(x), "b t (kv h d) -> kv b h t d", kv=2, h=self.num_kv_heads)
        mixed = F.scaled_dot_product_attention(
            _rotate(query, rotary), _rotate(key, rotary), value, is_causal=True, enable_gqa=True
        )
        return self.out(rearrange(mixed, "b h t d -> b t (h d)"))


class MLP(nn.Module):
    """SwiGLU, of an input that `norm` has been applied to."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.gate_up = nn.Linear(config.dim, 2 * config.inner_dim, bias=False)
        self.out = nn.Linear(config.inner_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class GPT(nn.Module):
    """Sublayers `start … stop - 1` of the model, with the embedding where `start` is 0 and the head where `stop` is L.

    Called as a pipeline stage's module: the first takes tokens `[B, T]` (int64), every other one `(sources, partial)`;
    the last returns logits `[B, T, vocab_size]`, every other one `(sources, partial)`, all `[B, T, D]` in `dtype`.

    Args:
        start, stop: the part of the network; all of it by default.
        seed: of the initial values.
        dtype: of the residual stream and of the sublayers' work. Parameters are float64 where it is float64 and
            float32 otherwise; a narrower dtype computes under autocast.
        device: where the parameters are.
        activation_checkpointing: of a sublayer keep the inputs alone, and run it again in the backward.

    Raises:
        ValueError: where the part is empty or outside of the network.
    """

    def __init__(
        self,
        config: GPTConfig,
        start: int = 0,
        stop: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        stop = config.num_sublayers if stop is None else stop
        if not 0 <= start < stop <= config.num_sublayers:
            raise ValueError(
                f"a part of this model runs sublayers start … stop - 1 with 0 <= start < stop <= "
                f"{config.num_sublayers}, got start={start}, stop={stop}"
            )
        self.config, self.start, self.stop, self.dtype = config, start, stop, dtype
        self.activation_checkpointing = activation_checkpointing
        self.depth_probe: Callable[[int, Tensor], None] | None = None
        self._build()
        self.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        for name, parameter in self.named_parameters():
            _initialise(name, parameter, seed, config)

    def _build(self) -> None:
        config = self.config
        tied_head = config.tie_weights and self.is_last
        embedded = self.is_first or tied_head
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if embedded else None
        self.residual = BlockAttnRes(
            config.dim,
            config.num_sublayers,
            config.block,
            start=self.start,
            stop=self.stop,
            eps=config.norm_eps,
        )
        self.sublayers = nn.ModuleDict(
            {str(l): (MLP if l % 2 else Attention)(config) for l in range(self.start, self.stop)}
        )
        self.norm = nn.RMSNorm(config.dim, config.norm_eps) if self.is_last else None
        separate_head = self.is_last and not tied_head
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if separate_head else None

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.config.num_sublayers

    def forward(
        self, inputs: Tensor | tuple[Tensor, ...], partial: Tensor | None = None
    ) -> Tensor | tuple[tuple[Tensor, ...], Tensor | None]:
        stream = self._open(inputs, partial)
        sources, running = stream.state()
        length = (sources[0] if running is None else running).shape[1]
        rotary = _rotary_table(length, self.config, self.dtype, self._device)
        for index, sublayer in self.sublayers.items():
            self._probe(int(index), stream)
            state = stream.read(_norm_of(sublayer))
            with self._autocast():
                update = self._run(sublayer, state, rotary)
            stream.write(update)
        return stream.state() if self.norm is None else self._logits(stream, self.norm)

    def _run(self, sublayer: nn.Module, state: Tensor, rotary: Tensor) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(sublayer, state, rotary, use_reentrant=False)
        return sublayer(state, rotary)

    def _autocast(self) -> torch.autocast:
        narrow = self.dtype.itemsize < 4
        return torch.autocast(self._device.type, self.dtype if narrow else None, enabled=narrow)

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _open(self, inputs: Tensor | tuple[Tensor, ...], partial: Tensor | None) -> Stream:
        if not isinstance(inputs, Tensor):
            return self.residual.stream(sources=inputs, partial=partial)
        assert self.embedding is not None
        return self.residual.stream(self.embedding(inputs).to(self.dtype))

    def _logits(self, stream: Stream, norm: nn.RMSNorm) -> Tensor:
        self._probe(self.stop, stream)
        projection = self.embedding if self.head is None else self.head
        assert projection is not None
        state = stream.read(norm)
        with self._autocast():
            return F.linear(state, projection.weight)

    def _probe(self, index: int, stream: Stream) -> None:
        if self.depth_probe is not None:
            self.depth_probe(index, stream.weights())


class Probed(Protocol):
    """A model, or a part of one, that can be asked for its weights: `GPT`, or what `pipeline_part` returns."""

    depth_probe: Callable[[int, Tensor], None] | None


@contextmanager
def probe_depth(parts: Sequence[Probed], probe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While it lasts, every forward of `parts` hands `probe` each aggregation's index and softmax weights `[N, B, T]`.

    The weights are in the order of the sources, the open block's partial sum last.
    """
    for part in parts:
        part.depth_probe = probe
    try:
        yield
    finally:
        for part in parts:
            part.depth_probe = None


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits `[B, T, vocab_size]` and tokens `[B, T]`, in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def _norm_of(sublayer: nn.Module) -> nn.RMSNorm:
    assert isinstance(sublayer, Attention | MLP)
    return sublayer.norm


def _rotary_table(length: int, config: GPTConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines `[2, T, E / 2]` of each position's angles."""
    wide = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, config.head_dim, 2, device=device, dtype=wide)
    angles = torch.outer(
        torch.arange(length, device=device, dtype=wide), config.rope_theta ** (-pairs / config.head_dim)
    )
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _initialise(name: str, parameter: nn.Parameter, seed: int, config: GPTConfig) -> None:
    """Fill a matrix from a generator seeded by its name; vectors keep what their modules gave them."""
    if parameter.ndim < 2:
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = parameter.shape[1] ** -0.5
    if name.endswith("out.weight"):
        std /= config.num_sublayers**0.5
    values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        parameter.copy_(std * values)
