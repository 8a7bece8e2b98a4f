"""How wide the accesses to global memory are that are in a compiled kernel, in bytes."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
_PTX = re.compile(r"\b(?P<kind>ld|st)\.global[\w.:]*?(?:\.v(?P<vector>\d))?\.b(?P<bits>\d+)")
_AMDGCN = re.compile(r"\b(?:global|buffer)_(?P<kind>load|store)_(?P<width>dwordx?\d?|u?short|u?byte)")
_PLACE = re.compile(r"\.loc\s+\d+ (\d+) (\d+)[^\n]*?(\w+\.py):")
_MADE = re.compile(
    r"%(\w+) = (tt\.addptr|tt\.splat|tt\.broadcast|tt\.expand_dims|ttg\.convert_layout|tt\.int_to_ptr|"
    r"arith\.select %\w+,) %(\w+)"
)
_ACCESS = re.compile(r"(?:tt\.(?:load|store) |buffer_load |buffer_store %\w+, )%(\w+).*loc\((#loc\d*)\)$")
TABLE = "an address in a table"
Place = tuple[str, int, int]  # file, line, column


def accesses(kernel: Any) -> dict[str, int]:
    """How often each width is in the code (`16 ld`: 40)."""
    return dict(Counter(f"{width} {kind}" for width, kind, _ in _instructions(kernel)))


def narrow_vector_accesses(kernel: Any) -> int:
    """Accesses below 16 bytes, less those of single numbers, of which the IR has exactly as many as the assembly."""
    narrow = sum(width < 16 for width, _, _ in _instructions(kernel))
    single = len(re.findall(r"tt\.(?:load|store) .*: !tt\.ptr<", kernel.asm["ttgir"]))
    return max(narrow - single, 0)


def narrowest_row_access(kernel: Any, rows: frozenset[str]) -> int | None:
    """The least width at which any of the arguments `rows`, or what an address in a table leads to, is accessed.

    Accesses are told apart by the place in the source that they come from: a place is theirs if any of its pointers is.
    """
    places = _row_places(kernel.asm["ttgir"], rows | {TABLE})
    return min((width for width, _, place in _instructions(kernel) if place in places), default=None)


def _instructions(kernel: Any) -> Iterator[tuple[int, str, Place | None]]:
    nvidia = "ptx" in kernel.asm
    place = None
    for line in kernel.asm["ptx" if nvidia else "amdgcn"].splitlines():
        if found := _PLACE.search(line):
            place = found[3], int(found[1]), int(found[2])
        elif nvidia and (found := _PTX.search(line)):
            yield int(found["vector"] or 1) * int(found["bits"]) // 8, found["kind"], place
        elif not nvidia and (found := _AMDGCN.search(line)):
            yield _WIDTHS[found["width"]], {"load": "ld", "store": "st"}[found["kind"]], place


def _row_places(ttgir: str, rows: frozenset[str]) -> set[Place]:
    locations = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.M))
    return {_innermost(location, locations) for origin, location in _accesses_by_origin(ttgir) if origin in rows}


def _accesses_by_origin(ttgir: str) -> Iterator[tuple[str | None, str]]:
    """The kernel's argument that each access's pointer was made of, and the name of its location.

    Line by line: the name of a value may be given to another one when the region that it was in has ended.
    """
    origin = dict(re.findall(r'%(\w+): !tt\.ptr<[^(]*?loc\("(\w+)"', ttgir))
    for line in ttgir.splitlines():
        if found := _MADE.search(line):
            result, operation, source = found.groups()
            origin[result] = TABLE if operation == "tt.int_to_ptr" else origin.get(source)
        for result, source in re.findall(r"%(\w+) = %(\w+)", line):  # what a loop carries
            origin[result] = origin.get(source)
        if found := _ACCESS.search(line):
            yield origin.get(found[1]), found[2]


def _innermost(location: str, locations: dict[str, str]) -> Place:
    text = locations[location]
    while not (found := re.match(r'"[^"]*?(\w+\.py)":(\d+):(\d+)', text)):
        text = locations[re.search(r"#loc\d*", text)[0]]  # type: ignore[index]
    return found[1], int(found[2]), int(found[3])
