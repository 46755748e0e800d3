"""Pieces of the pages that Streamlit doesn't have: plain JavaScript and CSS of ours, shipped as they are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

HERE = Path(__file__).parent


def register(name: str, scripts: Sequence[str]) -> Callable[..., Any]:
    """Register the files of the folder `name` as a component, and return the function that puts it on a page.

    The scripts are joined in their order into one module: there is no build step.
    """

    def joined(*paths: Path) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)

    mount: Callable[..., Any] = st.components.v2.component(
        f"tracekit_{name}",
        html=joined(HERE / name / f"{name}.html"),
        css=joined(HERE / "button.css", HERE / name / f"{name}.css"),
        js=joined(*(HERE / name / script for script in scripts)),
    )
    return mount
