"""Load, measure and judge the runs of a command, with a progress bar."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit import conventions
from tracekit.cli import output, question
from tracekit.cli.question import Input, Kind
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.cli.settings import CheckSettings
    from tracekit.conventions.read_settings import ReadSettings
    from tracekit.model.run import Run
    from tracekit.model.source import Executor
    from tracekit.model.trace import TraceFact
    from tracekit.regression.baseline import Baseline
    from tracekit.regression.comparison import RunSamples
    from tracekit.regression.scaling import ScalingSide
    from tracekit.rules.rule import Report, Rule

SAMPLE = "sample_run"
CHECKOUT_SAMPLES = "sample_traces"
_START_BYTES = 64 << 10


def sample_run() -> Path:
    """Return the sample run: the one in the installed package, or the smallest of the checkout's. Raises InputError."""
    package = Path(__file__).parents[1]
    if (package / SAMPLE).is_dir():
        return package / SAMPLE
    runs = [path.parent for path in (package.parent / CHECKOUT_SAMPLES).glob("*/run.json")]
    if not runs:
        raise InputError("this installation has no sample run; name a run of your own")
    return min(runs, key=lambda run: sum(file.stat().st_size for file in run.rglob("*") if file.is_file()))


def check_runs(
    paths: Sequence[str],
    rules: "Sequence[Rule]",
    *,
    facts: "Sequence[TraceFact]" = (),
    cache: bool = True,
    settings: "ReadSettings | None" = None,
    role: str | None = None,
    executor: "Executor | None" = None,
) -> "list[tuple[Report, Run]]":
    """Return each run with its report and costs by replay, in the given order. Raises InputError if one is unusable.

    `facts` are measured in the same pass. `settings` and `role` are those of `loader.load`. `executor` measures. With
    `cache`, the report by all rules with default thresholds is stored for the dashboard.
    """
    from tracekit.conventions.read_settings import NO_SETTINGS
    from tracekit.ingest import loader
    from tracekit.rules import engine, report_cache

    settings = settings or NO_SETTINGS
    reports = []
    with output.progress() as bar:
        for path in paths:
            _note(path, cache=cache)
            # The dashboard asks for the report of a path without a role.
            key = _key_to_store(path, rules, settings) if cache and role is None else None
            run = loader.load(
                path, on_progress=bar.on_file, cache=cache, settings=settings, executor=executor, role=role
            )
            measured = bar.trace_callback(len(run.sources))
            report = engine.check(run, rules, facts=(*facts, *report_cache.FACTS), on_progress=measured)
            if key is not None:
                report_cache.store(key, report, path, settings, has_comparisons=False)
            reports.append((report, run))
            _require_all_read(run)
    return reports


def check_other_roles(
    checked: "Sequence[tuple[Report, Run]]", rules: "Sequence[Rule]", *, facts: "Sequence[TraceFact]" = ()
) -> "list[tuple[Report, Run]]":
    """Return reports and runs, each followed by those of the other roles of its job."""
    from tracekit.rules import engine

    reports = []
    with output.progress() as bar:
        for report, run in checked:
            reports.append((report, run))
            for role_run in run.roles.values():
                if role_run is not run:
                    measured = bar.trace_callback(len(role_run.sources))
                    reports.append((engine.check(role_run, rules, facts=facts, on_progress=measured), role_run))
                    _require_all_read(role_run)
    return reports


def _key_to_store(path: str, rules: "Sequence[Rule]", settings: "ReadSettings") -> str | None:
    """Return the key of a report that the dashboard reads; None for other rules, and where there is one already."""
    from tracekit.conventions import object_storage
    from tracekit.rules import report_cache
    from tracekit.rules.registry import all_rules

    is_default = tuple(rules) == tuple(rule() for rule in all_rules())
    if not is_default or object_storage.is_url(path):  # a URL would be listed once more
        return None
    key = report_cache.run_key(path, settings=settings)
    return key if key is not None and not report_cache.is_stored(key) else None


def check_by_settings(
    path: str,
    facts: "Sequence[TraceFact]" = (),
    *,
    cache: bool = True,
    step_name: str | None = None,
    role: str | None = None,
    with_other_roles: bool = False,
) -> "tuple[list[Report], CheckSettings]":
    """Return the report of a run by the rules, devices and ignores of the nearest settings file, and the settings.

    `with_other_roles` adds the reports of the other roles of its job.
    """
    from tracekit.cli import settings
    from tracekit.rules.registry import all_rules

    catalog = all_rules()
    resolved = settings.resolve(None, catalog, step_name=step_name)
    rules = settings.configured_rules(resolved, catalog)
    checked = check_runs([path], rules, facts=facts, cache=cache, settings=resolved.read, role=role)
    if with_other_roles:
        checked = check_other_roles(checked, rules, facts=facts)
    return [settings.apply_ignores(report, resolved.ignore, catalog) for report, _ in checked], resolved


def open_measured(
    path: str,
    facts: "Sequence[TraceFact]",
    *,
    cache: bool = True,
    step_name: str | None = None,
    role: str | None = None,
    executor: "Executor | None" = None,
) -> "Run":
    """Return a run with facts measured, by `executor`. Raises InputError if it cannot be used."""
    run = open_run(path, cache=cache, step_name=step_name, role=role, executor=executor)
    _measure(run, facts)
    return run


def scaling_side(run: "Run") -> "ScalingSide":
    """Return a run to compare with one of another size. Raises NotComparableError where it marks no steps."""
    from tracekit.regression import scaling

    _measure(run, scaling.FACTS)
    return scaling.ScalingSide.of(run)


def open_baseline(
    path: str,
    rules: "Sequence[Rule]",
    *,
    cache: bool = True,
    settings: "ReadSettings | None" = None,
    role: str | None = None,
    executor: "Executor | None" = None,
) -> "Baseline":
    """Return a saved baseline, or one of a run. Raises InputError if the path is neither."""
    from tracekit.regression import baseline as baselines
    from tracekit.report import baseline_json as saved

    _note(path, cache=cache)
    with _document(path) as document:
        if saved.is_baseline(document):
            return saved.read(document)
    checked = check_runs(
        [path], rules, facts=baselines.FACTS, cache=cache, settings=settings, role=role, executor=executor
    )
    if role is None:
        require_one_role(run for _, run in checked)
    return baselines.of_reports(checked)


def require_one_role(runs: "Iterable[Run]") -> None:
    """Raise InputError for a run whose job has several roles and of which none was chosen: a baseline is of one."""
    for run in runs:
        if run.roles:
            raise InputError(f"{run.path}: the job has the roles {', '.join(run.roles)}: choose one with --role")


def role_folder(folder: Path, role: str) -> Path:
    """Folder that a role records into: `folder` or one in it, by the role in its ``run.json``, else by its name.

    Unlike `open_run`, it needs no traces: the training may still run. Raises InputError if there is none.
    """
    roles = stated_roles(folder)
    places = [place for place, name in roles.items() if name == role]
    named = folder / role
    if not places and named.parent == folder and named.is_dir() and named not in roles:
        places = [named]
    if not places:
        known = f"; the roles are {', '.join(sorted(set(roles.values())))}" if roles else ""
        raise InputError(f"{folder}: no folder of the role {role!r:.60}{known}")
    return places[0]


def stated_roles(folder: Path) -> dict[Path, str]:
    """Role that each ``run.json`` states, by its folder: `folder` and those in it."""
    from tracekit.ingest.readers import logs

    inner = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    manifests = {place: logs.read_manifest(place / conventions.MANIFEST_FILE) for place in (folder, *inner)}
    return {place: manifest.role for place, manifest in manifests.items() if manifest and manifest.role}


def open_run(
    path: str,
    *,
    cache: bool = True,
    step_name: str | None = None,
    role: str | None = None,
    executor: "Executor | None" = None,
) -> "Run":
    """Return a run, read by the nearest settings file. Raises InputError if it cannot be used."""
    from tracekit.cli import settings_file
    from tracekit.ingest import loader

    _note(path, cache=cache)
    settings = settings_file.nearest_read_settings(step_name=step_name)
    with output.progress() as bar:
        run = loader.load(path, on_progress=bar.on_file, cache=cache, settings=settings, executor=executor, role=role)
    if run.roles and role is None:
        output.notify(f"{path}: the job has the roles {', '.join(run.roles)}; this is {run.role}: see --role")
    return run


def _measure(run: "Run", facts: "Sequence[TraceFact]") -> None:
    with output.progress() as bar:
        run.measure(facts, bar.trace_callback(len(run.sources)))
    _require_all_read(run)


def _note(path: str, *, cache: bool) -> None:
    """Note for a stored answer that a run, or a baseline, is read."""
    from tracekit.ingest import readers

    if not cache:
        question.current.get().withdraw()
    question.current.get().reads(Input(Kind.RUN, path, readers.companion_suffixes()))


def _require_all_read(run: "Run") -> None:
    """Store no answer on a run without one of its traces, which may be readable the next time."""
    if "unreadable" in run.data_quality["kind"]:
        question.current.get().withdraw()


def comparison_side(
    path: str, *, cache: bool = True, step_name: str | None = None, role: str | None = None
) -> "Run | RunSamples":
    """Return a measured run, or the samples of a saved report or a baseline.

    Raises InputError if the path is none of them.
    """
    from tracekit.regression import comparison, scaling
    from tracekit.regression.comparison import RunSamples
    from tracekit.report import baseline_json, json

    with _document(path) as document:
        if json.is_report(document):
            return json.read(document)
        if baseline_json.is_baseline(document):
            return RunSamples.of_baseline(baseline_json.read(document))
    return open_measured(path, (*comparison.FACTS, *scaling.SIZE_FACTS), cache=cache, step_name=step_name, role=role)


def open_compared_run(
    path: str,
    facts: "Sequence[TraceFact]",
    *,
    cache: bool = True,
    step_name: str | None = None,
    role: str | None = None,
) -> "Run":
    """Return a run with facts measured. Raises InputError if it cannot be used, or is a saved report or baseline."""
    from tracekit.report import baseline_json, json

    with _document(path) as document:
        is_saved = json.is_report(document) or baseline_json.is_baseline(document)
    if is_saved:
        raise InputError(f"{path}: a saved report has no operators; compare --by needs the traces of both runs")
    return open_measured(path, facts, cache=cache, step_name=step_name, role=role)


@contextlib.contextmanager
def _document(path: str) -> Iterator[Path]:
    """Yield the path of what may be a saved report or a baseline; a small file behind a URL is downloaded.

    Raises InputError if it cannot be accessed; errors of the block name the URL in place of the copy.
    """
    from tracekit.conventions import object_storage

    if not object_storage.is_url(path) or not object_storage.shown(path).endswith(".json"):
        yield Path(path)
        return
    from tracekit.ingest import remote
    from tracekit.report import json

    try:
        file = remote.info(path)
    except object_storage.StorageError as error:
        raise InputError(str(error)) from error
    is_small = file.size_bytes is not None and file.size_bytes <= json.MAX_REPORT_BYTES
    if not is_small or b'"traceEvents"' in remote.head(file, _START_BYTES):
        yield Path(path)  # no local file: a trace
        return
    with remote.local_copy(file) as copy:
        try:
            yield copy
        except InputError as error:
            raise InputError(str(error).replace(str(copy), file.shown)) from error
