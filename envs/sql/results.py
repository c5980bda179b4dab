"""Results of queries, in the form in which they are compared."""

from __future__ import annotations

from agentrl.contrib.toolkit.sqlite import Row, Table
from agentrl.data.trajectory import Json


def canonical(table: Table, ordered: bool) -> list[Row]:
    """Rows for comparison: floats to six decimals; sorted unless the question asks for an order."""
    rows = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in table.rows]
    return rows if ordered else sorted(rows, key=lambda row: [_rank(value) for value in row])


def _rank(value: Json) -> tuple[int, float, str]:
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, (int, float)):
        return 1, float(value), ""
    return 2, 0.0, str(value)
