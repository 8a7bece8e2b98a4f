"""Markdown tables, aligned so that they can be read in a terminal too."""

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; columns of numbers stand to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    columns = range(len(header))
    widths = [max(3, *(len(row[i]) for row in cells)) for i in columns]
    right = [any(row[i][:1].isdigit() or row[i][:1] in set("+-±") for row in cells[1:]) for i in columns]

    def line(row: Sequence[str]) -> str:
        padded = [row[i].rjust(widths[i]) if right[i] else row[i].ljust(widths[i]) for i in columns]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (widths[i] + 1) + (":" if right[i] else "-") for i in columns)
    return "\n".join([line(cells[0]), f"|{rule}|", *(line(row) for row in cells[1:])])


def number(value: float | None, digits: int = 3) -> str:
    """With this many significant digits, and without an exponent."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    decimals = digits - 1 - int(f"{value:.{digits - 1}e}".split("e")[1])
    return f"{value:.{decimals}f}"
