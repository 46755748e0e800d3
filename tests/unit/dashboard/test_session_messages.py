"""Which messages of a browser the dashboard passes on."""

import asyncio

import pytest

pytest.importorskip("streamlit")
from streamlit.proto.BackMsg_pb2 import BackMsg

from dashboard.server.session_messages import OWN, SessionMessages

KINDS = [field.name for field in BackMsg.DESCRIPTOR.fields]
END = {"type": "websocket.disconnect", "code": 1000}


def _passed_on(scope, *messages):
    """Return what an application behind the middleware receives of some messages."""
    received, pending = [], [*messages, END]

    async def receive():
        return pending.pop(0)

    async def application(_scope, receive, _send):
        while not received or received[-1] is not END:
            received.append(await receive())

    asyncio.run(SessionMessages(application)(scope, receive, None))
    return received[:-1]


def _message(kind):
    message = BackMsg()
    field = BackMsg.DESCRIPTOR.fields_by_name[kind]
    if field.message_type:
        getattr(message, kind).SetInParent()
    else:
        setattr(message, kind, "x" if field.type == field.TYPE_STRING else True)
    return {"type": "websocket.receive", "bytes": message.SerializeToString()}


def test_messages_of_the_own_session_pass_and_all_others_are_dropped():
    messages = {kind: _message(kind) for kind in KINDS}
    passed = _passed_on({"type": "websocket"}, *messages.values())
    assert [kind for kind, message in messages.items() if message in passed] == [kind for kind in KINDS if kind in OWN]
    assert set(KINDS) > OWN
    assert "clear_cache" not in OWN


@pytest.mark.parametrize("content", [{"bytes": b"\xff\xff"}, {"bytes": b""}, {"text": "hello"}, {"bytes": None}])
def test_what_is_no_message_is_left_to_streamlit(content):
    message = {"type": "websocket.receive", **content}
    assert _passed_on({"type": "websocket"}, message) == [message]


def test_bodies_of_requests_pass():
    message = {"type": "http.request", "body": _message("clear_cache")["bytes"]}
    assert _passed_on({"type": "http"}, message) == [message]
