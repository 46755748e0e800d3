"""The button that downloads a page: the browser sends the address of the page, and gets the file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import streamlit as st

from dashboard import components

MAX_QUERY = 10_000
_mount = components.register("share", ("share.js",))


@dataclass(frozen=True)
class Request:
    """A click: its number, and the parameters of the address that the browser showed then."""

    number: int
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What a click gets: a text, and a file with its name, or '' where it cannot be made."""

    number: int = 0
    status: str = ""
    name: str = ""
    content: bytes = b""


def request(key: str) -> Request | None:
    """Return the last click in this session; None where there was none, or the browser sent something else."""
    state: Mapping[str, Any] = st.session_state.get(key) or {}
    click = state.get("request")
    if not isinstance(click, Mapping):
        return None
    number, query = click.get("number"), click.get("query")
    if not isinstance(number, int) or not isinstance(query, str):
        return None
    return Request(number, dict(parse_qsl(query[:MAX_QUERY].removeprefix("?"))))


def button(answer: Answer, *, key: str) -> None:
    """Show the button; the browser downloads the answer to each click once."""
    head = json.dumps({"number": answer.number, "status": answer.status, "name": answer.name}).encode()
    data = len(head).to_bytes(4, "little") + head + answer.content
    _mount(key=key, data=data, on_request_change=lambda: None)
