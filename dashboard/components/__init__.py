"""Pieces of the pages that Streamlit doesn't have: plain JavaScript and CSS of ours, shipped as they are."""

from pathlib import Path


def css(own: Path) -> str:
    """Return a component's own CSS after what all components share."""
    shared = Path(__file__).with_name("button.css")
    return "\n".join(path.read_text(encoding="utf-8") for path in (shared, own))
