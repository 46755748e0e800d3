"""Text from traces into HTML, as text: names may hold markup, control characters or ten thousand letters."""

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence

import polars as pl

from tracekit.model import units

MAX_TEXT = 200


def inert(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` on one line, with invisible characters made visible and its middle cut out beyond `limit`.

    Control characters and those that turn the direction of writing become '�', so that a name looks like what it is.

    >>> inert("a" * 50 + "z" * 50, 11)
    'aaaaa…zzzzz'
    """
    if len(text) > limit:
        kept = limit - 1
        text = text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :]
    if text.isprintable():  # nothing of _INVISIBLE is
        return text
    return "".join(" " if c in "\n\r\t" else "�" if unicodedata.category(c) in _INVISIBLE else c for c in text)


def escape(text: str | None, limit: int = MAX_TEXT) -> str:
    """Return `text` inert and with HTML's own characters escaped; '' for None.

    >>> escape("<script>alert('x')</script>")
    '&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;'
    """
    return "" if text is None else html.escape(inert(text, limit))


def without_commands(text: str) -> str:
    """Return lines of text in which GitHub's runner, which reads all that a step prints, finds no command to obey.

    It looks for "::" where a line begins and for "##[" anywhere (ActionCommand in its source). In JSON the latter can
    be written otherwise, and means the same.

    >>> without_commands("a ##[b]c")
    'a ## [b]c'
    """
    if text.startswith(("{", "[")):
        return text.replace("##[", r"##\u005b")
    return _COMMAND.sub(r"\g<0> ", text)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[bool] = ()) -> str:
    """Return an HTML table of plain strings, all escaped here; `right` says which columns are aligned as numbers."""
    sides = [' class="number"' if side else "" for side in right] or [""] * len(header)
    head = "".join(f"<th{side}>{escape(name)}</th>" for name, side in zip(header, sides, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row, sides, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<table class="tracekit"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def frame(table: pl.DataFrame) -> str:
    """Return a table as HTML, its numbers in readable units by the endings of the column names."""
    rows = ([cell(name, value) for name, value in zip(table.columns, row, strict=True)] for row in table.iter_rows())
    return html_table([heading(name) for name in table.columns], rows, right=[t.is_numeric() for t in table.dtypes])


def heading(column: str) -> str:
    """Return a column's name for people: without its unit, which stands with each number.

    >>> heading("exposed_communication_ns")
    'exposed communication'
    """
    for ending, spoken in (("_ns", ""), ("_bytes", ""), ("_ratio", " share"), ("_bytes_per_s", " bandwidth")):
        if column.endswith(ending):
            column = column.removesuffix(ending) + spoken
    return {"dur": "duration"}.get(column, column.replace("_", " "))


def cell(column: str, value: object) -> str:
    """Return a value as text, in the unit that its column's name ends with; an em dash where it is missing.

    >>> cell("exposed_ratio", 0.25)
    '25.0%'
    >>> cell("bytes", 3 << 20), cell("flops", 5.2e13)
    ('3 MiB', '52 TFLOP')
    """
    if value is None:
        return "—"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for ending, write in _WRITTEN:
            if column.endswith(ending) or column == ending[1:]:
                return write(value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_COMMAND = re.compile(r"##(?=\[)|^\s*:(?=:)", re.MULTILINE)
_WRITTEN = (
    ("_ns", units.duration),
    ("_bytes", units.size),
    ("_ratio", units.share),
    ("_bytes_per_s", units.rate),
    ("_flops", units.operations),
)
# Control characters, format characters (right-to-left overrides among them), surrogates, private use, unassigned.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn")
