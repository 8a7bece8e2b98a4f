"""What depends on a GPU's limits: how a shape is cut up for each kernel, and why.

Every choice is a function of sizes and dtypes alone, so it is made, and tested, without a GPU.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton

from .sources import Tile, tile_of

BUCKETS = (1, 2, 3, 5, 9, 16, 32)
"""Numbers of sources that a kernel is compiled for: the embedding and 0, 1, 2, 4 or 8 blocks, then powers of two.

Pointers are unrolled up to the bucket, so each bucket is a compilation; a source beyond the real number is jumped over.
"""
MAX_SOURCES = BUCKETS[-1]


def bucket(sources: int) -> int:
    """The smallest bucket that holds this many sources (at most `MAX_SOURCES`)."""
    return next(size for size in BUCKETS if size >= sources)


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; few where they are interpreted, one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def groups(sources: int) -> list[tuple[int, int]]:
    """The sources of each launch, as (start, stop)."""
    return [(start, min(start + MAX_SOURCES, sources)) for start in range(0, sources, MAX_SOURCES)]


def lanes() -> int:
    """Threads of a warp: under HIP those of CDNA, which is all that `bench.resources` compiles for."""
    return 64 if torch.version.hip else 32


def options(warps: int) -> dict[str, int]:
    """Options of a launch. Left to itself, NVIDIA's assembler may spill so that more programs could run at a time."""
    limit = {"maxnreg": min(255, 2048 // warps)} if lanes() == 32 else {}
    return {"num_warps": warps, "num_stages": 1, **limit}


def persistent(tokens: int, resident: int, device: torch.device) -> int:
    """Programs that stride over the tokens: as many as run at a time.

    Their loops over tokens say `disable_licm` where compilers would otherwise bring what is the same for every token,
    keys and addresses above all, into registers before the loop, and keep it there.
    """
    return min(tokens, multiprocessors(device) * resident)


def persistent_with_sums(tokens: int, resident: int, device: torch.device) -> int:
    """As `persistent`, for programs that leave a row of sums: beyond one a multiprocessor, each for 16 tokens."""
    processors = multiprocessors(device)
    return min(tokens, max(processors, min(processors * resident, tokens // 16)))


# --- one aggregation -------------------------------------------------------------------------------------------------
#
# 256 threads at 255 registers fill a multiprocessor, so `256 // threads` programs of any kernel run on one. Few threads
# with many elements each leave fewer lanes idle at the end of a row and make sums over D cheaper; what bounds them are
# registers. How many of the 255 are free for rows was read off `python -m bench.resources`: the most for which nothing
# spills on any target. Enough rows are loaded ahead to keep 48 KB on their way to a multiprocessor, which hides the
# latency of its share of 4 TB/s.

_IN_FLIGHT = 48 * 1024


@dataclass(frozen=True)
class Forward:
    """`ahead`: rows loaded before they are needed. `holds_key`: `q * w` stays in registers; else it is read per row."""

    tile: Tile
    warps: int
    ahead: int
    holds_key: bool
    resident: int


@dataclass(frozen=True)
class Backward:
    """`held`: rows stay in registers between their two uses. `ahead`: rows loaded early, in either pass over them."""

    tile: Tile
    warps: int
    held: bool
    ahead: tuple[int, int]
    slices: int
    resident: int


@dataclass(frozen=True)
class _Cut:
    """A row, or `columns` of it, dealt out to threads that load 16 bytes at a time."""

    dim: int
    columns: int
    itemsize: int
    threads: int

    @property
    def tile(self) -> Tile:
        width = self.threads * 16 // self.itemsize
        return Tile(self.dim, width, tuple(range(-(-self.columns // width))))

    @property
    def stored(self) -> int:
        """Registers of a thread that a row takes in the storage dtype."""
        return len(self.tile.chunks) * 4

    @property
    def computed(self) -> int:
        """Registers of a thread that a row takes in the compute dtype."""
        return self.stored * max(4 // self.itemsize, 1)

    def ahead(self, registers: int, computed_rows: int, stored_rows: int, most: int, beside: int = 8) -> int:
        """Rows that so many registers let a thread load ahead where it holds others; negative where those do not fit.

        `beside`: registers that each row ahead takes beside its own.
        """
        free = registers - computed_rows * self.computed - stored_rows * self.stored
        useful = -(-_IN_FLIGHT // (256 // self.threads * self.columns * self.itemsize))
        return min(free // (self.stored + beside), most, useful)


def _cuts(dim: int, columns: int, itemsize: int, lanes: int) -> list[_Cut]:
    return [_Cut(dim, columns, itemsize, threads) for threads in (32, 64, 128, 256) if threads >= lanes]


@functools.cache
def attn_res_forward(dim: int, itemsize: int, lanes: int) -> Forward:
    """The mixture, `q * w` and the row at work are held in the compute dtype, the rows ahead as they are stored.

    Where that leaves no room for rows ahead, `q * w` is made anew for every row.
    """
    return _one_pass(dim, itemsize, lanes, 224)


def _one_pass(dim: int, itemsize: int, lanes: int, registers: int) -> Forward:
    """`registers`: of a thread, for rows."""
    cuts = _cuts(dim, dim, itemsize, lanes)
    for cut in cuts:
        ahead = cut.ahead(registers, 3, 0, 6, beside=0)
        if ahead >= 2:
            return Forward(cut.tile, cut.threads // lanes, ahead, True, 256 // cut.threads)
    return Forward(cuts[-1].tile, 256 // lanes, max(cuts[-1].ahead(150, 2, 0, 2), 0), False, 1)


@functools.cache
def attn_res_backward(dim: int, itemsize: int, slots: int, norm: bool, lanes: int) -> Backward:
    """The second pass holds `q * w`, the sums, h, g and v - h (five or six rows); the first does without the last two.

    Code for held rows is repeated for each source, so there are at most 16 of them.
    """
    cuts = _cuts(dim, dim, itemsize, lanes)
    for cut in cuts:
        if slots <= 16 and cut.ahead(218 - 11 * slots // 4, 5 + norm, slots, 0) >= 0:
            return Backward(cut.tile, cut.threads // lanes, True, (0, 0), 1, 256 // cut.threads)
    slices = 0
    while True:
        slices += 1
        for cut in _cuts(dim, -(-dim // slices), itemsize, lanes):
            start = 0 if slices == 1 else 4 + 4 * norm  # a slice's first column takes part in every address
            ahead = cut.ahead(228 - start, 3 + norm, 1, 6), cut.ahead(196 - start, 5 + norm, 0, 1)
            if (ahead[0] >= 2 and ahead[1] >= 1) or (cut.threads == 256 and min(ahead) >= 0):
                columns = cut.tile.width * len(cut.tile.chunks)
                return Backward(cut.tile, cut.threads // lanes, False, ahead, -(-dim // columns), 256 // cut.threads)


# --- inference -------------------------------------------------------------------------------------------------------


@functools.cache
def attn_res_step(dim: int, itemsize: int, narrowest: int, lanes: int) -> Forward:
    """As one aggregation, over a bank whose elements have `itemsize` bytes, with fewer registers for rows: strides and
    the pointers of five tensors are kept as well.

    Where update or output are narrower than the bank, a chunk is so much wider that theirs are 16 bytes a thread too.
    """
    plan = _one_pass(dim, itemsize, lanes, 212)
    width = plan.tile.width * itemsize // narrowest
    return replace(plan, tile=tile_of(dim, width))


# --- phase 2 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeForward:
    tile: Tile
    options: dict[str, int]


@dataclass(frozen=True)
class MergeBackward:
    """`slices` programs share a token; each sums over the others' columns in tiles of `piece`, and holds `tile`."""

    tile: Tile
    piece: Tile
    slices: int
    warps: int
    resident: int


def attn_res_merge_forward(dim: int) -> MergeForward:
    """One row in one tile. 512 elements a warp are 16 bytes a lane in bf16, with 64 lanes too.

    The widest rows are left to the assembler, which spills a little where it is told to go to the end of its registers.
    """
    block = triton.next_power_of_2(dim)
    warps = min(max(block // 512, 1), 8)
    return MergeForward(tile_of(dim, block), options(warps) if dim <= 8192 else {"num_warps": warps})


@functools.cache
def attn_res_merge_backward(dim: int, itemsizes: tuple[int, ...], norm: bool, lanes: int) -> MergeBackward:
    """Output, partial, gradient and the sums for two parameters are five rows in registers, all of them at D = 8192.

    `itemsizes` are those of the rows. Rows of 4 bytes cannot wait for use as pairs in one register: with the norm,
    whose sums need a row more, they fit up to 7168. Rows of 8 bytes need twice the registers, so half the columns.
    A thread takes 16 columns, or 32 where it can: in a lone warp, or beside the sums over other slices, some spill.
    """
    widest, narrowest = max(*itemsizes, 4), min(itemsizes)
    fits = 8192 if max(itemsizes) == 2 or not norm else 7168
    columns = triton.next_power_of_2(max(dim, lanes)) if dim * widest <= fits * 4 else 4096 * 4 // widest
    slices = triton.cdiv(dim, columns)
    roomy = max(itemsizes) == 2 and slices == 1 and columns > 1024
    threads = min(max(columns // (32 if roomy else 16), lanes), 256)
    piece = min(columns, threads * 16 // narrowest)
    tiles = Tile(dim, columns, (0,)), Tile(dim, piece, (0,))
    return MergeBackward(*tiles, slices, threads // lanes, 256 // threads)


# --- phase 1 ---------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Tiles [queries, columns] and [sources, columns] of a kernel; a lane loads `vector` elements at a time."""

    dim: int
    queries: int
    sources: int
    columns: int
    vector: int


@dataclass(frozen=True)
class InterForward:
    """`held`: each row is read once, into `tile`, `group` queries at a time; else all is read twice, by `panel`.

    Either has its number of warps, and there are `resident` programs of the latter.
    """

    held: bool
    tile: Tile
    group: int
    panel: Panel
    warps: int
    panel_warps: int
    resident: int


@dataclass(frozen=True)
class InterBackward:
    """`whole`: one launch and one read; else a launch for products, in tiles `pairs`, before one for slices of D."""

    whole: bool
    panel: Panel
    pairs: Panel
    warps: int
    resident: int


@functools.cache
def attn_res_inter_forward(dim: int, itemsize: int, queries: int, sources: int, lanes: int) -> InterForward:
    """Up to 160 registers of a thread hold sources, 4 bytes an element: 5 rows of D = 7168, 9 of 4096.

    Of more than 9, whose scores take registers too, less than 16 rows of 2048; above D = 8192 none, for want of room
    beside the key and the mixture.

    Compilers widen rows of 2 bytes ahead of the loop over queries and keep them so. With fewer threads the sums over D,
    one for each query and source, cost less beside the products; with more of them there is more room. There are never
    more than find 16 bytes each in a row.
    """
    words, columns = sources * dim * max(itemsize, 4) // 4, triton.next_power_of_2(max(dim, 16))
    threads = next((t for t in (64, 128) if t >= lanes and words <= t * 96), 256)
    threads = min(threads, max(columns * itemsize // 16, 64))
    width = min(threads * 16 // itemsize, columns)
    group = min(queries, 2 if sources <= 9 else 1)
    pair = sources > 9 and queries > 16 and lanes == 32  # of warps: the scores alone fill the registers of one
    panel = _narrow_panel(dim, itemsize, queries, sources, lanes, sources > 9 and not pair)
    warps = threads // lanes, 2 if pair else 1
    held = words <= threads * 160 and (sources <= 9 or words < 16 * 2048) and dim <= 8192
    return InterForward(held, tile_of(dim, width), group, panel, *warps, 8 // warps[1])


@functools.cache
def attn_res_inter_backward(
    dim: int, itemsize: int, queries: int, sources: int, norm: bool, adds: bool, lanes: int
) -> InterBackward:
    """Whole where a thread's columns of all gradients, sources and sums leave two fifths of its registers for the rest.

    Such a kernel repeats its code for each query and source. From D = 768 its threads load 16 bytes each, which leaves
    room for 8 queries and 5 sources; narrower rows may be cut finer, to make room for more. The rest are mostly loads
    of keys on their way: with 8 queries at D = 2048, where the rows alone would fit, up to 104 bytes spill on sm_90 and
    sm_100, and with 9 sources in float32 up to 24 on sm_100.
    """
    columns = triton.next_power_of_2(max(dim, lanes))
    rows = 2 * queries + sources + 2 * norm + adds
    addresses = 3 * queries + (3 * sources if sources > 9 else 0)
    most = (147 - addresses) // (rows * max(itemsize // 4, 1))
    least = 16 // itemsize if dim >= 768 else 1
    each = max(columns // 256, min(16 // itemsize, columns // lanes), 1)
    while each > most and each > least and columns // each < 256:
        each //= 2
    fits = each <= most and queries * sources <= 160
    if fits and (dim < 768 or (queries <= 8 and sources <= 5)):
        powers = triton.next_power_of_2(queries), triton.next_power_of_2(sources)
        panel = Panel(dim, *powers, columns, min(each, 16 // itemsize))
        threads = columns // each
        return InterBackward(True, panel, panel, threads // lanes, 256 // threads)
    panel = _narrow_panel(dim, itemsize, queries, sources, lanes, False)
    pairs = _narrow_panel(dim, itemsize, queries, sources, lanes, norm and sources > 9)
    sizes = max(panel.queries, pairs.queries), max(panel.sources, pairs.sources)
    panel, pairs = (p._replace(queries=sizes[0], sources=sizes[1]) for p in (panel, pairs))
    return InterBackward(False, panel, pairs, 1, 8)


def _narrow_panel(dim: int, itemsize: int, queries: int, sources: int, lanes: int, crowded: bool) -> Panel:
    """Tiles for one warp: 2 KB for up to 16 queries and sources, rows of 128 bytes; half as wide where `crowded`.

    There are at least as many rows as it takes for all lanes to load 16 bytes each.
    """
    rows = max(triton.next_power_of_2(max(queries, sources)), 16)
    columns = max(2048 // itemsize // rows // (2 if crowded else 1), 1)
    least = lanes * 16 // (columns * itemsize)
    queries, sources = (max(triton.next_power_of_2(n), least) for n in (queries, sources))
    return Panel(dim, queries, sources, columns, min(16 // itemsize, columns))


# --- cast ------------------------------------------------------------------------------------------------------------

CAST_BLOCK, CAST_WARPS = 4096, 4
"""32 elements a lane: two to four loads of 16 bytes are under way at once, and a hop of a few megabytes fills a GPU."""
