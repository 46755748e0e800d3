"""Adds the pages' style sheet to Streamlit's document, so that nothing moves when it arrives after the first paint."""

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracekit.report import html_fragments

_FILE = Path(__file__).with_name("page.css")
_END = b"</body>"


class PageStyle:
    """ASGI middleware that puts the style sheet at the end of each HTML document: behind Streamlit's own styles."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app
        self._element = f"<style>{html_fragments.style()}{_FILE.read_text(encoding='utf-8')}</style>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the style sheet to its answer if that is a document."""
        if scope["type"] == "http" and scope["method"] == "GET" and "." not in scope["path"].rpartition("/")[2]:
            # A compressed document could not be changed.
            headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
            await self._app({**scope, "headers": headers}, receive, _Styled(send, self._element))
        else:
            await self._app(scope, receive, send)


class _Styled:
    """Sends an answer; a document once it is complete, with an element at its end."""

    def __init__(self, send: Send, element: bytes) -> None:
        self._send, self._element = send, element
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if headers.get("content-type", "").startswith("text/html") and message["status"] == 200:
                self._start = message
                return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_styled(self._start)

    async def _send_styled(self, start: Message) -> None:
        before, end, after = self._body.rpartition(_END)
        body = before + self._element + end + after if end else self._body
        headers = MutableHeaders(scope=start)
        headers["content-length"] = str(len(body))
        for name in ("etag", "last-modified"):  # those of the file, which does not change when the style sheet does
            if name in headers:
                del headers[name]
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
