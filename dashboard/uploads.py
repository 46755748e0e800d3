"""Uploaded traces: a run that only the person who uploads it sees, removed when the page is closed.

The files are in a folder of the session. No cache that outlives the session stores anything of them.
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

from dashboard import run_catalog, widgets
from dashboard.run_entry import RunEntry
from tracekit import conventions
from tracekit.conventions import perfetto
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.decompression import Blocks
from tracekit.model import units

MAX_MB = 200
"""Limit of one uploaded file, the same as server.maxUploadSize in .streamlit/config.toml."""
MAX_FILES = 64
MAX_BYTES = 400 << 20
"""Limit of all files of a session."""
MAX_UNPACKED_BYTES = 4 << 30
"""Limit of one decompressed file: a trace compresses to a tenth, a decompression bomb to a thousandth."""
_SUFFIXES = (".json", ".sqlite", ".pfw", *conventions.PICKLE_SUFFIXES, *perfetto.SUFFIXES)
_PREFIX = "tracekit-upload-"
NAME_BEGINS = "uploaded: "
"""How the name of an uploaded run begins."""
_MAX_NAME = 120


@dataclass
class UploadFolder:
    """The folder of one session, and the name of each file in it by the id of its upload."""

    folder: Path
    names: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The name of each upload that was refused, and why, by its id."""

    def problems(self) -> list[str]:
        """Return why uploads were refused, once for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.values():
            by_reason.setdefault(reason, []).append(name)
        return [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
            for reason, names in by_reason.items()
        ]

    def names_by_path(self, uploads: Sequence[UploadedFile]) -> dict[str, str]:
        """Names of the files as the person knows them by their paths here; that of the folder comes last."""
        stored = {
            str(self.folder / self.names[upload.file_id]): upload for upload in uploads if upload.file_id in self.names
        }
        return {path: upload.name for path, upload in stored.items()} | {str(self.folder): "the uploaded files"}

    def update(self, uploads: Sequence[UploadedFile]) -> None:
        """Store the new uploads and remove those that the widget no longer has."""
        current = {upload.file_id for upload in uploads}
        for removed in set(self.names) - current:
            (self.folder / self.names.pop(removed)).unlink(missing_ok=True)
        self.refused = {key: reason for key, reason in self.refused.items() if key in current}
        for upload in uploads:
            if upload.file_id not in self.names and upload.file_id not in self.refused:
                try:
                    self._store(upload)
                except (InputError, BadTraceError, OSError) as error:
                    self.refused[upload.file_id] = upload.name, str(error)

    def _store(self, upload: UploadedFile) -> None:
        name = safe_name(upload.name)
        if name in self.names.values():
            raise InputError("a file of this name was uploaded before; give the file of each rank its own name")
        used_bytes = sum((self.folder / other).stat().st_size for other in self.names.values())
        if len(self.names) >= MAX_FILES or used_bytes + upload.size > MAX_BYTES:
            limit = f"the limit is {MAX_FILES} files with {units.size(MAX_BYTES)} in total"
            raise InputError(f"{limit}; open the dashboard on their folder instead: tracekit dashboard FOLDER")
        path = self.folder / name
        try:
            with path.open("xb") as file:
                shutil.copyfileobj(upload, file)
            refuse_decompression_bomb(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.names[upload.file_id] = name


def safe_name(name: str) -> str:
    """Return a file name that can only be a trace, an I/O log or a snapshot in its folder. Raises InputError.

    >>> safe_name("../../rank00001.<b>.pt.trace.json.gz")
    'rank00001._b_.pt.trace.json.gz'
    """
    last = re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("\\", "/").rpartition("/")[2]).lstrip(".")
    parts = ((suffix, *last.rpartition(suffix)) for suffix in _SUFFIXES)
    packed = ("", ".gz", ".zst")
    matches = [
        (stem, suffix, ending)
        for suffix, stem, dot, ending in parts
        if dot and ending in (packed[:1] if suffix in conventions.PICKLE_SUFFIXES else packed)
    ]
    if not matches:
        raise InputError(
            "the name is not that of a trace, I/O log or memory snapshot; it ends with "
            f"{', '.join(_SUFFIXES)}, or with .gz or .zst after it"
        )
    stem, suffix, ending = matches[0]
    if suffix in conventions.PICKLE_SUFFIXES:  # of the run's rank, if the name states one
        return f"{stem[-_MAX_NAME:].removesuffix('.memory') or 'snapshot'}{conventions.MEMORY_SNAPSHOT_SUFFIX}"
    return f"{stem[-_MAX_NAME:] or 'trace'}{suffix}{ending}"


def refuse_decompression_bomb(path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
    """Raise InputError as soon as a file decompresses to more than `max_bytes`."""
    unpacked = 0
    for block in Blocks(str(path)):
        unpacked += len(block)
        if unpacked > max_bytes:
            raise InputError(
                f"decompresses to more than {units.size(max_bytes)}, the limit of uploaded traces; open the dashboard "
                "on its folder instead: tracekit dashboard FOLDER"
            )


def choose() -> RunEntry | None:
    """Show the upload form; return the run of the uploaded traces, None without any."""
    with st.expander("Upload a trace"):
        uploads = st.file_uploader(
            "Traces of one run, one file per rank; also their I/O logs and memory snapshots",
            accept_multiple_files=True,
            max_upload_size=MAX_MB,
            key="uploaded",
            help="Only you can see them. They are removed when you close this page.",
        )
        if not uploads:
            return None
        folder = _session_folder()
        with st.spinner("Unpacking"):
            folder.update(uploads)
        st.session_state[widgets.UPLOAD_NAMES] = folder.names_by_path(uploads)
        for problem in folder.problems():
            st.error(widgets.plain(problem))
    if not folder.names:
        return None
    names = list(folder.names.values())
    name = f"{NAME_BEGINS}{names[0] if len(names) == 1 else f'{len(names)} files'}"
    return run_catalog.entry(name, folder.folder, (str(folder.folder.resolve()),), is_private=True)


@st.cache_resource(scope="session", on_release=lambda store: shutil.rmtree(store.folder, True), show_spinner=False)
def _session_folder() -> UploadFolder:
    uploaded = UploadFolder(Path(tempfile.mkdtemp(prefix=_PREFIX)))
    # In case the server stops before the session ends.
    weakref.finalize(uploaded, shutil.rmtree, uploaded.folder, ignore_errors=True)
    return uploaded
