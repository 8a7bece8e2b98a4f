"""Count what a whole training stack moves and keeps, forward and backward, everything around the sublayers included.

    python -m bench.stack                                  # 128 sublayers in 8 blocks, and 48 in 4; blockres
    python -m bench.stack --implementation all             # beside the textbook formula and the packages installed
    python -m bench.stack --stack 128x16 --parts           # where the bytes go
    python -m bench.stack --stack 48x12 --dim 4096         # kernels choose by the width: wide rows may be read twice

Kernels run in Triton's interpreter on a few tokens, so no GPU is needed; see `bench.counting` for what is counted and
how. The unit is d, one row set `[tokens, dim]` in bfloat16, per sublayer. Sublayers are stand-ins: their own traffic,
and what they would keep for backward, is not counted. Everything else is: adds, norms, casts, stacks, autograd's
accumulation.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import environment
from bench.interpreted import peer, require_interpreter

require_interpreter()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.cases import relative_error  # noqa: E402
from bench.counting import TOKENS, Ledger, next_prime  # noqa: E402
from bench.implementations import REGISTRY, Implementation, Missing, eager, find, rms_norm  # noqa: E402
from bench.streams import Parameters, StackShape, StandardStream, Stream, open_stream, run  # noqa: E402
from bench.tables import markdown, number  # noqa: E402

DTYPE = torch.bfloat16
STACKS = ("128x16", "48x12")
IDEAL, STANDARD, RECOMPUTE = "standard, ideally fused", "standard, eager add", "blockres, recompute"
NOT_COUNTED = ("compiled",)  # what Inductor fuses on a CPU is not what it fuses on a GPU


@dataclass(frozen=True)
class Count:
    """Of one stack by one implementation; `ledger` holds the parts, `kept` d per sublayer, `error` against float64."""

    name: str
    shape: StackShape
    ledger: Ledger
    kept: float
    error: float

    def per_sublayer(self, phase: str | None = None, kind: str = "rows") -> float:
        return self.ledger.units(kind, DTYPE, phase) / self.shape.sublayers

    def launches(self, phase: str) -> tuple[float, float]:
        """Per sublayer: kernels, and operations of PyTorch."""
        kernels, operations = self.ledger.launches(phase)
        return kernels / self.shape.sublayers, operations / self.shape.sublayers

    def row(self, stack: str) -> dict[str, Any]:
        """As JSON holds it."""
        phases = {phase: self.per_sublayer(phase) for phase in ("forward", "backward")}
        launches = {f"kernels {phase}": self.launches(phase)[0] for phase in phases}
        total = self.per_sublayer()
        return {
            "implementation": self.name,
            "stack": stack,
            "dim": self.shape.dim,
            **phases,
            "total": total,
            "kept": self.kept,
        } | launches


def names() -> list[str]:
    """All that can be counted here."""
    found = [name for name in REGISTRY if name not in NOT_COUNTED and isinstance(find(name), Implementation)]
    return [IDEAL, STANDARD, *found[:1], RECOMPUTE, *found[1:]]


def count(name: str, shape: StackShape) -> Count:
    """Run forward and backward of one stack once, and count.

    Raises:
        ValueError: where there is no such implementation here.
    """
    torch.manual_seed(0)
    parameters = Parameters(shape, DTYPE, "cpu")
    embedding = torch.randn(shape.tokens, shape.dim).to(DTYPE).requires_grad_()
    upstream = torch.randn(shape.tokens, shape.dim).to(DTYPE)
    ledger = Ledger(shape.tokens, shape.dim)
    if name in ("blockres", RECOMPUTE):
        parameters.residual(shape.per_block, name == RECOMPUTE)  # a network is built once, not in every step
    with peer(name):
        with ledger.phase("forward"):
            out = run(_open(name, parameters, embedding, shape, ledger), parameters, ledger.sublayer)
        gc.collect()
        kept = (ledger.kept(DTYPE) - 1) / shape.sublayers  # without the output itself
        used = [embedding, *parameters.used_by("standard" if name in (IDEAL, STANDARD) else name)]
        with ledger.phase("backward"):
            gradients = torch.autograd.grad(out, used, upstream)
    error = _error(name, parameters, embedding, upstream, shape, (out, gradients[0]))
    return Count(name, shape, ledger, kept, error)


def _open(name: str, parameters: Parameters, embedding: Tensor, shape: StackShape, ledger: Ledger) -> Stream:
    if name == IDEAL:
        return _IdealStream(embedding, ledger)
    if name == STANDARD:
        return StandardStream(embedding, ledger.rms_norm)
    implementation = find("blockres" if name == RECOMPUTE else name)
    if isinstance(implementation, Missing):
        raise ValueError(f"{implementation.name} is {implementation.reason}")
    return open_stream(
        implementation, parameters, embedding, shape.per_block, ledger.rms_norm, recompute=name == RECOMPUTE
    )


class _IdealStream:
    """The standard residual with the add and the norm in one kernel."""

    def __init__(self, embedding: Tensor, ledger: Ledger) -> None:
        self._sum, self._ledger = embedding, ledger
        self._update: Tensor | None = None

    def read(self, norm_weight: Tensor | None) -> Tensor:
        if norm_weight is None:
            return self._sum if self._update is None else self._sum + self._update
        if self._update is None:
            return self._ledger.rms_norm(self._sum, norm_weight)
        self._sum, out = self._ledger.add_rms_norm(self._sum, self._update, norm_weight)
        return out

    def write(self, update: Tensor) -> None:
        self._update = update


def _error(
    name: str, parameters: Parameters, embedding: Tensor, upstream: Tensor, shape: StackShape, found: tuple[Tensor, ...]
) -> float:
    """Of the output and of the embedding's gradient, the worse one, relative to the formula in float64."""
    wide, source = parameters.to(torch.float64), embedding.detach().double().requires_grad_()
    stream = (
        StandardStream(source, rms_norm)
        if name in (IDEAL, STANDARD)
        else open_stream(eager(), wide, source, shape.per_block)
    )
    out = run(stream, wide, lambda x: 0.5 * x.flip(-1))
    (gradient,) = torch.autograd.grad(out, source, upstream.double())
    return max(relative_error(x, wanted) for x, wanted in zip(found, (out.detach(), gradient), strict=True))


def table(counts: list[Count]) -> str:
    header = (
        "",
        "forward",
        "backward",
        "d / sublayer",
        "kept",
        "kernels fwd",
        "bwd",
        "PyTorch ops",
        "statistics",
        "error",
    )
    rows = [
        (
            c.name,
            *(number(c.per_sublayer(phase)) for phase in ("forward", "backward", None)),
            number(c.kept),
            *(number(c.launches(phase)[0]) for phase in ("forward", "backward")),
            number(sum(c.launches(phase)[1] for phase in ("forward", "backward"))),
            number(c.per_sublayer(kind="statistics") * c.shape.dim, 2),
            f"{c.error:.0e}",
        )
        for c in counts
    ]
    return markdown(header, rows)


def parts(c: Count) -> str:
    rows = [
        (f"{phase}: {name}", number(units / c.shape.sublayers))
        for (phase, name), units in c.ledger.parts(DTYPE).items()
        if units
    ]
    return markdown((c.name, "d / sublayer"), rows)


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", action="append", help="sublayers x sublayers per block; may be given again")
    parser.add_argument("--implementation", action="append", help="a name, or all that is installed")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="at least; the next suitable prime is taken")
    parser.add_argument("--parts", action="store_true", help="where the bytes go")
    parser.add_argument("--json", type=Path, help="write the table there, for bench.report")
    options = parser.parse_args(arguments)
    rows: list[dict] = []
    wanted = options.implementation or [IDEAL, STANDARD, "blockres", RECOMPUTE]
    say(environment.summary(environment.describe()))
    for stack in options.stack or STACKS:
        sublayers, per_block = (int(size) for size in stack.split("x"))
        tokens = next_prime(options.tokens, options.dim, per_block)
        shape = StackShape(sublayers, per_block, tokens, options.dim)
        say(f"\n{sublayers} sublayers, {per_block} per block, bfloat16, counted at {tokens} tokens of {options.dim}\n")
        counts = []
        for name in names() if wanted == ["all"] else wanted:
            print(f"counting {name}", file=sys.stderr, flush=True)
            counts.append(count(name, shape))
            rows.append(counts[-1].row(stack))
            environment.save(options.json, "stack", rows)
            if options.parts:
                say(parts(counts[-1]) + "\n")
        say(table(counts))


if __name__ == "__main__":
    main()
