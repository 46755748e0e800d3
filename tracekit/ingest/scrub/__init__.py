"""A copy of a run that can be shared: without host names, users and paths, with all numbers unchanged."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tracekit import conventions
from tracekit.conventions import perfetto, plain_pickles
from tracekit.errors import InputError
from tracekit.ingest import archives
from tracekit.ingest.scrub import streams
from tracekit.ingest.scrub.secrets import HOST, USER, Secrets

_LOGS = (
    conventions.CHECKPOINT_LOG_SUFFIX,
    conventions.METRICS_SUFFIX,
    conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX,
    conventions.ATTEMPTS_FILE,
)
_TRACES = (".json", ".json.gz", ".pfw", ".pfw.gz")
_PICKLES = (".pickle", ".pkl")
_DATABASE = (
    "a database, such as an export of Nsight Systems, has host names, environment and command lines: share a report of "
    "tracekit instead"
)
_PERFETTO = "a Perfetto trace: scrub the run that it was exported from, and export the copy"
_OTHER_KINDS = {
    (".sqlite", ".sqlite.gz", ".sqlite.zst", ".db", ".nsys-rep"): _DATABASE,
    tuple(f"{suffix}{packed}" for suffix in perfetto.SUFFIXES for packed in ("", ".gz", ".zst")): _PERFETTO,
    archives.SUFFIXES: "an archive: unpack it and scrub the folder",
    (".zst",): "compressed with zstd: decompress it",
}
"""Why files are left out, by the endings of their names."""
# Of profiler traces and I/O logs; of execution traces.
_EVENTS = (b'"traceEvents"', b'"ph"', b'"ctrl_deps"')


@dataclass(frozen=True)
class ScrubResult:
    """The files written, the values removed (kind -> distinct values, places) and the files not copied."""

    out: Path
    files: tuple[str, ...]
    removed: Mapping[str, tuple[int, int]]
    left_out: tuple[tuple[str, str], ...]
    """Names and reasons of what was not copied."""


def scrub(run: Path, out: Path, *, words: Iterable[str] = (), force: bool = False) -> ScrubResult:
    """Copy a run (a folder, or one trace file) to `out` without what identifies its machines and users.

    Removed are user and host names (found in paths, the manifest, file names and addresses, and `words`), the folders
    of paths, URLs, IP and e-mail addresses, and values under keys such as api_key. The placeholder of a value is the
    same in all files. `out` is created only after the copy was read again and has none of the removed values. Raises
    InputError if `run` is not a run, if `out` exists (unless `force`, which replaces a run or a file), or if a file
    cannot be read.
    """
    _check_places(run, out, force=force)
    sources, left_out = _sources(run)
    if not sources:
        raise InputError(f"{run}: no trace, manifest or log in it to scrub")
    secrets = Secrets()
    for word in words:
        secrets.add(USER, json.dumps(word)[1:-1].encode())
    for source in sources:
        # Host in a file name that ``tensorboard_trace_handler`` made: HOST_PID.TIME.pt.trace.json.
        worker, _, rest = source.name.partition(".")
        host, _, pid = worker.rpartition("_")
        secrets.add(HOST, os.fsencode(host if pid.isdigit() and rest.partition(".")[0].isdigit() else ""))
        for piece in _pieces(source):
            secrets.learn(piece)
    partial = out.with_name(out.name + conventions.PARTIAL_SUFFIX)
    _remove(partial)
    try:
        names = _write(sources, secrets, run=run, partial=partial)
        _verify(partial, secrets)
        if force:
            _remove(out)
        partial.rename(out)
    finally:
        _remove(partial)
    return ScrubResult(out, tuple(names), secrets.removal_counts(), tuple(left_out))


def _check_places(run: Path, out: Path, *, force: bool) -> None:
    if not run.exists():
        raise InputError(f"{run}: there is no such file or folder; check the path")
    if out.exists() and not out.is_file() and not out.is_dir():
        raise InputError(f"{out}: is a device or pipe; name a file or folder")
    source, target = run.resolve(), out.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise InputError(f"{out}: is inside the run, or the run is inside it; name another path")
    if not out.exists():
        return
    if not force:
        raise InputError(f"{out}: already exists and is not overwritten without --force")
    foreign = _sources(out)[1]
    if foreign:
        raise InputError(f"{out}: has other files than a run ({foreign[0][0]}), so --force does not replace it")


def _sources(run: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files of a run that can be scrubbed, in order, and the names of the others with the reason."""
    sources: list[Path] = []
    left_out: list[tuple[str, str]] = []
    for path in sorted(_entries(run)):
        name = str(path.relative_to(run)) if run.is_dir() else path.name
        reason = _why_not(path)
        if reason:
            left_out.append((name, reason))
        else:
            sources.append(path)
    return sources, left_out


def _entries(run: Path) -> Iterator[Path]:
    """Yield the files of a run and of its window folders, and its other folders."""
    if not run.is_dir():
        yield run
        return
    for path in run.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name.startswith("window"):
            yield from path.iterdir()
        else:
            yield path


def _why_not(path: Path) -> str:
    """Return why a path cannot be scrubbed; '' if it can."""
    if path.is_symlink():
        return "a link"
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "a pipe or device"
    if path.name == conventions.MANIFEST_FILE or path.name.endswith(_LOGS):
        return ""
    if path.name.endswith(_PICKLES):
        return plain_pickles.why_not(path)
    if not path.name.endswith(_TRACES):
        reasons = (reason for endings, reason in _OTHER_KINDS.items() if path.name.lower().endswith(endings))
        return next(reasons, "a kind of file that cannot be scrubbed")
    if path.stat().st_size == 0:
        return "empty"
    return "" if any(mark in piece for piece in streams.pieces(path) for mark in _EVENTS) else "JSON, but no trace"


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the text of a file as JSON; of a pickle its texts."""
    return plain_pickles.texts(path) if plain_pickles.is_pickle(path) else streams.pieces(path)


def _write(sources: list[Path], secrets: Secrets, *, run: Path, partial: Path) -> list[str]:
    names: list[str] = []
    for source in sources:
        name = secrets.hide_in_name(str(source.relative_to(run)) if run.is_dir() else source.name)
        if name in names:
            raise InputError(f"{source}: would get the name {name}, which another file has; rename one of them")
        target = partial / name if run.is_dir() else partial
        if plain_pickles.is_pickle(source):
            plain_pickles.write(source, target, secrets.hide)
        else:
            streams.write(target, map(secrets.hide, streams.pieces(source)), compressed=streams.is_gzip(source))
        names.append(name)
    return names


def _verify(out: Path, secrets: Secrets) -> None:
    """Read the copy again. A value that should be removed is a bug of ours; then no copy is created."""
    for path in sorted(out.rglob("*")) if out.is_dir() else [out]:
        for piece in _pieces(path) if path.is_file() else ():
            remains = secrets.find_leaks(piece)
            if remains:
                raise AssertionError(f"{path.name}: still holds a {remains[0]}; nothing was written")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
