"""The style sheet in Streamlit's document."""

import asyncio

import pytest

pytest.importorskip("streamlit")

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.routing import Route

from dashboard.server.page_style import PageStyle

DOCUMENT = "<html><body><p>a</body> b</p></body></html>"


def answer(path, *, accepted=b"gzip"):
    """Return status, headers and body of what is sent to a GET."""
    routes = [
        Route("/page", lambda _: HTMLResponse(DOCUMENT, headers={"etag": "x"})),
        Route("/missing", lambda _: HTMLResponse("gone", 404)),
        Route("/text", lambda _: PlainTextResponse(DOCUMENT)),
    ]
    app = PageStyle(GZipMiddleware(Starlette(routes=routes), minimum_size=1))
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"accept-encoding", accepted)]}
    sent = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    asyncio.run(app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), body.decode()


def test_a_document_has_the_style_sheet_at_its_end_also_for_a_browser_that_accepts_compression():
    status, headers, body = answer("/page")
    assert status == 200
    assert body.startswith("<html><body><p>a</body> b</p><style>")
    assert body.endswith("</style></body></html>")
    assert ".tk-headline" in body
    assert headers[b"content-length"] == str(len(body.encode())).encode()
    assert b"etag" not in headers


@pytest.mark.parametrize(("path", "status"), [("/missing", 404), ("/text", 200)])
def test_other_answers_are_sent_as_they_are(path, status):
    assert answer(path)[0] == status
    assert "<style>" not in answer(path)[2]
