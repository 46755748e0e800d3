"""Traces that a person drops into a page: a run that only this person sees, gone when the page is closed.

The files lie in a folder of the session's own. Nothing of them enters a cache that outlives it.
"""

import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st
from streamlit.runtime.uploaded_file_manager import UploadedFile

from dashboard import run_catalog
from dashboard.run_catalog import RunEntry
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.decompression import Blocks
from tracekit.model import units

MAX_MB = 200
"""Of one file as it is dropped, the same as server.maxUploadSize in .streamlit/config.toml."""
MAX_FILES = 64
MAX_BYTES = 400 << 20
"""Of all files of a person together."""
MAX_UNPACKED_BYTES = 4 << 30
"""Of one file once it is unpacked: a trace packs to a tenth, a bomb to a thousandth."""
ENDINGS = ("json", "gz", "zst")
_PREFIX = "tracekit-dropped-"
_MAX_NAME = 120


@dataclass
class UploadFolder:
    """The folder of one session and what lies in it: the name of each file by the id of its upload."""

    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Why an upload was not taken, by its id."""

    def take(self, uploads: Sequence[UploadedFile]) -> None:
        """Make the folder hold what the page's widget holds."""
        there = {upload.file_id for upload in uploads}
        for gone in set(self.names) - there:
            (self.folder / self.names.pop(gone)).unlink(missing_ok=True)
        self.refused = {key: why for key, why in self.refused.items() if key in there}
        for upload in uploads:
            if upload.file_id not in self.names and upload.file_id not in self.refused:
                try:
                    self._take(upload)
                except (InputError, BadTraceError, OSError) as error:
                    self.refused[upload.file_id] = f"{upload.name}: {error}"

    def _take(self, upload: UploadedFile) -> None:
        name = safe_name(upload.name)
        if name in self.names.values():
            raise InputError("a file of this name was dropped already; give each rank's file a name of its own")
        held = sum((self.folder / other).stat().st_size for other in self.names.values())
        if len(self.names) >= MAX_FILES or held + upload.size > MAX_BYTES:
            most = f"at most {MAX_FILES} files of together {units.size(MAX_BYTES)} are taken"
            raise InputError(f"{most}; open the dashboard on their folder instead: tracekit dashboard FOLDER")
        place = self.folder / name
        try:
            with place.open("xb") as file:
                shutil.copyfileobj(upload, file)
            refuse_decompression_bomb(place)
        except BaseException:
            place.unlink(missing_ok=True)
            raise
        self.names[upload.file_id] = name


def safe_name(name: str) -> str:
    """Return a file's name as one that names nothing but a trace in its folder. Raises InputError.

    >>> safe_name("../../rank00001.<b>.pt.trace.json.gz")
    'rank00001._b_.pt.trace.json.gz'
    """
    last = re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("\\", "/").rpartition("/")[2]).lstrip(".")
    stem, dot, ending = last.rpartition(".json")
    if not dot or ending not in ("", ".gz", ".zst"):
        raise InputError("is no trace by its name; a trace ends with .json, .json.gz or .json.zst")
    return f"{stem[-_MAX_NAME:] or 'trace'}.json{ending}"


def refuse_decompression_bomb(path: Path, most_bytes: int = MAX_UNPACKED_BYTES) -> None:
    """Raise InputError where a file unpacks to more than `most_bytes`, as soon as that shows."""
    unpacked = 0
    for block in Blocks(str(path)):
        unpacked += len(block)
        if unpacked > most_bytes:
            raise InputError(
                f"unpacks to more than {units.size(most_bytes)}, which no dropped trace may; open the dashboard on its "
                "folder instead: tracekit dashboard FOLDER"
            )


def choose() -> RunEntry | None:
    """Show where to drop traces; return the run that they make, None where there are none."""
    with st.expander("Drop a trace here"):
        uploads = st.file_uploader(
            "Traces of one run, one file per rank",
            type=list(ENDINGS),
            accept_multiple_files=True,
            max_upload_size=MAX_MB,
            key="dropped",
            help="Only you see them, and they are removed when you close this page.",
        )
        if not uploads:
            return None
        dropped = _of_session()
        with st.spinner("Unpacking"):
            dropped.take(uploads)
        for why in dropped.refused.values():
            st.error(_plain(why))
    if not dropped.names:
        return None
    names = list(dropped.names.values())
    name = f"dropped: {names[0] if len(names) == 1 else f'{len(names)} files'}"
    folder = dropped.folder
    return run_catalog.entry(name, folder, (str(folder.resolve()),), is_private=True)


def _plain(text: str) -> str:
    from dashboard import widgets  # it asks us for the run

    return widgets.plain(text)


def _remove(dropped: UploadFolder) -> None:
    shutil.rmtree(dropped.folder, ignore_errors=True)


@st.cache_resource(scope="session", on_release=_remove, show_spinner=False)
def _of_session() -> UploadFolder:
    dropped = UploadFolder(Path(tempfile.mkdtemp(prefix=_PREFIX)))
    # Where the server stops before the session does.
    weakref.finalize(dropped, shutil.rmtree, dropped.folder, ignore_errors=True)
    return dropped
