"""A curve in characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_chart(values: Sequence[float], height: int, *, first: int, last: int) -> Iterator[str]:
    """Lines of a chart of columns, with its axes; the lower edge is 0, the upper one 1 or the largest value.

    Args:
        values: not negative, one a column.
        height: lines of the columns.
        first: what the axis below begins with.
        last: what it ends with.
    """
    top = max(1.0, *values)
    labels = {0: f"{top:.3g}", height - 1: "0"}
    margin = max(len(label) for label in labels.values())
    for line in range(height):
        below = height - 1 - line
        filled = [round(8 * height * value / top) - 8 * below for value in values]
        columns = "".join(_EIGHTHS[min(8, max(0, eighths))] for eighths in filled)
        yield f"{labels.get(line, ''):>{margin}} ┤{columns}".rstrip()
    yield f"{'':>{margin}} └{'─' * len(values)}"
    space = len(values) - len(str(first)) - len(str(last))
    yield f"{'':>{margin}}  {first}{' ' * max(1, space)}{last}"
