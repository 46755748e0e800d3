"""Document -> Markdown, in which texts from traces stay text: names may hold markup, mentions, references and links."""

import re
from collections.abc import Sequence

from tracekit.model import escaping
from tracekit.report.document import Cells, Document, Line

_MAX_TEXT = 1000
_MAX_NAME = 80
_NOTHING = "&#8203;"  # a space of no width


def render(document: Document) -> str:
    """Return a document of lines and cells as Markdown: paragraphs, lists and tables."""
    blocks: list[str] = []
    for section in (*document.sections, [Line((note,), mark="·") for note in document.notes]):
        for part in section:
            if isinstance(part, Line):
                text = escape("".join(word if isinstance(word, str) else word[0] for word in part.words))
                if not part.mark:
                    blocks.append(text)
                elif blocks and blocks[-1].startswith("- "):
                    blocks[-1] += f"\n- {text}"
                else:
                    blocks.append(f"- {text}")
            elif isinstance(part, Cells):
                header, *rows = ([escape(cell.strip()) for cell in row] for row in (part.header, *part.rows))
                blocks.append(table(header, rows, part.numbers))
            else:
                raise TypeError(f"{type(part).__name__} has no form in Markdown")
    return "\n\n".join(blocks) + "\n"


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
