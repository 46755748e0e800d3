"""The JavaScript, HTML and CSS of the timeline: the dashboard and shared pages draw it with the same files."""

from tracekit.model import escaping

SCRIPTS = (
    "time.js",
    "layout.js",
    "tile.js",
    "paint.js",
    "input.js",
    "range.js",
    "map.js",
    "pair.js",
    "pins.js",
    "panel.js",
    "page.js",
    "timeline.js",
)
"""In the order in which they are joined into one module: there is no build step."""


def script() -> str:
    """Return the module that draws the timeline."""
    return _join_assets(*SCRIPTS)


def embedded_script() -> str:
    """Return the module that draws the timeline of a page that holds its data."""
    return escaping.asset("inflate.js") + _join_assets(*SCRIPTS, "embedded.js")


def html() -> str:
    """Return the elements that the timeline draws in."""
    return escaping.asset("timeline/timeline.html")


def css() -> str:
    """Return the style sheet, which takes colours and fonts from Streamlit's custom properties."""
    return f"{escaping.asset('button.css')}\n{escaping.asset('timeline/timeline.css')}"


def _join_assets(*names: str) -> str:
    return "\n".join(escaping.asset(f"timeline/{name}") for name in names)
