"""Passes on only those messages of a browser that concern its own session.

Streamlit lets any browser clear the caches of all sessions, which deletes the uploads of other visitors and the tables
read of every run, and makes it run git. The pages send none of these messages.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit.proto.BackMsg_pb2 import BackMsg

OWN = frozenset({"rerun_script", "stop_script", "file_urls_request", "app_heartbeat", "backend_operation_request"})


class SessionMessages:
    """ASGI middleware that drops messages of other kinds than `OWN` from websockets."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or a websocket with the messages of its own session."""
        await self._app(scope, _only_own(receive) if scope["type"] == "websocket" else receive, send)


def _only_own(receive: Receive) -> Receive:
    async def received() -> Message:
        message = await receive()
        while not _is_own(message):
            message = await receive()
        return message

    return received


def _is_own(message: Message) -> bool:
    """Return whether a message concerns its own session only; so do those that Streamlit refuses to read."""
    content = message.get("bytes")
    if message["type"] != "websocket.receive" or content is None:
        return True
    try:
        return BackMsg.FromString(content).WhichOneof("type") in {None, *OWN}
    except Exception:  # noqa: BLE001 protobuf's DecodeError, which no dependency of the dashboard exports
        return True
