"""A self-contained HTML page: its scripts, figures and data are inside, and it makes no request.

Its content security policy allows its own scripts, by their hashes, and no connection. Plotly's script is compressed,
which saves 3 MB; it is not there where there is no figure.
"""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from tracekit.model import escaping
from tracekit.report import charts, html_fragments


def render(
    template: str,
    *,
    title: str,
    figures: Mapping[str, go.Figure],
    modules: Sequence[str] = (),
    packed: Mapping[str, bytes] | None = None,
    styles: Sequence[str] = (),
    version: str = "",
    **values: object,
) -> str:
    """Return a page from a template that extends base.html.j2.

    `figures` are drawn in the elements ``figure-NAME``. `modules` are scripts that run as modules; `packed` is gzip
    data that they find as text in base64 by the id of its element. `styles` are assets added to the style sheet.
    """
    # Base64 has no character that could end a script element.
    texts = {name: base64.b64encode(data).decode() for name, data in (packed or {}).items()}
    scripts = []
    if figures:
        texts["plotly"] = _plotly_text()
        scripts = [escaping.asset("inflate.js") + escaping.asset("page.js")]
    hashes = [*map(_hash, (*scripts, *modules)), *([_plotly_hash()] if figures else [])]
    return escaping.page(
        template,
        policy=f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        style=html_fragments.style() + escaping.asset("page.css") + "".join(map(escaping.asset, styles)),
        title=title,
        figures={name: json.loads(plotly.io.to_json(figure)) for name, figure in figures.items()},
        config=charts.CONFIG,
        packed=texts,
        scripts=scripts,
        modules=modules,
        version=version,
        **values,
    )


def figure_bytes(figures: Iterable[go.Figure]) -> list[int]:
    """Size of each figure on a page, in bytes."""
    return [len(plotly.io.to_json(figure).encode()) for figure in figures]


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@functools.cache
def _plotly_text() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


@functools.cache
def _plotly_hash() -> str:
    return _hash(get_plotlyjs())
