"""Ends the sessions whose visitor left, and removes their uploads, while nobody visits.

Streamlit stores the session of a closed page for `server.disconnectedSessionTTL` seconds, for a browser that connects
again. After that it ends a session only when the page of another one is closed, and never removes the file of an upload
that arrived after its session had ended.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import AsyncIterator

import streamlit as st
from streamlit import runtime
from streamlit.runtime import Runtime

log = logging.getLogger(__name__)
_MIN_INTERVAL_S = 1.0


@contextlib.asynccontextmanager
async def removal() -> AsyncIterator[None]:
    """Context in which expired sessions are ended. Enter it on the event loop of Streamlit's runtime."""
    # A third of the time that a session is stored: an upload is removed at most 10 s late.
    interval_s = max(_MIN_INTERVAL_S, float(st.get_option("server.disconnectedSessionTTL")) / 3)
    task = asyncio.create_task(_remove_repeatedly(interval_s))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _remove_repeatedly(interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            removed_count = remove_expired(runtime.get_instance())
        except AttributeError:  # another version of Streamlit: sessions end when the page of another one is closed
            log.warning(
                "this version of Streamlit ends expired sessions only when another visitor leaves", exc_info=True
            )
            return
        if removed_count:
            await asyncio.to_thread(_return_memory)


def remove_expired(server: Runtime) -> int:
    """Number of sessions that were ended because they had expired, and of ended sessions whose uploads were removed."""
    sessions = server._session_mgr
    expired = sessions._session_storage._cache.expire()
    for _, stored in expired:
        stored.session.shutdown()
    uploads = server.uploaded_file_mgr
    orphans = [name for name in list(uploads.file_storage) if sessions.get_session_info(name) is None]
    for name in orphans:
        uploads.remove_session_files(name)
    return len(expired) + len(orphans)


def _return_memory() -> None:
    """Give the memory of ended sessions back to the system: they are cycles, and glibc keeps what it has freed."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
