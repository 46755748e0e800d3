"""What pages of other sites, hostile addresses and uploads, and other sessions can do to the dashboard."""

import contextlib
import gzip
import json
import select
import socket
import time
import urllib.request

import pytest

from dashboard import uploads
from dashboard.pages import all_pages
from tests.browser import recorded
from tests.browser.conftest import served
from tests.support.dashboard_pages import addressed_pages
from tests.support.selection import others_in_accuracy
from tests.support.visitor import TIMEOUT_S, Visitor, WidgetState, xsrf_token

UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
TRACE = gzip.compress(json.dumps(recorded._trace(0, "my_secret_kernel", 3000, "main")).encode())


def _answer(server, path, headers, method="GET"):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{headers}\r\n".replace("PORT", str(server.port)).encode())
        answer = connection.recv(4096).decode("latin-1")
    return int(answer.split()[1]), answer


# Other sites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/media/x", "/_stcore/health", "/_stcore/metrics", "/_stcore/stream"])
@pytest.mark.parametrize(
    "headers",
    [
        "Host: evil.example:PORT\r\nOrigin: http://evil.example:PORT\r\n",
        "Host: evil.example\r\n",
        "Host: 127.0.0.1:PORT\r\nHost: evil.example\r\n",
        "Host: 127.0.0.1:PORT\r\nOrigin: http://localhost:9\r\n",
        "Host: 127.0.0.1:PORT\r\nOrigin: http://0.0.0.0\r\n",
        "Host: 127.0.0.1:PORT\r\nOrigin: null\r\n",
        "Host: 127.0.0.1:PORT\r\nOrigin: http://127.0.0.1:PORT.evil.example\r\n",
        "",
    ],
    ids=["rebinding", "a name", "two names", "another port", "all addresses", "a file", "a suffix", "no name"],
)
def test_a_page_of_another_site_gets_no_answer(server, path, headers):
    status, answer = _answer(server, path, headers + UPGRADE if path.endswith("stream") else headers)
    assert status in (400, 403), answer


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "[::1]", "10.0.0.5"])
def test_its_own_pages_get_answers_and_are_in_no_frame_of_another_site(server, name):
    own = f"Host: {name}:PORT\r\nOrigin: http://{name}:PORT\r\n"
    status, answer = _answer(server, "/", own)
    assert status == 200
    assert "x-frame-options: SAMEORIGIN" in answer
    if name.lower() in ("127.0.0.1", "localhost"):
        assert _answer(server, "/_stcore/stream", own + UPGRADE)[0] == 101


# Addresses ------------------------------------------------------------------------------------------------------------


HOSTILE = (
    "../../../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://192.0.2.1/x",
    "s3://bucket/x", "a\0b", "a\nb", "x" * 50_000, "<script>window.hacked=1</script>", "\u202egood", "--history=/x",
)  # fmt: skip


# Each page once.
@pytest.mark.parametrize(
    "value",
    others_in_accuracy(HOSTILE, [HOSTILE[index] for index in (0, 3, 6, 9)]),
    ids=lambda value: repr(value)[:24],
)
def test_an_address_names_only_listed_runs_and_options(server, value):
    names = ("run", "page", "rank", "from", "to", "sql", "bars", "step", "finding", "table", "search", "order")
    with Visitor(server.port) as visitor:
        for page in all_pages()[HOSTILE.index(value) % 4 :: 4]:
            answer = visitor.open(page.address, **dict.fromkeys(names, value))
            assert not answer.of_kind("exception"), page.address
            assert "root:" not in answer.text


def test_an_address_of_many_parameters_and_two_runs_opens_the_last_one(server):
    with Visitor(server.port) as visitor:
        assert visitor.open(query="run=%ff%fe&run=good&=&" + "&".join(f"p{n}={n}" for n in range(400))).title == "good"
    with Visitor(server.port) as visitor:
        assert not visitor.open(query="run=good&" + "&".join(f"p{n}={n}" for n in range(3000))).of_kind("exception")


def test_each_page_opens_at_its_address(server):
    for page in addressed_pages():
        with Visitor(server.port) as visitor:
            answer = visitor.open(page.address, run=recorded.GOOD)
        assert not answer.of_kind("exception"), page.address
        assert visitor.address == page.address


@pytest.mark.parametrize(
    "page",
    others_in_accuracy(
        ["../x", "overview/../../..", "%2e%2e", "a\0b", "x" * 50_000, "http://192.0.2.1/"],
        ["overview/../../..", "a\0b", "x" * 50_000],
    ),
)
def test_an_unknown_page_shows_the_default_one(server, page):
    with Visitor(server.port) as visitor:
        assert visitor.open(page, run="good").title == "good"


# Uploads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("../../../etc/cron.d/x.pt.trace.json.gz", "uploaded: x.pt.trace.json.gz"),
        ("<img src=x onerror=1>.json.gz", "uploaded: _img_src_x_onerror_1_.json.gz"),
        ("\x1b[31mred\n.json.gz", "uploaded: __31mred_0A.json.gz"),
        ("C:\\x\\.hidden.json.gz", "uploaded: hidden.json.gz"),
    ],
)
def test_an_uploaded_name_is_only_a_name(server, name, title):
    with Visitor(server.port) as visitor:
        statuses, answer, _ = visitor.upload([(name, TRACE)], run="good")
        assert statuses == [204]
        assert answer.title == title
        assert "my_secret_kernel" in answer.text or answer.of_kind("plotly_chart")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", "no traceEvents array"),
        (b"", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "an image, document or program"),
        (b'{"traceEvents":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 100 levels deep"),
    ],
    ids=["text", "empty", "image", "depth"],
)
def test_an_upload_that_is_no_trace_is_named_with_the_reason(server, content, reason):
    with Visitor(server.port) as visitor:
        _, answer, _ = visitor.upload([("rank0.json", content)], run="good")
        assert not answer.of_kind("exception")
        assert any(reason in alert for alert in answer.alerts)


def test_two_hundred_files_at_once_are_one_run_and_one_message(server):
    with Visitor(server.port) as visitor:
        statuses, answer, _ = visitor.upload([(f"rank{n:05}.json.gz", TRACE) for n in range(200)], run="good")
        assert set(statuses) == {204}
        assert answer.title == f"uploaded: {uploads.MAX_FILES} files"
        (message,) = [alert for alert in answer.alerts if "the limit is" in alert]
        assert message.startswith("rank00064.json.gz and 135 more: ")


def test_a_session_uploads_no_more_than_its_limit(server):
    with Visitor(server.port) as visitor, contextlib.ExitStack() as stack:
        visitor.open()
        connections, token = [], xsrf_token(server.port)
        size = uploads.MAX_BYTES // 2 - 1000
        for url in visitor.upload_urls(["a.json", "b.json", "c.json"]):
            request = (
                f"PUT {url.upload_url} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Xsrftoken: {token}\r\n"
                f"Cookie: _streamlit_xsrf={token}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
                f"Content-Length: {size}\r\nConnection: close\r\n\r\n--x\r\n"
            )
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)))
            connections[-1].sendall(request.encode())
        (refused,) = select.select(connections, [], [], 10)[0]  # two are still arriving
        answer = b"".join(iter(lambda: refused.recv(4096), b"")).decode()
        assert answer.split()[1] == "413"
        assert answer.endswith("the limit is 400 MiB for all files together")


def test_an_idle_server_removes_the_uploads_of_a_closed_page(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLIT_SERVER_DISCONNECTED_SESSION_TTL", "1")
    recorded.write_run(tmp_path / "good", kernel="gemm")
    with served(tmp_path / "good", tmp_path) as server:
        with Visitor(server.port) as visitor:
            visitor.upload([("rank0.json.gz", TRACE)])
            assert _uploaded_bytes(server) == len(TRACE)
        deadline_s = time.monotonic() + TIMEOUT_S
        while _uploaded_bytes(server) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert _uploaded_bytes(server) == 0
        assert not set(server.temporary.glob("*/rank0.json.gz"))


def _uploaded_bytes(server):
    """Bytes of uploads that the server stores, by its metrics, which no session is opened for."""
    with urllib.request.urlopen(f"{server.url}/_stcore/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(line.rpartition(" ")[2]) for line in lines if "UploadedFileManager" in line)


def test_an_upload_that_its_page_ends_writes_no_traceback(tmp_path):
    recorded.write_run(tmp_path / "good", kernel="gemm")
    with served(tmp_path / "good", tmp_path) as server, Visitor(server.port) as visitor:
        visitor.open()
        (url,) = visitor.upload_urls(["rank0.json.gz"])
        visitor.send_part(url.upload_url, "rank0.json.gz", TRACE, part_bytes=len(TRACE) // 2)
        statuses, _, _ = visitor.upload([("rank0.json.gz", TRACE)])
        assert statuses == [204]
    assert "Traceback" not in (tmp_path / "log").read_text()


# Other sessions -------------------------------------------------------------------------------------------------------


def test_a_session_reads_no_upload_of_another(server):
    with Visitor(server.port) as owner, Visitor(server.port) as other:
        _, answer, state = owner.upload([("rank0.json.gz", TRACE)], run="good")
        assert answer.title == "uploaded: rank0.json.gz"
        assert other.open(run=answer.title).title != answer.title
        (uploader,) = other.open(run="good").of_kind("file_uploader")
        stolen = WidgetState(id=uploader.id, file_uploader_state_value=state.file_uploader_state_value)
        claimed = other.open(run="good", widgets=[stolen])
        assert claimed.title == "good"
        assert "uploaded: " not in claimed.text
        assert owner.open(run=answer.title, widgets=[state]).title == answer.title


def test_no_session_clears_the_caches_and_uploads_of_others(server):
    with Visitor(server.port) as owner, Visitor(server.port) as other:
        owner.upload([("rank0.json.gz", TRACE)], run="good")
        uploaded = set(server.temporary.glob("*/rank0.json.gz"))
        other.send(clear_cache=True)
        assert other.open(run="good").title == "good"
        assert uploaded
        assert [path for path in uploaded if path.parent.stat().st_mode & 0o077] == []  # for this user alone
        assert uploaded <= set(server.temporary.glob("*/rank0.json.gz"))


def test_a_choice_of_one_session_is_not_that_of_another(server):
    with Visitor(server.port) as one, Visitor(server.port) as other:
        assert one.open(run="good").title == "good"
        assert other.open(run="hostile").title == "hostile"
        assert one.open("ranks", run="good").title == "good"
