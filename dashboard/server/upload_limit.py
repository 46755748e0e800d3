"""Refuses uploads beyond a limit: Streamlit has no limit of their number, and stores them in memory."""

import logging
from collections import Counter
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit import runtime

from dashboard import uploads
from tracekit.model import units

log = logging.getLogger(__name__)
MAX_TOTAL_BYTES = 2 << 30
"""Limit of all files of all sessions."""
_PATH = "/_stcore/upload_file/"


class UploadLimit:
    """ASGI middleware that answers 413 to a file beyond the limit of its session, or that of all sessions."""

    def __init__(
        self, app: ASGIApp, *, session_bytes: int = uploads.MAX_BYTES, total_bytes: int = MAX_TOTAL_BYTES
    ) -> None:
        """Wrap `app`."""
        self._app = app
        self._session_bytes, self._total_bytes = session_bytes, total_bytes
        self._arriving: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        _, is_upload, name = scope.get("path", "").partition(_PATH)
        if scope["type"] != "http" or scope["method"] != "PUT" or not is_upload:
            await self._app(scope, receive, send)
            return
        session = name.partition("/")[0]
        size_bytes = _size_bytes(Headers(scope=scope))
        if problem := self._problem(session, size_bytes):
            await PlainTextResponse(problem, 413)(scope, receive, send)
            return
        self._arriving[session] += size_bytes
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.debug("the browser ended an upload before its end")  # nobody is left who could be answered
        finally:
            self._arriving[session] -= size_bytes
            self._arriving += Counter()  # without the sessions of which nothing is arriving

    def _problem(self, session: str, size_bytes: int) -> str | None:
        stored = self._arriving + Counter(_stored_bytes())
        if stored[session] + size_bytes > self._session_bytes:
            return f"the limit is {units.size(self._session_bytes)} for all files together"
        if stored.total() + size_bytes > self._total_bytes:
            return f"the limit is {units.size(self._total_bytes)} for all visitors; try again later"
        return None


def _size_bytes(headers: Headers) -> int:
    """Return the size of a body by its header; where there is none, the limit of one file."""
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else uploads.MAX_MB << 20


def _stored_bytes() -> Mapping[str, int]:
    """Bytes of uploads that Streamlit stores, by session."""
    by_session = runtime.get_instance().uploaded_file_mgr.file_storage
    return {
        session: sum(len(file.data) for file in list(files.values())) for session, files in list(by_session.items())
    }
