"""A trace file in an archive, together with the log files next to it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest.archives import Unpacked
from tracekit.model.trace import Trace


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
