"""Refuses requests that pages of other sites make through the browser of somebody who can reach the dashboard.

Streamlit checks the host and origin of its websocket only, accepts pages of every port of this machine, and asks a web
service for the external address of this machine before it refuses a page: that request would block all sessions.
"""

import ipaddress
import socket
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

POLICY_VIOLATION = 1008
"""The code of RFC 6455 with which a websocket is closed."""
ANSWER_HEADERS = {
    "X-Frame-Options": "SAMEORIGIN",  # no page of another site lays the dashboard under its own buttons
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class OwnOrigin:
    """ASGI middleware that answers only under the dashboard's own names, and only pages of its own."""

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        """Wrap `app`; `names` are the host names that it answers under; addresses and this machine's name are too."""
        self._app = app
        host = socket.gethostname().lower()
        self._names = {"localhost", host, host.partition(".")[0], *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with the reason."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        problem = refusal(Headers(scope=scope), self._names)
        if problem and scope["type"] == "websocket":
            await WebSocketClose(POLICY_VIOLATION, problem)(scope, receive, send)
        elif problem:
            await PlainTextResponse(problem, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_headers(send))


def refusal(headers: Headers, names: Collection[str]) -> str | None:
    """Return why a request is refused; None where it is answered.

    The Host must be an address or one of `names`. A site that resolves its own name to this machine (DNS rebinding)
    makes the browser send that name, never an address. An Origin must be the Host itself, port included.
    """
    hosts = headers.getlist("host")
    host = _host_name(hosts)
    if host is None:
        return "the request needs one Host header with a name or an address"
    if host not in names and not _is_address(host):
        return f"the dashboard does not answer under the name {host}: tracekit dashboard --allow-host {host} allows it"
    origins = headers.getlist("origin")
    if origins and not _is_origin_of(origins, hosts[0]):
        return "the request comes from a page of another site"
    return None


def _host_name(hosts: Sequence[str]) -> str | None:
    """Return the lower-case name of the only Host header, without its port; None for anything else."""
    if len(hosts) != 1:
        return None
    try:
        parts = urlsplit(f"//{hosts[0]}")
        _ = parts.port  # raises ValueError for what is no port
    except ValueError:
        return None
    if parts.netloc != hosts[0] or "@" in hosts[0]:
        return None
    return parts.hostname.rstrip(".") if parts.hostname and parts.hostname.isprintable() else None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_origin_of(origins: Sequence[str], host: str) -> bool:
    # A proxy may add TLS, so the scheme is not compared.
    own_origins = {f"{scheme}://{host.lower()}" for scheme in ("http", "https")}
    return len(origins) == 1 and origins[0].lower() in own_origins


def _with_headers(send: Send) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(ANSWER_HEADERS)
        await send(message)

    return answer
