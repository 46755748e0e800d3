"""Find the files of a run by name, in a folder, a list, a glob or behind a URL. No file is read."""

import contextlib
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from tracekit import conventions
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import readers

RunLocation: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_MAX_DEPTH = 5
_GLOB = re.compile(r"[*?\[]")
_URL = re.compile(r"^[a-z][a-z0-9+.-]+(?:::[a-z0-9+.-]+)*://", re.I)


@dataclass(frozen=True)
class File:
    """One file: path or URL, size and, for a URL, its fsspec file system."""

    path: str
    size_bytes: int
    system: Any = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """Return the path without its last part."""
        return self.path.rstrip("/").rpartition("/")[0]

    @contextlib.contextmanager
    def local(self, *, first_bytes: int | None = None, companions: Iterable[str] = ()) -> Iterator[str]:
        """Yield a local path to the file, or to at least its `first_bytes`. The copy of a remote file is temporary.

        Remote files of the same folder named in `companions` are copied along. Raises BadTraceError if that fails.
        """
        if self.system is None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
            copy = Path(folder, self.name)
            try:
                if first_bytes is None:
                    self._fetch(copy, companions)
                else:
                    copy.write_bytes(self.system.cat_file(self.path, start=0, end=first_bytes))
            except Exception as error:  # each file system has its own exceptions
                raise BadTraceError(
                    f"{self.path}: cannot be downloaded ({_line(error)}); check access to it"
                ) from error
            yield str(copy)

    def _fetch(self, copy: Path, companions: Iterable[str]) -> None:
        self.system.get_file(self.path, str(copy))
        for name in companions:
            other = f"{self.folder}/{name}"
            if self.system.exists(other):
                self.system.get_file(other, str(copy.with_name(name)))

    def text(self) -> str:
        """Return the file's text. Raises OSError or ValueError if it cannot be read as UTF-8."""
        if self.system is None:
            return Path(self.path).read_text(encoding="utf-8")
        return cast("bytes", self.system.cat_file(self.path)).decode("utf-8")


@dataclass(frozen=True)
class RunFiles:
    """The path of a run, the files that may be traces, and the manifests."""

    root: str
    traces: tuple[File, ...]
    manifests: tuple[File, ...]


def find(where: RunLocation) -> RunFiles:
    """Find possible traces in a folder, a list of paths, a glob or a URL (s3://, gs://, memory://, …).

    Folders are searched five levels deep, without hidden folders and checkpoints. Raises InputError if a path does not
    exist or cannot be accessed, or if no file may be a trace.
    """
    named = [where] if isinstance(where, str | os.PathLike) else list(where)
    if not named:
        raise InputError("no path is given; name a run's folder or its trace files")
    found: dict[str, File] = {}
    for path in named:
        found |= {file.path: file for file in _find_files(os.fspath(path))}
    manifests = tuple(f for f in found.values() if f.name == conventions.MANIFEST_FILE)
    traces = tuple(sorted((f for f in found.values() if f not in manifests), key=lambda f: natural_key(f.path)))
    root = os.fspath(named[0]) if len(named) == 1 else _common_folder(traces)
    if not traces:
        raise InputError(f"{root}: {_why_none(root)}; name a run's folder or a trace file")
    return RunFiles(root, traces, manifests)


def natural_key(text: str) -> tuple[str | int, ...]:
    """Return a sort key that orders numbers in names by value.

    >>> sorted(["rank10", "rank9"], key=natural_key)
    ['rank9', 'rank10']
    """
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text))


def _why_none(root: str) -> str:
    if Path(root).is_file():
        return "this is a run's manifest, not a trace"
    if _GLOB.search(root) and not Path(root).exists():
        return f"no trace file matches it ({_patterns()})"
    if Path(root).is_dir() and not os.access(root, os.R_OK | os.X_OK):
        return "no permission to read this folder"
    return f"no trace files ({_patterns()}) in this folder"


def _find_files(named: str) -> list[File]:
    if not named:
        raise InputError("the path of a run is empty: perhaps a variable that is not set; name a run's folder")
    if _URL.match(named):
        return _find_remote_files(named)
    path = Path(named)
    if path.is_dir():
        return list(_walk(path))
    if path.exists():
        manifest = path.parent / conventions.MANIFEST_FILE
        return [_file(p) for p in (path, manifest) if p.is_file()]
    if _GLOB.search(named):
        matched = sorted(glob.glob(named, recursive=True), key=natural_key)  # noqa: PTH207  (Path.glob needs a relative one)
        return [
            file for match in matched for file in _find_files(match) if _may_be_trace(file.name) or _is_manifest(file)
        ]
    raise InputError(f"{named}: no such file or folder; check the path")


def _walk(root: Path) -> Iterator[File]:
    for folder, folders, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < _MAX_DEPTH else []
        if _is_checkpoint(names):
            folders[:] = []
            continue
        for name in sorted(names):
            path = Path(folder, name)
            if _may_be_trace(name) and path.is_file():
                yield _file(path)


def _find_remote_files(url: str) -> list[File]:
    try:
        import fsspec  # not at the top: it doubles the start time, and few runs are remote

        system, path = fsspec.core.url_to_fs(url)
        if type(system).__name__ == "LocalFileSystem":
            return _find_files(path)
        if _GLOB.search(path):
            details = system.glob(path, detail=True)
        else:
            details = system.find(path, maxdepth=_MAX_DEPTH + 1, detail=True)
        single = list(details) == [path]
        if single:
            manifest = f"{path.rpartition('/')[0]}/{conventions.MANIFEST_FILE}"
            details |= {manifest: system.info(manifest)} if system.exists(manifest) else {}
    except ImportError as error:
        raise InputError(f"{url}: {_line(error)}; install that package with pip") from error
    except InputError:
        raise
    except Exception as error:  # each file system has its own exceptions
        raise InputError(
            f"{url}: cannot be listed ({_line(error)}); check the address and your access to it"
        ) from error
    files = [File(name, int(d.get("size") or 0), system) for name, d in details.items() if d.get("type") == "file"]
    if not files:
        raise InputError(f"{url}: no such file or folder; check the address")
    inside: dict[str, list[str]] = {}
    for file in files:
        inside.setdefault(file.folder, []).append(file.name)
    checkpoints = tuple(f"{folder}/" for folder, names in inside.items() if _is_checkpoint(names))
    wanted = [file for file in files if _may_be_trace(file.name) and not file.path.startswith(checkpoints)]
    return files if single else wanted


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _may_be_trace(name: str) -> bool:
    is_other = name.startswith(".") or name == conventions.TRUTH_FILE
    return name.lower().endswith(readers.trace_suffixes()) and not is_other


def _patterns() -> str:
    return ", ".join(f"*{suffix}" for suffix in readers.trace_suffixes())


def _is_checkpoint(names: Iterable[str]) -> bool:
    """Return whether these file names are of a checkpoint of torch.distributed.checkpoint, complete or not."""
    return any(name == ".metadata" or name.endswith(".distcp") for name in names)


def _is_manifest(file: File) -> bool:
    return file.name == conventions.MANIFEST_FILE


def _file(path: Path) -> File:
    return File(str(path), path.stat().st_size)


def _common_folder(traces: tuple[File, ...]) -> str:
    folders = sorted({file.folder or "." for file in traces})
    with contextlib.suppress(ValueError):  # absolute and relative paths are mixed
        return os.path.commonpath(folders)
    return folders[0] if folders else "."
