"""A path, list, glob or URL to a Run: find the files, identify their traces, read each trace when it is needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from tracekit import conventions
from tracekit.conventions.read_settings import NO_SETTINGS, ReadSettings
from tracekit.errors import BadTraceError, InputError, did_you_mean
from tracekit.ingest import discovery, files, readers, roles, trace_cache
from tracekit.ingest.discovery import Identified
from tracekit.ingest.files import ArchivedTrace, File, RemoteTrace, RunFiles, RunLocation
from tracekit.ingest.named_steps import with_named_steps
from tracekit.ingest.readers import logs
from tracekit.ingest.readers.reader import Companion, Reader, TraceInfo
from tracekit.ingest.roles import Role
from tracekit.ingest.trace_cache import cached_source
from tracekit.ingest.trace_files import QualityIssue, TraceFile
from tracekit.model import environment, schema
from tracekit.model.manifest import Manifest
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.source import Executor, Source
from tracekit.model.trace import Trace
from tracekit.sync import alignment

Progress: TypeAlias = Callable[[int, int], None]


def load(
    where: RunLocation,
    *,
    on_progress: Progress | None = None,
    cache: bool = True,
    settings: ReadSettings = NO_SETTINGS,
    executor: Executor | None = None,
    run_class: type[Run] = Run,
    role: str | None = None,
) -> Run:
    """Load a run: a folder, archive, list or glob of trace files, one trace file, or a URL (s3://, gs://, …).

    Only headers are read now; a trace is read when a table or fact is requested.

    Args:
        where: The path, paths or URL.
        on_progress: Called as `on_progress(done, total)` after each file.
        cache: Whether parsed tables are stored in the user's cache, and read from there.
        settings: What the user states of devices and steps.
        executor: What measures the traces; by default threads of this process.
        run_class: The class of the run: that of the library has more methods.
        role: The role to return the run of, where processes of several roles (trainer, rollout) were recorded; by
            default that with most ranks. `Run.roles` has the runs of all roles by name.

    Returns:
        The run. Its times are in ns, sizes in bytes. `Run.data_quality` lists what is missing, guessed or left out.

    Raises:
        InputError: A path does not exist or has no trace, there is no such role, or a trace has no span of the steps'
            name.
        BadTraceError: No trace can be read.
    """
    scan = files.find(where, cache=cache)
    loading = _Loading(scan, cache, settings, executor, run_class)
    identified = discovery.identify(
        scan.traces, manifest_folders=loading.manifests, on_progress=on_progress, cache=cache
    )
    run = loading.job(identified)
    if role is not None:
        run = _run_of_role(run, role)
    if len(run.sources) == 1:
        run.trace(run.sources[0].rank)  # it is read in any case, and its errors are raised at once
    return run


def _run_of_role(run: Run, role: str) -> Run:
    if role in run.roles:
        return run.roles[role]
    if not run.roles and Manifest.of(run.manifest).role == role:  # the folder of a role alone
        return run
    if not run.roles:
        raise InputError(f"{run.path}: no role {role!r:.60}: all processes run one program; name no role")
    raise InputError(
        f"{run.path}: no role {role!r:.60}{did_you_mean(role, run.roles)}; the roles are {', '.join(run.roles)}"
    )


@dataclass(frozen=True)
class _Loading:
    """What makes the files of a folder a run, or a run of each role."""

    scan: RunFiles
    cache: bool
    settings: ReadSettings
    executor: Executor | None
    run_class: type[Run]

    @property
    def manifests(self) -> dict[str, File]:
        """The manifests by folder."""
        return {file.folder: file for file in self.scan.manifests}

    def run(self, identified: Identified, scan: RunFiles, role: str = "") -> Run:
        """Run of these traces, none of which is read, at the path of `scan`."""
        traces, issues, _ = identified
        fields = _manifest(traces, self.manifests, issues, cache=self.cache)
        plain = [_source(t, scan, cache=self.cache) for t in traces]
        sources = [_source_with_settings(source, self.settings) for source in plain]
        read_traces = {
            source: with_settings(trace, self.settings)
            for source, trace in zip(sources, map(partial(_read_already, cache=self.cache), traces, plain), strict=True)
            if trace is not None
        }
        unreadable_ranks = {issue.rank for issue in issues if issue.kind == "unreadable"}
        stated = Manifest.of(fields)
        is_whole = any(file.folder == scan.root.rstrip("/") for file in scan.manifests)
        listed = {window.window: window.outlier is not None for window in stated.windows} if is_whole else {}
        issues += discovery.missing_ranks(traces, stated.world_size, unreadable_ranks, listed_windows=listed)
        issues += discovery.partial_traces(scan.partial)
        issues += _stated_issues(traces, issues)
        run = self.run_class(
            scan.root,
            sources,
            manifest=fields,
            data_quality=_table(issues),
            align=alignment.offsets,
            executor=self.executor,
            role=role,
        )
        run.cache_traces(read_traces)
        return run

    def job(self, identified: Identified) -> Run:
        """Run of these traces; if the other runs of the folder are roles of its job, with the runs of all roles."""
        roles_of_job = self._roles(identified) if identified.other_runs else []
        if not roles_of_job:
            return self.run(identified, self.scan)
        names = [role.name for role in roles_of_job]
        folder_issues = _issues_without_roles(identified.issues, roles_of_job)
        runs = {}
        for role in roles_of_job:
            role_files = tuple(dict.fromkeys(t.file for t in role.traces))
            if role.traces is identified.traces:
                of_role = Identified(identified.traces, folder_issues)
            else:
                of_role = discovery.identify(role_files, manifest_folders=self.manifests, cache=self.cache)
            message = (
                f"The folder has recordings of {len(names)} roles of a job at the same time: {', '.join(names)}. "
                f"This run is {role.name}; load(…).roles has the others."
            )
            of_role.issues.append(QualityIssue("roles", message))
            runs[role.name] = self.run(of_role, self._scan_of(role, role_files), role.name)
        for run in runs.values():
            run.roles = runs
        return runs[names[0]]

    def _roles(self, identified: Identified) -> list[Role]:
        return roles.find_roles(
            identified.traces,
            identified.other_runs,
            root=self.scan.root.rstrip("/"),
            stated_name=lambda traces: Manifest.of(_manifest(traces, self.manifests, [], cache=self.cache)).role,
            read=self._read,
        )

    def _read(self, t: TraceFile) -> Trace | None:
        try:
            return t.info.trace or _source(t, self.scan, cache=self.cache).read()
        except BadTraceError:
            return None

    def _scan_of(self, role: Role, role_files: tuple[File, ...]) -> RunFiles:
        partial_files = tuple(file for file in self.scan.partial if f"{file.folder}/".startswith(f"{role.path}/"))
        return replace(self.scan, root=role.path, traces=role_files, partial=partial_files)


def with_settings(trace: Trace, settings: ReadSettings) -> Trace:
    """Return the trace with the steps that the user names, and what is stated of devices in its header."""
    if settings.devices:
        trace = trace.replace(header={**trace.header, environment.DEVICE_OVERRIDES: settings.devices})
    return trace if settings.step_name is None else with_named_steps(trace, settings.step_name)


def with_companions(trace: Trace, path: str, companions: Sequence[Companion] = ()) -> Trace:
    """A trace with the tables of its companion files: logs next to `path` or one folder above, and `companions`."""
    folder = Path(path).parent

    def place(name: str) -> Path | None:
        return next((p for p in (folder / name, folder.parent / name) if p.is_file()), None)

    names = readers.companions(trace.rank, lambda name: place(name) is not None)
    logs = [Companion(reader, str(place(name)), TraceInfo()) for name, reader in names.items()]
    tables: dict[str, list[pl.DataFrame]] = {}
    for companion in (*logs, *companions):
        try:
            part = companion.reader.read(companion.path, companion.info, rank=trace.rank, window=trace.window)
        except BadTraceError as error:
            issue = pl.DataFrame([("bad_companion", f"{error}.", 0.0)], schema.DATA_QUALITY.schema, orient="row")
            part = Trace(trace.rank, trace.window, companion.path, data_quality=issue)
        for table_name, table in part.tables.items():
            if not table.is_empty():
                tables.setdefault(table_name, [getattr(trace, table_name)]).append(table)
    return trace.replace(**{name: pl.concat(parts) for name, parts in tables.items()})


def _source_with_settings(source: Source, settings: ReadSettings) -> Source:
    is_default = settings == NO_SETTINGS
    return source if is_default else replace(source, read=partial(_read_with_settings, source.read, settings))


def _read_with_settings(read: Callable[[], Trace], settings: ReadSettings) -> Trace:
    return with_settings(read(), settings)


def _source(t: TraceFile, scan: RunFiles, *, cache: bool) -> Source:
    paths = tuple(c.file.path for c in t.companions if c.file.remote is None and c.file.archived is None)
    info = replace(t.info, trace=None, companions=_local_companions(t))
    if t.file.archived is not None:
        read = partial(_read_archived, t.reader, t.file.archived, info, t.rank, t.window)
        source = Source(t.rank, t.window, t.file.path, t.file.size_bytes, read, t.file.archived, paths)
    elif t.file.remote is None:
        read = partial(_read, t.reader, t.file.path, info, t.rank, t.window)
        source = Source(t.rank, t.window, t.file.path, t.file.size_bytes, read, companions=paths)
    else:
        file, folders = t.file.remote, scan.folders
        names = readers.companions(t.rank, lambda name: folders.companion(file, name) is not None)
        logs = tuple(log for name in names if (log := folders.companion(file, name)) is not None)
        companions = [c.file.remote for c in t.companions if c.file.remote is not None]
        snapshot = conventions.rank_file(t.rank, conventions.MEMORY_SNAPSHOT_SUFFIX)
        origin = RemoteTrace(t.file.remote, (*logs, *companions), cache, scan.folders.file(t.file.folder, snapshot))
        read = partial(_read_remote, replace(t, info=info), origin)
        source = Source(t.rank, t.window, t.file.path, t.file.size_bytes, read, origin)
    return cached_source(source) if cache else source


def _read_already(t: TraceFile, source: Source, *, cache: bool) -> Trace | None:
    """Return the trace that was read to know its rank; None if it was not, or is read with files of other tools."""
    if t.info.trace is None or t.companions:
        return None
    trace = t.info.trace.replace(window=t.window)
    if isinstance(source.origin, ArchivedTrace):
        return source.origin.relabel_paths(with_companions(trace, t.file.local, _local_companions(t)))
    if not isinstance(source.origin, RemoteTrace):
        return with_companions(trace, t.file.path, _local_companions(t))
    with source.origin.folder() as local:
        companions = _remote_companions(t, source.origin, local)
        trace = source.origin.relabel_paths(with_companions(trace, str(local), companions), local)
    if cache:
        trace_cache.store(source, trace)
    return trace


def _read(reader: Reader, path: str, info: TraceInfo, rank: int, window: int) -> Trace:
    return with_companions(reader.read(path, info, rank=rank, window=window), path, info.companions)


def _read_archived(reader: Reader, origin: ArchivedTrace, info: TraceInfo, rank: int, window: int) -> Trace:
    try:
        return origin.relabel_paths(_read(reader, str(origin.local()), info, rank, window))
    except BadTraceError as error:
        raise BadTraceError(origin.archive.shown(str(error))) from error


def _read_remote(t: TraceFile, origin: RemoteTrace) -> Trace:
    with origin.download() as path:
        info = replace(t.info, companions=_remote_companions(t, origin, path))
        return origin.relabel_paths(_read(t.reader, str(path), info, t.rank, t.window), path)


def _local_companions(t: TraceFile) -> tuple[Companion, ...]:
    """Return the files of other tools that belong to a trace and are on this machine."""
    return tuple(Companion(c.reader, c.file.local, c.info) for c in t.companions if c.file.remote is None)


def _remote_companions(t: TraceFile, origin: RemoteTrace, path: Path) -> tuple[Companion, ...]:
    """Return the files of other tools that belong to a remote trace, by their copies around that of the trace."""
    return tuple(
        Companion(c.reader, str(origin.copy_of(c.file.remote, path)), c.info)
        for c in t.companions
        if c.file.remote is not None
    )


def _manifest(
    traces: Sequence[TraceFile], manifests: Mapping[str, File], issues: list[QualityIssue], *, cache: bool
) -> Mapping[str, Any]:
    file = manifests.get(str(traces[0].job[0]))
    if file is None:
        return next((t.info.manifest for t in traces if t.info.manifest is not None), {})
    try:
        return logs.parse_manifest(file.text(cache=cache))
    except (ValueError, OSError, BadTraceError) as error:
        message = f"{file.path}: cannot be read as JSON ({error}); the run has no manifest"
        issues.append(QualityIssue("bad_manifest", message, file.path))
        return {}


def _stated_issues(traces: Sequence[TraceFile], found_issues: Sequence[QualityIssue]) -> list[QualityIssue]:
    """Issues that files state of those that they were made of, without kinds that are found again."""
    found_kinds = {issue.kind for issue in found_issues}
    stated = [issue for t in traces for issue in t.info.run_issues if issue.get("kind") not in found_kinds]
    return [
        QualityIssue(
            str(issue.get("kind")),
            str(issue.get("message")),
            issue.get("path"),
            issue.get("rank"),
            issue.get("affected_ratio") or 0.0,
        )
        for issue in stated
    ]


def _issues_without_roles(issues: Sequence[QualityIssue], roles_of_job: Sequence[Role]) -> list[QualityIssue]:
    """Issues of a folder without those that call the files of a role those of another run."""
    first_paths = {role.traces[0].file.path for role in roles_of_job}
    return [issue for issue in issues if issue.kind != "mixed_jobs" or issue.path not in first_paths]


def _table(issues: Sequence[QualityIssue]) -> pl.DataFrame:
    if not issues:
        return RUN_DATA_QUALITY.empty()
    rows = [{name: _printable(value) for name, value in vars(issue).items()} for issue in issues]
    return pl.DataFrame(rows, schema_overrides=RUN_DATA_QUALITY.schema)


def _printable(value: Any) -> Any:
    # File names on Linux are bytes; those that are not UTF-8 fit in no table.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
