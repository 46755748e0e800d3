"""Settings: the rules that run, their thresholds, ignored findings with reasons, what fails a check, and devices.

They are in ``tracekit.toml``, or under ``[tool.tracekit]`` in pyproject.toml; docs/ci.md shows all keys.
"""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

from tracekit.cli import question, settings_file
from tracekit.cli.question import Input, Kind
from tracekit.conventions.read_settings import NO_SETTINGS, ReadSettings
from tracekit.errors import ConfigError
from tracekit.regression import budgets, metrics
from tracekit.regression.budgets import Budgets
from tracekit.regression.thresholds import Thresholds
from tracekit.rules.rule import Finding, IgnoredFinding, Report, Rule, Severity

NEVER = "never"

Threshold: TypeAlias = bool | int | float | str
Catalog: TypeAlias = Sequence[type[Rule]]
"""The rules that settings can name."""
Ratio = Annotated[float, Meta(ge=0, le=1)]
FiniteNumber = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
NonBlankText = Annotated[str, Meta(pattern=r"\S")]
T = TypeVar("T")


class Ignore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding to ignore: by rule code, rule name, family (``COMM``) or finding id; through the day `until`."""

    code: NonBlankText
    reason: NonBlankText
    until: date | None = None


class BaselineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table ``baseline`` of a settings file."""

    metrics: tuple[str, ...] | None = None
    min_change_ratio: Ratio = Thresholds.min_change_ratio
    confidence: Annotated[float, Meta(ge=0.5, lt=1)] = Thresholds.confidence
    min_new_cost_ratio: Ratio = Thresholds.min_new_cost_ratio
    max_cpu_stretch: Annotated[float, Meta(ge=1, le=sys.float_info.max)] = Thresholds.max_cpu_stretch
    min_cpu_recordings: Annotated[int, Meta(ge=1)] = Thresholds.min_cpu_recordings


class TuneTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table ``tune`` of a settings file: arguments of the user's command, by the name of a change."""

    arguments: dict[str, NonBlankText] = {}


_TABLES: Mapping[str, type[msgspec.Struct]] = {"ignore": Ignore, "baseline": BaselineTable, "tune": TuneTable}


class SettingsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A settings file as it is written."""

    fail_on: str = Severity.ERROR.label
    select: tuple[str, ...] = ()
    ignore: tuple[Ignore, ...] = ()
    rules: dict[str, object] = {}
    baseline: BaselineTable = BaselineTable()
    budget: dict[str, object] = {}
    devices: dict[str, object] = {}
    step_name: NonBlankText | None = None
    tune: TuneTable = TuneTable()


@dataclass(frozen=True)
class CheckSettings:
    """The resolved settings of a check. `fail_on` None: findings never fail it; empty `select`: all rules run."""

    path: str = ""
    fail_on: Severity | None = Severity.ERROR
    select: tuple[str, ...] = ()
    thresholds: Mapping[str, Mapping[str, Threshold]] = field(default_factory=dict)
    """By rule code, then by field."""
    ignore: tuple[Ignore, ...] = ()
    baseline: Thresholds = field(default_factory=Thresholds)
    budget: Budgets = field(default_factory=Budgets)
    read: ReadSettings = NO_SETTINGS
    tune_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the user's command for changes that `tracekit tune` tries, by `Change.key`."""


def resolve(
    path: Path | None,
    catalog: Catalog,
    *,
    fail_on: str | None = None,
    select: Iterable[str] = (),
    assignments: Iterable[str] = (),
    strict: bool = False,
    step_name: str | None = None,
) -> CheckSettings:
    """Return the settings of a file, or of the nearest one, overridden by options of the command line."""
    file = path or settings_file.find_file(Path.cwd())
    if file is not None:
        question.current.get().reads(Input(Kind.FILE, str(file)))
    config = with_settings(read(file, catalog) if file else CheckSettings(), assignments, catalog)
    selected = tuple(name.strip() for names in select for name in names.split(",") if name.strip())
    if any(ignore.until for ignore in config.ignore):
        question.current.get().reads(Input(Kind.DAY))
    return replace(
        config,
        select=selected or config.select,
        fail_on=config.fail_on if fail_on is None else parse_fail_on(fail_on),
        budget=replace(config.budget, is_strict=strict or config.budget.is_strict),
        read=replace(config.read, step_name=step_name or config.read.step_name),
    )


def read(path: Path, catalog: Catalog) -> CheckSettings:
    """Return the settings in a file. Raises ConfigError naming file, key and what is expected there."""
    table = settings_file.parse(path)
    section = settings_file.section(path, table)
    if path.name == settings_file.PROJECT_FILE and section is None:
        raise ConfigError(f"{path}: it has no [tool.tracekit]")
    return _from_file(path, settings_file.convert(section or {}, SettingsFile, str(path), tables=_TABLES), catalog)


def parse_fail_on(text: str) -> Severity | None:
    """Return the severity from which findings fail a check; None for "never". Raises ConfigError."""
    names = {severity.label: severity for severity in Severity}
    if text != NEVER and text not in names:
        raise ConfigError(f"{text!r} is no severity: {settings_file.suggestion((NEVER, *names), text)}")
    return names.get(text)


def with_settings(config: CheckSettings, settings: Iterable[str], catalog: Catalog) -> CheckSettings:
    """Return `config` overridden by assignments such as ``COMM001.max_exposed_ratio=0.3``. Raises ConfigError."""
    thresholds = {code: dict(fields) for code, fields in config.thresholds.items()}
    for setting in settings:
        name, has_value, text = setting.partition("=")
        code, has_field, key = name.strip().partition(".")
        if not (has_value and has_field):
            raise ConfigError(f"--set {setting}: expected CODE.field=value, such as COMM001.max_exposed_ratio=0.3")
        where = f"--set {setting}"
        rule = settings_file.find_rule(code, catalog, where)
        values = _thresholds(rule, {key.strip(): text.strip()}, where, is_text=True)
        thresholds.setdefault(rule.code, {}).update(values)
    return replace(config, thresholds=thresholds)


def configured_rules(config: CheckSettings, catalog: Catalog) -> tuple[Rule, ...]:
    """Return the selected rules with their thresholds set. Raises ConfigError where a selection matches no rule."""
    for pattern in config.select:
        if not any(settings_file.is_rule_named(pattern, rule) for rule in catalog):
            raise ConfigError(settings_file.unknown_rule(pattern, catalog))
    rules = [
        rule
        for rule in catalog
        if not config.select or any(settings_file.is_rule_named(p, rule) for p in config.select)
    ]
    return tuple(rule(**config.thresholds.get(rule.code, {})) for rule in rules)


def apply_ignores(report: Report, ignores: Sequence[Ignore], catalog: Catalog, *, today: date | None = None) -> Report:
    """Return the report with ignored findings moved to `ignored`, and a note for each.

    An expired ignore has no effect; a note reports it.
    """
    today = today or datetime.now(UTC).date()
    pairs = [(finding, ignore_for(finding, ignores, catalog, today=today)) for finding in report.findings]
    aside = [IgnoredFinding(finding, ignore.reason, ignore.until) for finding, ignore in pairs if ignore]
    notes = [f"{ignored.finding.id} is ignored{_until(ignored.until)}: {ignored.reason}" for ignored in aside]
    notes += [
        f"The ignore of {ignore.code} ({ignore.reason}) expired on {ignore.until} and has no effect."
        for ignore in ignores
        if is_expired(ignore, today)
    ]
    return replace(
        report,
        findings=tuple(finding for finding, ignore in pairs if not ignore),
        ignored=(*report.ignored, *aside),
        notes=(*report.notes, *notes),
    )


def ignore_for(finding: Finding, ignores: Iterable[Ignore], catalog: Catalog, *, today: date) -> Ignore | None:
    """Return the ignore of a finding; None if there is none or it expired."""
    rules = {rule.code: rule for rule in catalog}
    for ignore in ignores:
        rule = rules.get(finding.code)
        is_named = ignore.code == finding.id or (rule is not None and settings_file.is_rule_named(ignore.code, rule))
        if is_named and not is_expired(ignore, today):
            return ignore
    return None


def is_expired(ignore: Ignore, today: date) -> bool:
    """Return whether an ignore has expired: its last day is `until`."""
    return ignore.until is not None and today > ignore.until


def _until(day: date | None) -> str:
    return f" until {day}" if day else ""


# Reading a file -----------------------------------------------------------------------------------------------------


def _from_file(path: Path, file: SettingsFile, catalog: Catalog) -> CheckSettings:
    for pattern in file.select:
        settings_file.require_rule(pattern, catalog, f"{path}: select")
    for number, ignore in enumerate(file.ignore):
        settings_file.require_rule(ignore.code, catalog, f"{path}: ignore[{number}]")
    thresholds: dict[str, dict[str, Threshold]] = {}
    for code, table in file.rules.items():
        rule = settings_file.find_rule(code, catalog, f"{path}: rules.{code}")
        thresholds.setdefault(rule.code, {}).update(_thresholds(rule, table, f"{path}: rules.{code}"))
    try:
        fail_on = _parse_key("fail_on", parse_fail_on, file.fail_on)
        budget = _parse_key("budget", budgets.parse, file.budget)
        baseline = _parse_key("baseline.metrics", _baseline_thresholds, file.baseline)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    stated = ReadSettings(settings_file.device_overrides(file.devices, str(path)), file.step_name)
    arguments = _tune_arguments(file.tune.arguments, f"{path}: tune.arguments")
    return CheckSettings(str(path), fail_on, file.select, thresholds, file.ignore, baseline, budget, stated, arguments)


def _tune_arguments(arguments: Mapping[str, str], where: str) -> Mapping[str, str]:
    """Return the arguments for changes. Raises ConfigError for an unknown change or words that a shell cannot split."""
    if not arguments:
        return {}
    from tracekit.tune import changes  # its causes take time to load, and few settings have the table

    names = [change.key for change in changes.all_changes()]
    for name, text in arguments.items():
        if name not in names:
            raise ConfigError(f"{where}: no change is called {name!r}: expected one of {', '.join(sorted(names))}")
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{where}.{name}: {text!r} is no command line: {str(error).lower()}") from None
        if not words or "\0" in text:
            raise ConfigError(f"{where}.{name}: {text!r} has no words; expected such as '--num-workers {{value}}'")
    return arguments


def _baseline_thresholds(table: BaselineTable) -> Thresholds:
    compared = metrics.compared_metrics()
    keys = None if table.metrics is None else tuple(metrics.find(name, compared).key for name in table.metrics)
    return Thresholds(
        keys,
        table.min_change_ratio,
        table.confidence,
        table.min_new_cost_ratio,
        table.max_cpu_stretch,
        table.min_cpu_recordings,
    )


def _parse_key(key: str, parse: Callable[[Any], T], value: object) -> T:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _thresholds(rule: type[Rule], table: object, where: str, *, is_text: bool = False) -> dict[str, Threshold]:
    """Return the thresholds in a table of one rule; those of the command line are text."""
    fields = [(item.name, _threshold_type(item), item.default) for item in dataclasses.fields(rule)]
    if not fields:
        raise ConfigError(f"{where}: {rule.code} has no thresholds to set")
    kind = msgspec.defstruct(rule.code, fields, forbid_unknown_fields=True)
    converted = settings_file.convert(table, kind, where, strict=not is_text)
    return {name: getattr(converted, name) for name in cast("dict[str, object]", table)}


def _threshold_type(threshold: "dataclasses.Field[Any]") -> Any:
    if not isinstance(threshold.default, float):
        return type(threshold.default)
    return Ratio if threshold.name.endswith("_ratio") else FiniteNumber
