"""What a file is and which traces it has, from its header: of remote files from the first bytes, cached by version."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracekit.errors import BadTraceError
from tracekit.ingest import decompression, disk_cache, readers, remote
from tracekit.ingest.files import File
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.ingest.remote import RemoteFile

FIRST_BYTES = 64 << 10
_HEAD_BYTES = (FIRST_BYTES, 512 << 10, 4 << 20)
_CODE = ("ingest/*.py", "ingest/readers/**/*.py", "conventions/*.py")

Header = tuple[Reader, Sequence[TraceInfo]]


def read(file: File, *, cache: bool) -> Header:
    """Return the reader of a file and the traces in it. Raises BadTraceError if it has none or cannot be read.

    Of a remote file, 64 KiB are read, and more only where they do not state rank, start and process.
    """
    if file.archived is not None:
        try:
            return _of_local(file.local, file.name)
        except BadTraceError as error:
            raise BadTraceError(file.archived.archive.shown(str(error))) from error
    if file.remote is None:
        return _of_local(file.path, file.name)
    header = _recall_header(file.remote) if cache else None
    if header is None:
        header = _read_remote(file, file.remote, cache=cache)
        if cache:
            remote.remember(file.remote, _what(), _as_json(header))
    if isinstance(header, str):
        raise BadTraceError(header)
    return header


def _of_local(path: str, name: str, *, is_complete: bool = True) -> Header:
    head = next(iter(decompression.Blocks(path)), b"")
    reader = readers.find(head, name)
    if reader is None:
        raise BadTraceError(f"{path}: {readers.unknown_format(head, name)}")
    return reader, reader.traces(path, head, is_complete=is_complete)


def _read_remote(file: File, origin: RemoteFile, *, cache: bool) -> Header | str:
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
        copy = Path(folder, file.name)
        try:
            header = _from_first_bytes(origin, copy)
            if header is None:
                remote.fetch(origin, copy, cache=cache, keep=True)
                header = _of_local(str(copy), file.name)
        except remote.DownloadError:
            raise
        except BadTraceError as error:
            return str(error).replace(str(copy), file.path)
    return header


def _from_first_bytes(origin: RemoteFile, copy: Path) -> Header | None:
    """The header by the first bytes of a file; None if it must be read whole to know its rank."""
    for byte_count in _HEAD_BYTES:
        head = remote.head(origin, byte_count)
        copy.write_bytes(head)
        is_complete = len(head) < byte_count or len(head) == origin.size_bytes
        try:
            reader, infos = _of_local(str(copy), origin.name, is_complete=is_complete)
        except BadTraceError:
            if is_complete or not _may_need_more(copy, origin.name):
                raise
            continue
        if not is_complete and any(info.rank is None for info in infos):
            return None
        if is_complete or byte_count == _HEAD_BYTES[-1] or _is_settled(infos, copy):
            return reader, infos
    raise BadTraceError(
        f"{copy}: no profiler events in its first {_HEAD_BYTES[-1] >> 20} MiB, so this is no profiler trace; "
        "name a trace file or run"
    )


def _may_need_more(copy: Path, name: str) -> bool:
    """Return whether more bytes of a file may show a trace: not if its format is known to have none."""
    reader = readers.find(next(iter(decompression.Blocks(str(copy))), b""), name)
    return reader is not None and reader.has_traces


def _is_settled(infos: Sequence[TraceInfo], copy: Path) -> bool:
    """Return whether a longer head would say the same: readers look at one block of the decompressed file."""
    if all(info.start_ns is not None and info.process_id is not None for info in infos):
        return True
    return len(next(iter(decompression.Blocks(str(copy))), b"")) >= decompression.BLOCK_BYTES


# In the cache --------------------------------------------------------------------------------------------------------


def _what() -> str:
    plugins = [disk_cache.plugin_hash(type(r)) for r in readers.available() if r not in readers.READERS]
    return "+".join(("header", disk_cache.code_hash(Path(__file__).parents[1], _CODE), *plugins))


def _as_json(header: Header | str) -> Any:
    if isinstance(header, str):
        return header
    reader, infos = header
    names = [f.name for f in dataclasses.fields(TraceInfo) if f.name not in ("trace", "companions")]
    return [reader.name, [{name: _plain(getattr(info, name)) for name in names} for info in infos]]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _recall_header(origin: RemoteFile) -> Header | str | None:
    stored = remote.recall(origin, _what())
    if stored is None or isinstance(stored, str):
        return stored
    try:
        name, infos = stored
        reader = next(reader for reader in readers.available() if reader.name == name)
        return reader, [TraceInfo(**{name: _as_tuple(value) for name, value in info.items()}) for info in infos]
    except (TypeError, ValueError, StopIteration):  # of a plug-in that is gone
        return None
