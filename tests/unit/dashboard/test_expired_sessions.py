"""Which uploads the dashboard removes while nobody visits."""

from types import SimpleNamespace

import pytest

pytest.importorskip("streamlit")
from streamlit.runtime.memory_session_storage import MemorySessionStorage
from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.runtime.session_manager import SessionInfo
from streamlit.runtime.uploaded_file_manager import UploadedFileRec
from streamlit.runtime.websocket_session_manager import WebsocketSessionManager

from dashboard.server import expired_sessions

FILE = UploadedFileRec(file_id="1", name="rank0.json", type="application/json", data=b"{}")


class StoredSession:
    """A session whose page was closed."""

    def __init__(self, name, uploads):
        self.id, self._uploads = name, uploads

    def shutdown(self):
        self._uploads.remove_session_files(self.id)


@pytest.fixture
def server():
    return _server(ttl_s=3600)


def _server(ttl_s):
    uploads, stored = MemoryUploadedFileManager("/upload"), MemorySessionStorage(ttl_seconds=ttl_s)
    sessions = WebsocketSessionManager(stored, uploads, ScriptCache(), None)
    for name in ("first", "second"):
        stored.save(SessionInfo(client=None, session=StoredSession(name, uploads)))
        uploads.add_file(name, FILE)
    return SimpleNamespace(_session_mgr=sessions, uploaded_file_mgr=uploads)


def test_uploads_of_a_page_that_can_connect_again_stay(server):
    assert expired_sessions.remove_expired(server) == 0
    assert set(server.uploaded_file_mgr.file_storage) == {"first", "second"}


def test_uploads_of_expired_sessions_are_removed():
    server = _server(ttl_s=0)
    # The second session was stored after the first one had expired, which removed the first one already.
    assert expired_sessions.remove_expired(server) > 0
    assert not server.uploaded_file_mgr.file_storage
    assert expired_sessions.remove_expired(server) == 0


def test_an_upload_that_arrived_after_its_session_had_ended_is_removed(server):
    server.uploaded_file_mgr.add_file("ended", FILE)
    assert expired_sessions.remove_expired(server) == 1
    assert set(server.uploaded_file_mgr.file_storage) == {"first", "second"}
