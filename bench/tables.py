"""Markdown tables, aligned so that they can be read in a terminal too."""

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; the first column is text, all others are numbers and stand to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
    return "\n".join([line(cells[0]), f"|{rule}|", *(line(row) for row in cells[1:])])


def number(value: float | None, digits: int = 3) -> str:
    """With this many significant digits, and without an exponent."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    decimals = digits - 1 - int(f"{value:.{digits - 1}e}".split("e")[1])
    return f"{value:.{decimals}f}"
