"""Which requests the dashboard answers."""

import socket

import pytest

starlette = pytest.importorskip("starlette.datastructures")
from dashboard.server import own_origin  # noqa: E402


def _refused(*pairs, names=()):
    headers = starlette.Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in pairs])
    return own_origin.refusal(headers, {"localhost", *names})


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "user@localhost", "localhost/x", "", "a b",
             ":1", "localhost:port", "localhost#x", "127.0.0.1@evil.example", "\xa0localhost", "[::1",
             "localhost:99999", "localhost\x00"],
)  # fmt: skip
def test_another_name_is_refused(host):
    assert _refused(("host", host))


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "localhost:8501", "127.0.0.1", "[::1]:80", "192.0.2.7:1"])
def test_addresses_and_own_names_are_answered(host):
    assert _refused(("host", host)) is None
    assert _refused(("host", host), ("origin", f"http://{host}")) is None
    assert _refused(("host", host), ("origin", f"https://{host}")) is None  # behind a proxy that adds TLS


@pytest.mark.parametrize(
    "origin", ["http://localhost", "http://localhost:1", "null", "", "http://127.0.0.1:8501", "file://", "localhost:1",
               "http://localhost:8501.evil.example", "http://localhost:8501/", "ftp://localhost:8501"],
)  # fmt: skip
def test_a_page_of_another_origin_is_refused(origin):
    assert _refused(("host", "localhost:8501"), ("origin", origin)) == "the request comes from a page of another site"


def test_a_name_that_is_allowed_is_answered_and_the_refusal_says_how():
    assert "--allow-host node7.example" in _refused(("host", "node7.example:1"))
    assert _refused(("host", "node7.example:1"), names={"node7.example"}) is None


def test_the_middleware_calls_nothing_behind_it_for_a_refused_request():
    async def run(scope):
        sent = []

        async def send(message):
            sent.append(message)

        await own_origin.OwnOrigin(_fails, names=["Alias."])(scope, None, send)
        return sent

    async def _fails(*_):
        raise AssertionError

    def request_from(kind, host):
        return {"type": kind, "headers": [(b"host", host.encode())], "method": "GET", "path": "/"}

    import asyncio

    assert asyncio.run(run(request_from("http", "evil.example")))[0]["status"] == 403
    assert asyncio.run(run(request_from("websocket", "evil.example")))[0]["code"] == own_origin.POLICY_VIOLATION
    for name in ("alias", socket.gethostname()):
        with pytest.raises(AssertionError):
            asyncio.run(run(request_from("http", name)))
