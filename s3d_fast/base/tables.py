"""Tables as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as aligned text; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def html_table(rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Return the rows as an HTML table, with a sentence below it; the first row is the header. All of it stays text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
