"""Document -> Markdown, in which texts from traces stay text: names may hold markup, mentions, references and links."""

import re
from collections.abc import Sequence

from tracekit.model import escaping
from tracekit.report.document import Cells, Definitions, Document, Line, Table, Trends, items
from tracekit.report.render.cells import of_part

_MAX_TEXT = 1000
_MAX_NAME = 80
_NOTHING = "&#8203;"  # a space of no width


def render(document: Document) -> str:
    """Return a document as Markdown: paragraphs, lists and tables."""
    blocks: list[str] = []
    for section in (*document.sections, items(document.notes)):
        for part in section:
            if not isinstance(part, Line):
                blocks.append(_table(part))
            elif not part.mark:
                blocks.append(_line(part))
            elif blocks and blocks[-1].startswith("- "):
                blocks[-1] += f"\n- {_line(part)}"
            else:
                blocks.append(f"- {_line(part)}")
    return "\n\n".join(filter(None, blocks)) + "\n"


def escape(text: str, limit: int = _MAX_TEXT) -> str:
    r"""Return `text` as Markdown that shows exactly this text, on one line.

    A character of no width after @, # and the like keeps the hosts from seeing a mention or a reference, as does one in
    the middle of "://" and "www." for links; it is what Renovate does in its comments.

    >>> escape("@all: *see* #1 <b>")
    '@&#8203;all: \\*see\\* #&#8203;1 &lt;b&gt;'
    """
    text = escaping.inert(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"[\\`*_{}\[\]()|~$]", r"\\\g<0>", text)
    text = re.sub(r"(?<!&)([@#!%^$]|\\~|&amp;)(?=[\w\"])", rf"\1{_NOTHING}", text)
    text = re.sub(r":(?=//|\w+:)", f":{_NOTHING}", text)
    text = re.sub(r"(?i)\b(www|mailto|xmpp|gh)([.:-])", rf"\1{_NOTHING}\2", text)
    # What begins a list or a heading where a line begins.
    return _NOTHING + text if re.match(r"\s*([-+#]+\s|[-=]+\s*$|\d+[.)]\s)", text) else text


def code(text: str, limit: int = _MAX_NAME) -> str:
    """Return a name as code: nothing in code is a mention, a reference, a link or markup.

    >>> code("a`@b")
    "`a'@b`"
    """
    name = escaping.inert(text, limit).replace("`", "'").strip()
    return f"`{name}`" if name else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a table; `right` says which columns are aligned as numbers. Cells are Markdown already."""
    sides = ["---:" if number in right else "---" for number in range(len(header))]
    # Even in code a '|' ends a cell unless it is escaped.
    lines = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in (header, sides, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _line(line: Line) -> str:
    words = [word if isinstance(word, str) else word[0] for word in line.words]
    return escape("".join(words) + (f": {line.right}" if line.right else ""))


def _table(part: Table | Cells | Definitions | Trends) -> str:
    if isinstance(part, Definitions):
        rows = [list(map(_line, row)) for row in part.rows]
        return table([""] * len(rows[0]), rows) if rows else ""
    cells = of_part(part)
    header, *rows = ([escape(" ".join(cell.split())) for cell in row] for row in (cells.header, *cells.rows))
    return table(header, rows, cells.numbers)
