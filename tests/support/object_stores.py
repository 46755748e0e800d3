"""Servers that tests start: S3 (moto) behind a proxy, and a web server of a folder. Both log requests, and may fail.

The libraries of the servers take seconds to import: only the worker that starts one imports them.
"""

import contextlib
import hashlib
import http.client
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.http import HTTPFileSystem

from tracekit.conventions import object_storage

BUCKET = "bucket"
TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    method: str
    path: str
    range: str | None


@dataclass(frozen=True)
class Fault:
    """What happens to a request: it waits, gets this status, or is cut off after so many bytes of the body."""

    wait_s: float = 0.0
    status: int | None = None
    cut_after_bytes: int | None = None
    body: bytes = b""


@dataclass
class Server:
    """A running server. `fault` decides on each request; None: nothing happens."""

    address: str = ""
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault | None] = lambda _: None

    def got(self, method: str, ending: str = "") -> list[Request]:
        """Return the requests of a method for paths that end so."""
        return [each for each in self.requests if each.method == method and urlsplit(each.path).path.endswith(ending)]

    def traces_fetched(self) -> list[Request]:
        """Return the requests for the content of traces."""
        return [each for each in self.requests if each.method == "GET" and ".trace.json" in urlsplit(each.path).path]


def times(count: int, fault: Fault, ending: str = "", method: str = "GET") -> Callable[[Request], Fault | None]:
    """Return a fault that happens to the first requests for each path that ends so."""
    seen: dict[str, int] = {}

    def decide(request: Request) -> Fault | None:
        path = urlsplit(request.path).path
        if request.method != method or not path.endswith(ending):
            return None
        seen[path] = seen.get(path, 0) + 1
        return fault if seen[path] <= count else None

    return decide


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def answer(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError

    def handle_request(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, self.headers.get("Range"))
        self.server_state.requests.append(request)
        fault = self.server_state.fault(request) or Fault()
        time.sleep(fault.wait_s)
        if fault.status is not None:
            status, headers, body = fault.status, {}, fault.body
        else:
            status, headers, body = self.answer(sent)
        with contextlib.suppress(OSError):
            self._send(status, headers, body, fault.cut_after_bytes)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def _send(self, status: int, headers: dict[str, str], body: bytes, cut_after_bytes: int | None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut_after_bytes])
        if cut_after_bytes is not None:
            self.wfile.flush()
            # Reset, as a load balancer does: closing alone would be an orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _serving(handler: type[_Handler]) -> Iterator[Server]:
    state = Server()
    own = type("Handler", (handler,), {"server_state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), own) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        state.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Run an S3 server with one empty bucket, and set the environment so that clients use it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()

    class Proxy(_Handler):
        def answer(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(host, port, timeout=30)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                content = response.read()
                skipped = {"connection", "server", "date", "transfer-encoding"}
                headers = {name: value for name, value in response.getheaders() if name.lower() not in skipped}
                if self.command != "HEAD":
                    headers["Content-Length"] = str(len(content))
                return response.status, headers, content

    variables = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch, _serving(Proxy) as server:
        for name, value in {**variables, "AWS_ENDPOINT_URL": server.address}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        client(f"http://{host}:{port}").create_bucket(Bucket=BUCKET)
        server.requests.clear()
        try:
            yield server
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            moto.stop()


def client(address: str | None = None) -> Any:
    """Return a client of the server, to prepare and inspect its content."""
    import boto3
    from botocore.config import Config

    retries = Config(retries={"total_max_attempts": 1})
    return boto3.client("s3", endpoint_url=address or os.environ["AWS_ENDPOINT_URL"], config=retries)


def upload(folder: Path, prefix: str) -> str:
    """Upload a folder's files and return its URL."""
    store = client()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def keys(prefix: str = "") -> list[str]:
    """Return the keys in the bucket that begin so."""
    listed = client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return sorted(each["Key"] for each in listed.get("Contents", []))


@contextlib.contextmanager
def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AbstractFileSystem]:
    """Run an emulator of Google Cloud Storage with one empty bucket, and yield a file system on it."""
    from gcp_storage_emulator.server import create_server

    # As it comes, it serves one connection at a time, and clients keep theirs open.
    monkeypatch.setattr("http.server.HTTPServer", ThreadingHTTPServer)
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    _, port = server._api._httpd.socket.getsockname()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    system, _ = object_storage.connect(f"gs://{BUCKET}")
    try:
        yield system
    finally:
        type(system).clear_instance_cache()
        server.stop()


@contextlib.contextmanager
def web_server(
    folder: Path, *, has_ranges: bool = True, has_etags: bool = True, has_index: bool = True
) -> Iterator[Server]:
    """Run a web server of a folder."""

    class Files(_Handler):
        def answer(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            path = folder / unquote(urlsplit(self.path).path).lstrip("/")
            if path.is_dir():
                return self._index(path) if has_index else (403, {}, b"")
            if not path.is_file():
                return 404, {}, b""
            content = path.read_bytes()
            headers = {
                "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
                "Content-Type": "application/json",
            }
            if has_etags:
                headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
            asked = self.headers.get("Range")
            if not has_ranges or asked is None:
                return 200, headers, content
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last or len(content)) + 1]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            return 206, headers, part

        def _index(self, path: Path) -> tuple[int, dict[str, str], bytes]:
            if not urlsplit(self.path).path.endswith("/"):
                return 301, {"Location": f"{self.path}/"}, b""
            names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
            links = "".join(f'<li><a href="{name}">{name}</a></li>' for name in ["../", "?C=M;O=A", *names])
            return 200, {"Content-Type": "text/html; charset=utf-8"}, f"<ul>{links}</ul>".encode()

        def _send(self, status: int, headers: dict[str, str], body: bytes, cut_after_bytes: int | None) -> None:
            super()._send(status, {**headers, "Content-Length": str(len(body))}, body, cut_after_bytes)

    HTTPFileSystem.clear_instance_cache()
    with _serving(Files) as server:
        yield server
    HTTPFileSystem.clear_instance_cache()
