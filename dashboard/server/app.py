"""The dashboard as Streamlit serves it: the frame of its pages, behind a check of who asks.

`tracekit dashboard RUN…` serves it, and so does ``streamlit run dashboard/server/app.py -- RUN…``.
"""

import sys
import threading
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from dashboard.server import expired_sessions
from dashboard.server.own_origin import OwnOrigin
from dashboard.server.page_style import PageStyle
from dashboard.server.session_messages import SessionMessages
from dashboard.server.upload_limit import UploadLimit

ALLOW_HOST, OPEN_BROWSER = "--allow-host=", "--open-browser"
_FRAME = Path(__file__).with_name("frame.py")
_BROWSER_DELAY_S = 0.2  # the server accepts connections a moment after its lifespan begins


@asynccontextmanager
async def _lifespan(_: st.App) -> AsyncIterator[None]:
    if OPEN_BROWSER in sys.argv:
        address, port = st.get_option("browser.serverAddress"), st.get_option("server.port")
        threading.Timer(_BROWSER_DELAY_S, webbrowser.open, [f"http://{address}:{port}"]).start()
    async with expired_sessions.removal():
        yield


_hosts = tuple(word.removeprefix(ALLOW_HOST) for word in sys.argv if word.startswith(ALLOW_HOST))
_middleware = [
    Middleware(OwnOrigin, names=_hosts),
    Middleware(SessionMessages),
    Middleware(UploadLimit),
    Middleware(PageStyle),
]
app = st.App(_FRAME, middleware=_middleware, lifespan=_lifespan)
