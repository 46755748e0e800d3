"""A visitor of the dashboard without a browser: Streamlit's websocket and its uploads. Not a test."""

import http.client
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Self
from urllib.parse import urlencode

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.sync.client import connect

TIMEOUT_S = 300.0
_ANSWER_S = 20.0
MAX_MESSAGE_BYTES = 1 << 28
_BOUNDARY = "a-boundary"


class Answer:
    """What the server sent for one page."""

    def __init__(self, messages: Sequence[ForwardMsg], took_s: float) -> None:
        self.took_s = took_s
        self.elements = [m.delta.new_element for m in messages if m.WhichOneof("type") == "delta"]
        self.text = "\n".join(map(str, self.elements))

    def of_kind(self, kind: str) -> list:
        """Return the elements of a kind, such as alert, exception or file_uploader."""
        return [getattr(element, kind) for element in self.elements if element.WhichOneof("type") == kind]

    @property
    def title(self) -> str:
        """Return the title of the page, '' if it has none."""
        found = re.search(r'class="tk-title"><b>([^<]*)', "".join(html.body for html in self.of_kind("html")))
        return found[1] if found else ""

    @property
    def alerts(self) -> list[str]:
        """Return the messages of the page without Markdown's backslashes."""
        return [alert.body.replace("\\", "") for alert in self.of_kind("alert")]


class Visitor:
    """One session of the dashboard at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.session = ""
        self.address = ""
        """That of the page shown, as the server's list of pages has it."""
        self._page_hash = ""
        self._cached: dict[str, ForwardMsg] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        address = f"ws://127.0.0.1:{self.port}/_stcore/stream"
        connecting = connect(address, open_timeout=TIMEOUT_S, max_size=MAX_MESSAGE_BYTES, compression=None)
        self._socket = self._stack.enter_context(connecting)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(
        self, page: str = "", /, *, query: str | None = None, widgets: Sequence[WidgetState] = (), **choices: str
    ) -> Answer:
        """Return what a page shows. `query` is the raw query of the address, or `choices` are its parameters."""
        began_s = time.monotonic()
        self.start(page, widgets, urlencode(choices, errors="surrogatepass") if query is None else query)
        messages = list(self._until("script_finished"))
        return Answer(messages, time.monotonic() - began_s)

    def start(self, page: str, widgets: Sequence[WidgetState], query: str = "") -> None:
        """Ask for a page without waiting for it. `query` is the raw query of its address."""
        message = BackMsg()
        state = message.rerun_script
        state.page_name, state.page_script_hash = page, self._page_hash if widgets else ""
        state.query_string = query
        state.widget_states.widgets.extend(widgets)
        self._socket.send(message.SerializeToString())

    def send(self, **fields: object) -> None:
        """Send a message with these fields of Streamlit's BackMsg; nothing answers it."""
        self._socket.send(BackMsg(**fields).SerializeToString())

    def upload(self, files: Sequence[tuple[str, bytes]], /, **choices: str) -> tuple[list[int], Answer, WidgetState]:
        """Upload files as the browser does; return the statuses, the page, and the widget's state with their ids."""
        (uploader,) = self.open(**choices).of_kind("file_uploader")
        urls = self.upload_urls([name for name, _ in files])
        state = WidgetState(id=uploader.id)
        statuses = []
        for (name, content), url in zip(files, urls, strict=True):
            statuses.append(self._put(url.upload_url, name, content))
            state.file_uploader_state_value.uploaded_file_info.add(
                file_id=url.file_id, name=name, size=len(content), file_urls=url
            )
        return statuses, self.open(widgets=[state], **choices), state

    def upload_urls(self, names: Sequence[str]) -> list:
        """Return where the server takes files of these names."""
        message, numbers = BackMsg(), itertools.count()
        message.file_urls_request.session_id = self.session
        message.file_urls_request.file_names.extend(names)
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            message.file_urls_request.request_id = f"{','.join(names)} {next(numbers)}"
            self._socket.send(message.SerializeToString())
            try:
                *_, last = self._until("file_urls_response", _ANSWER_S)
            except TimeoutError:
                # Streamlit drops what it has not sent yet where a script begins to run, so an answer may never come.
                if time.monotonic() > deadline_s:
                    raise
                continue
            if last.file_urls_response.response_id == message.file_urls_request.request_id:
                return list(last.file_urls_response.file_urls)

    def _until(self, kind: str, timeout_s: float = TIMEOUT_S) -> Iterator[ForwardMsg]:
        deadline_s = time.monotonic() + timeout_s
        message = ForwardMsg()
        while message.WhichOneof("type") != kind:
            message = ForwardMsg.FromString(self._socket.recv(timeout=deadline_s - time.monotonic()))
            yield self._whole(message)

    def _whole(self, message: ForwardMsg) -> ForwardMsg:
        kind = message.WhichOneof("type")
        if kind == "ref_hash":
            return self._cached[message.ref_hash]
        self._cached[message.hash] = message
        if kind == "new_session":
            self.session = message.new_session.initialize.session_id or self.session
        elif kind == "navigation":
            self._page_hash = message.navigation.page_script_hash
            pages = message.navigation.app_pages
            self.address = next(page.url_pathname for page in pages if page.page_script_hash == self._page_hash)
        return message

    def send_part(self, path: str, name: str, content: bytes, *, part_bytes: int) -> None:
        """Send the first bytes of a file to where the server takes it, and close the connection."""
        body = _form(name, content)
        headers = _upload_headers(self.port) | {"Content-Length": str(len(body))}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request("PUT", path, headers=headers)
        connection.send(body[:part_bytes])
        connection.close()

    def _put(self, path: str, name: str, content: bytes) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request("PUT", path, _form(name, content), _upload_headers(self.port))
        status = connection.getresponse().status
        connection.close()
        return status


def xsrf_token(port: int) -> str:
    """Return a token that the server gives to a page of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", "/_stcore/health")
    cookie = connection.getresponse().getheader("set-cookie", "")
    connection.close()
    return cookie.partition("=")[2].partition(";")[0]


def _upload_headers(port: int) -> dict[str, str]:
    token = xsrf_token(port)
    content_type = f"multipart/form-data; boundary={_BOUNDARY}"
    return {"Content-Type": content_type, "X-Xsrftoken": token, "Cookie": f"_streamlit_xsrf={token}"}


def _form(name: str, content: bytes) -> bytes:
    """Body of a form with one file."""
    heading = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{_in_form(name)}"\r\n\r\n'
    return heading.encode("utf-8", "surrogateescape") + content + f"\r\n--{_BOUNDARY}--\r\n".encode()


def _in_form(name: str) -> str:
    """Return a file name as browsers write it into a form."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
