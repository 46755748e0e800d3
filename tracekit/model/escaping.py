"""HTML that shows names from traces as text: names may hold markup, control characters or ten thousand letters.

Templates lie in tracekit/report/templates. Each value in them is made inert and escaped, unless the template
marks it as safe: a fragment that another template made, or a style sheet or script of the package.
"""

import functools
import html
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from tracekit.model import units

if TYPE_CHECKING:
    import polars as pl
    from jinja2 import Environment

MAX_TEXT = 200


def inert(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` on one line, with invisible characters made visible and its middle cut out beyond `limit`.

    Control characters and those that turn the direction of writing become '�', so that a name looks like what it is.

    >>> inert("a" * 50 + "z" * 50, 11)
    'aaaaa…zzzzz'
    """
    if len(text) > limit:
        length = limit - 1
        text = text[: length - length // 2] + "…" + text[len(text) - length // 2 :]
    if text.isprintable():  # nothing of _INVISIBLE is
        return text
    text = re.sub(r"[\n\r\t\u2028\u2029]", " ", text)
    return "".join("�" if unicodedata.category(c) in _INVISIBLE else c for c in text)


def escape(text: str | None, limit: int = MAX_TEXT) -> str:
    """Return `text` inert and with HTML's own characters escaped; '' for None.

    >>> escape("<script>alert('x')</script>")
    '&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;'
    """
    # By its number: Plotly knows no name of the quotation mark.
    return "" if text is None else html.escape(inert(text, limit)).replace("&quot;", "&#34;")


def without_commands(text: str) -> str:
    r"""Return lines of text without commands to CI: runners obey commands in all that a step prints.

    GitHub's looks for "::" at the start of a line and for "##[" anywhere (ActionCommand in its source), Azure's for
    "##vso[", TeamCity for "##teamcity[". In JSON these are written as escape sequences with the same meaning.

    >>> without_commands("a ##[b]c"), without_commands("[a]\n::error::b")
    ('a ## [b]c', '[a]\n: :error::b')
    """
    # Text may begin like JSON, too: no line of JSON begins with a colon, so the first rule is for both.
    hashes = r"#\\u0023" if text.startswith(("{", "[")) else "## "
    return _OF_RUNNERS.sub(hashes, _LINE_COMMAND.sub(r"\g<0> ", text))


def csv_cell(text: str) -> str:
    """Text of a CSV cell that no spreadsheet takes for a formula, without control characters but line ends and tabs.

    >>> csv_cell("=1+1"), csv_cell("-121 ms to +87 ms")
    ("'=1+1", '-121 ms to +87 ms')
    """
    text = re.sub(CONTROLS, "�", text)
    return f"'{text}" if re.match(FORMULA, text) and not _SIGNED_NUMBER.fullmatch(text) else text


def json_text(value: object, indent: int = 2) -> str:
    r"""JSON of a value, on lines; control characters, lone surrogates and what turns the direction are written as \u….

    Raises ValueError for NaN and infinity, which JSON has not.

    >>> json_text("µs \u202e")
    '"µs \\u202e"\n'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _INVISIBLE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def fragment(name: str, *values: object) -> str:
    """Return a piece of HTML from the macro `name` of fragments.html.j2."""
    macro = getattr(_environment().get_template("fragments.html.j2").module, name)
    return str(macro(*values))  # a Markup would escape what a caller adds to it


def page(template: str, **values: object) -> str:
    """Return an HTML page from one of the package's templates."""
    return _environment().get_template(template).render(values)


def asset(name: str) -> str:
    """Return a style sheet or script of the package as it is, for a style or script element."""
    return resources.files("tracekit.report").joinpath("templates", name).read_text(encoding="utf-8")


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[bool] = (),
    classes: Iterable[Sequence[str]] | None = None,
) -> str:
    """Return an HTML table of plain strings.

    `right` flags the columns that are aligned as numbers; `classes` holds the CSS class of each cell, or ''.
    """
    sides = ["number" if side else "" for side in right] or [""] * len(header)
    cells = (
        [(cell, f"{side} {kind}".strip()) for cell, side, kind in zip(row, sides, kinds, strict=True)]
        for row, kinds in zip(rows, classes or itertools.repeat([""] * len(sides)), strict=classes is not None)
    )
    return fragment("table", list(zip(header, sides, strict=True)), cells)


def frame(table: "pl.DataFrame") -> str:
    """Return a table as HTML, its numbers in readable units by the endings of the column names."""
    rows = ([cell(name, value) for name, value in zip(table.columns, row, strict=True)] for row in table.iter_rows())
    return html_table([heading(name) for name in table.columns], rows, right=[t.is_numeric() for t in table.dtypes])


def heading(column: str) -> str:
    """Return a column's name as a heading, without its unit: each number carries the unit.

    >>> heading("exposed_communication_ns")
    'exposed communication'
    """
    for ending, word in _HEADING_ENDINGS:
        if column.endswith(ending):
            column = column.removesuffix(ending) + word
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


@functools.cache
def _environment() -> "Environment":
    # Loaded where HTML is rendered: Jinja takes a twentieth of a second.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("tracekit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else inert("" if value is None else str(value)),
    )
    environment.filters["cut"] = lambda text, limit: Markup(escape(text, limit))  # noqa: S704  # escaped here
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
"""A pattern that Python and Polars read: control characters but line ends and tabs, and what turns the direction."""
FORMULA = r"^[=+\-@\t\r]"
"""How a cell begins that a spreadsheet runs; names in tables come from traces."""
_QUANTITY = r"[+-]?\d[\d.,]*(?: ?[\w%/]+)?"
_SIGNED_NUMBER = re.compile(rf"{_QUANTITY}(?: to {_QUANTITY})?")
_INVISIBLE_IN_JSON = re.compile(r"[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_OF_RUNNERS = re.compile(r"##(?=\w*\[)")
_LINE_COMMAND = re.compile(r"^\s*:(?=:)", re.MULTILINE)
_WRITTEN = (
    ("_ns", units.duration),
    ("_bytes", units.size),
    ("_ratio", units.share),
    ("_bytes_per_s", units.rate),
    ("_flops", units.operations),
    ("_mhz", "{:,.0f} MHz".format),
    ("power_w", "{:,.0f} W".format),
    ("power_limit_w", "{:,.0f} W".format),
    ("temperature_c", "{:,.0f} °C".format),
)
_HEADING_ENDINGS = (
    ("_ns", ""),
    ("_bytes", ""),
    ("_ratio", " share"),
    ("_bytes_per_s", " bandwidth"),
    ("tflops_per_s", "FLOP/s"),
    ("tbytes_per_s", "bandwidth"),
    ("_mhz", ""),
    ("power_w", "power"),
    ("power_limit_w", "power limit"),
    ("temperature_c", "temperature"),
)
# Control characters, format characters (right-to-left overrides among them), surrogates, private use, unassigned.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn")
