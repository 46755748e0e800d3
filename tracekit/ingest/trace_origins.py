"""Where a trace that is no local file comes from: a URL or an archive, each with the log files next to it."""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest import remote
from tracekit.ingest.archives import Unpacked
from tracekit.ingest.remote import RemoteFile
from tracekit.model.trace import Trace


@dataclass(frozen=True)
class RemoteTrace:
    """The origin of a remote trace: its file and its companion files, as they were listed. Can be pickled."""

    file: RemoteFile
    companions: tuple[RemoteFile, ...]
    """In the folder of the file, or one above."""
    use_cache: bool
    snapshot: RemoteFile | None = None
    """The rank's memory snapshot, next to the trace file."""

    @property
    def state(self) -> object:
        """The versions of all files; None if the server states none for one of them."""
        files = (self.file, *self.companions)
        if any(file.version is None for file in files):
            return None
        return [[file.url, file.size_bytes, file.version] for file in files]

    def sha256(self) -> str:
        """Return the hash of the trace file's content. Raises BadTraceError if it cannot be downloaded."""
        return remote.sha256(self.file, cache=self.use_cache)

    @contextlib.contextmanager
    def download(self) -> Iterator[Path]:
        """Yield the path of a temporary copy of the trace file, with its companions around it.

        Raises BadTraceError if a file cannot be downloaded; errors of the block name the URL in place of the copy.
        """
        with self.folder() as path:
            remote.fetch(self.file, path, cache=self.use_cache)
            try:
                yield path
            except BadTraceError as error:
                raise BadTraceError(self._with_urls(str(error), path)) from error

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield the path that the trace file would have in a temporary folder with copies of its companions."""
        with tempfile.TemporaryDirectory(prefix="tracekit-") as above:
            path = Path(above, "run", self.file.name)
            path.parent.mkdir()
            for companion in self.companions:
                remote.fetch_current(companion, self.copy_of(companion, path), cache=self.use_cache)
            yield path

    def copy_of(self, companion: RemoteFile, path: Path) -> Path:
        """Return the path of a companion's copy, if the trace file's copy is at `path`."""
        place = path.parent if companion.folder == self.file.folder else path.parent.parent
        return place / companion.name

    def relabel_paths(self, trace: Trace, path: Path) -> Trace:
        """Return a trace that was read from the copy at `path` with URLs in place of local paths."""
        issues = trace.data_quality
        if not issues.is_empty():
            message = pl.col("message").map_elements(lambda text: self._with_urls(text, path), return_dtype=pl.String)
            issues = issues.with_columns(message)
        return trace.replace(path=self.file.shown, data_quality=issues)

    def _with_urls(self, text: str, path: Path) -> str:
        above = self.file.folder.rpartition("/")[0]
        return text.replace(str(path.parent), self.file.folder).replace(str(path.parent.parent), above)


@dataclass(frozen=True)
class ArchivedTrace:
    """The origin of a trace in an archive. Can be pickled, for workers on the same machine."""

    archive: Unpacked
    path: Path
    """Of the unpacked member."""

    @property
    def state(self) -> object:
        """The state of the archive and the member's place in it."""
        if self.archive.state is None:
            return None
        return [self.archive.state, str(self.path.relative_to(self.archive.folder))]

    def sha256(self) -> str:
        """Return the hash of the member's content. Raises BadTraceError if it is gone."""
        with self.local().open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def local(self) -> Path:
        """Return the path of the unpacked member. Raises BadTraceError if it is gone, or on another machine."""
        if not self.path.is_file():
            raise BadTraceError(
                f"{self.archive.shown(str(self.path))}: the unpacked file is not on this machine; "
                "unpack the archive to a folder that all workers can read"
            )
        return self.path

    def relabel_paths(self, trace: Trace) -> Trace:
        """Return a trace of the member with the archive's path in place of that of the folder."""
        issues = trace.data_quality
        if not issues.is_empty():
            message = pl.col("message").map_elements(self.archive.shown, return_dtype=pl.String)
            issues = issues.with_columns(message)
        return trace.replace(path=self.archive.shown(trace.path), data_quality=issues)
