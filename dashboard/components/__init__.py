"""Pieces of the pages that Streamlit doesn't have: plain JavaScript and CSS of ours, shipped as they are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from tracekit.model import escaping

HERE = Path(__file__).parent


def register(name: str, scripts: Sequence[str]) -> Callable[..., Any]:
    """Register the files of the folder `name` as a component, and return the function that puts it on a page.

    The scripts are joined in their order into one module: there is no build step.
    """

    def asset_text(ending: str) -> str:
        return (HERE / name / f"{name}.{ending}").read_text(encoding="utf-8")

    return mount(
        name,
        html=asset_text("html"),
        css=escaping.asset("button.css") + asset_text("css"),
        js="\n".join((HERE / name / script).read_text(encoding="utf-8") for script in scripts),
    )


def mount(name: str, *, html: str, css: str, js: str) -> Callable[..., Any]:
    """Register a component, and return the function that puts it on a page."""
    component: Callable[..., Any] = st.components.v2.component(f"tracekit_{name}", html=html, css=css, js=js)
    return component
