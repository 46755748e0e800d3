"""Settings: the rules that run, their thresholds, ignored findings with reasons, what fails a check, and devices.

They are in ``tracekit.toml``, or under ``[tool.tracekit]`` in pyproject.toml; docs/ci.md shows all keys.
"""

import dataclasses
import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta

from tracekit.conventions import devices
from tracekit.conventions.devices import DeviceOverride
from tracekit.errors import ConfigError
from tracekit.regression import budgets, metrics
from tracekit.regression.budgets import Budgets
from tracekit.regression.thresholds import Thresholds
from tracekit.rules.rule import Finding, IgnoredFinding, Report, Rule, Severity

FILE = "tracekit.toml"
PROJECT_FILE = "pyproject.toml"
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


PositiveNumber = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


class DeviceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table ``devices."NAME"`` of a settings file: peaks in 10^12 operations/s, bandwidths in 10^9 bytes/s."""

    peak_fp64_tflops: PositiveNumber | None = None
    peak_fp32_tflops: PositiveNumber | None = None
    peak_tf32_tflops: PositiveNumber | None = None
    peak_fp16_tflops: PositiveNumber | None = None
    peak_bf16_tflops: PositiveNumber | None = None
    peak_fp8_tflops: PositiveNumber | None = None
    peak_int8_tflops: PositiveNumber | None = None
    memory_gb_per_s: PositiveNumber | None = None
    link_gb_per_s: PositiveNumber | None = None


class SettingsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A settings file as it is written."""

    fail_on: str = Severity.ERROR.label
    select: tuple[str, ...] = ()
    ignore: tuple[Ignore, ...] = ()
    rules: dict[str, object] = {}
    baseline: BaselineTable = BaselineTable()
    budget: dict[str, object] = {}
    devices: dict[str, object] = {}


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
    devices: tuple[DeviceOverride, ...] = ()


def resolve(
    path: Path | None,
    catalog: Catalog,
    *,
    fail_on: str | None = None,
    select: Iterable[str] = (),
    assignments: Iterable[str] = (),
    strict: bool = False,
) -> CheckSettings:
    """Return the settings of a file, or of the nearest one, overridden by options of the command line."""
    file = path or find_file(Path.cwd())
    config = with_settings(read(file, catalog) if file else CheckSettings(), assignments, catalog)
    selected = tuple(name.strip() for names in select for name in names.split(",") if name.strip())
    return replace(
        config,
        select=selected or config.select,
        fail_on=config.fail_on if fail_on is None else parse_fail_on(fail_on),
        budget=replace(config.budget, is_strict=strict or config.budget.is_strict),
    )


def find_file(folder: Path) -> Path | None:
    """Return the settings file of `folder`: the nearest one upwards; tracekit.toml before pyproject.toml.

    A pyproject.toml without ``[tool.tracekit]`` is skipped.
    """
    for place in (folder, *folder.parents):
        if (place / FILE).is_file():
            return place / FILE
        project = place / PROJECT_FILE
        if project.is_file() and _section(project, _parse(project)) is not None:
            return project
    return None


def read(path: Path, catalog: Catalog) -> CheckSettings:
    """Return the settings in a file. Raises ConfigError naming file, key and what is expected there."""
    table = _parse(path)
    section = _section(path, table)
    if path.name == PROJECT_FILE and section is None:
        raise ConfigError(f"{path}: it has no [tool.tracekit]")
    return _resolved(path, _convert(section or {}, SettingsFile, str(path)), catalog)


def nearest_devices(folder: Path | None = None) -> tuple[DeviceOverride, ...]:
    """Return the devices of the nearest settings file upwards, from `folder` or the current one.

    Raises ConfigError where they cannot be used.
    """
    path = find_file(folder or Path.cwd())
    section = _section(path, _parse(path)) if path else None
    tables = (section or {}).get("devices", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: devices: expected a table, not {tables!r}")
    return _device_overrides(tables, str(path))


def parse_fail_on(text: str) -> Severity | None:
    """Return the severity from which findings fail a check; None for "never". Raises ConfigError."""
    names = {severity.label: severity for severity in Severity}
    if text != NEVER and text not in names:
        raise ConfigError(f"{text!r} is no severity: {_suggestion((NEVER, *names), text)}")
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
        rule = _rule(code, catalog, where)
        values = _thresholds(rule, {key.strip(): text.strip()}, where, is_text=True)
        thresholds.setdefault(rule.code, {}).update(values)
    return replace(config, thresholds=thresholds)


def configured_rules(config: CheckSettings, catalog: Catalog) -> tuple[Rule, ...]:
    """Return the selected rules with their thresholds set. Raises ConfigError where a selection matches no rule."""
    for pattern in config.select:
        if not any(_matches(pattern, rule) for rule in catalog):
            raise ConfigError(f"no rule is called {pattern!r}: {_suggestion(_patterns(catalog), pattern)}")
    chosen = [rule for rule in catalog if not config.select or any(_matches(p, rule) for p in config.select)]
    return tuple(rule(**config.thresholds.get(rule.code, {})) for rule in chosen)


def find_rule(name: str, catalog: Catalog) -> type[Rule]:
    """Return the rule of a code, a name or a finding's id. Raises ConfigError with the nearest match."""
    code = name.partition("-")[0]
    return _rule(code if any(code == rule.code for rule in catalog) else name, catalog)


def apply_ignores(report: Report, ignores: Sequence[Ignore], catalog: Catalog, *, today: date | None = None) -> Report:
    """Return the report with ignored findings moved to `ignored`, and a note for each.

    An expired ignore has no effect; a note reports it.
    """
    today = today or datetime.now(UTC).date()
    pairs = [(each, ignore_for(each, ignores, catalog, today=today)) for each in report.findings]
    aside = [IgnoredFinding(each, ignore.reason, ignore.until) for each, ignore in pairs if ignore]
    notes = [f"{each.finding.id} is ignored{_until(each.until)}: {each.reason}" for each in aside]
    notes += [
        f"The ignore of {each.code} ({each.reason}) expired on {each.until} and has no effect."
        for each in ignores
        if is_expired(each, today)
    ]
    return replace(
        report,
        findings=tuple(each for each, ignore in pairs if not ignore),
        ignored=(*report.ignored, *aside),
        notes=(*report.notes, *notes),
    )


def ignore_for(finding: Finding, ignores: Iterable[Ignore], catalog: Catalog, *, today: date) -> Ignore | None:
    """Return the ignore of a finding; None if there is none or it expired."""
    rules = {rule.code: rule for rule in catalog}
    for ignore in ignores:
        named = ignore.code == finding.id or (finding.code in rules and _matches(ignore.code, rules[finding.code]))
        if named and not is_expired(ignore, today):
            return ignore
    return None


def is_expired(ignore: Ignore, today: date) -> bool:
    """Return whether an ignore has expired: its last day is `until`."""
    return ignore.until is not None and today > ignore.until


def _until(day: date | None) -> str:
    return f" until {day}" if day else ""


# Reading a file -----------------------------------------------------------------------------------------------------


def _parse(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a {FILE} or a {PROJECT_FILE}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of 5,000 digits, or nested too deeply
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _section(path: Path, table: Mapping[str, object]) -> Mapping[str, object] | None:
    if path.name != PROJECT_FILE:
        return table
    tool = table.get("tool")
    section = tool.get("tracekit") if isinstance(tool, dict) else None
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{path}: tool.tracekit: expected a table, not {section!r}")
    return section


def _resolved(path: Path, file: SettingsFile, catalog: Catalog) -> CheckSettings:
    for pattern in file.select:
        _require_rule(pattern, catalog, f"{path}: select")
    for number, ignore in enumerate(file.ignore):
        _require_rule(ignore.code, catalog, f"{path}: ignore[{number}]")
    thresholds: dict[str, dict[str, Threshold]] = {}
    for code, table in file.rules.items():
        rule = _rule(code, catalog, f"{path}: rules.{code}")
        thresholds.setdefault(rule.code, {}).update(_thresholds(rule, table, f"{path}: rules.{code}"))
    try:
        fail_on = _located("fail_on", parse_fail_on, file.fail_on)
        budget = _located("budget", budgets.parse, file.budget)
        baseline = _located("baseline.metrics", _baseline_thresholds, file.baseline)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    stated = _device_overrides(file.devices, str(path))
    return CheckSettings(str(path), fail_on, file.select, thresholds, file.ignore, baseline, budget, stated)


def _device_overrides(tables: Mapping[str, object], where: str) -> tuple[DeviceOverride, ...]:
    return tuple(_device_override(name, table, f'{where}: devices."{name}"') for name, table in tables.items())


def _device_override(name: str, table: object, where: str) -> DeviceOverride:
    stated = _convert(table, DeviceTable, where)
    values = {key: getattr(stated, key) for key in stated.__struct_fields__ if getattr(stated, key) is not None}
    if not name.strip() or not values:
        raise ConfigError(f"{where}: expected a name and some of {', '.join(stated.__struct_fields__)}")
    if devices.find(name) is None and stated.memory_gb_per_s is None:
        raise ConfigError(f"{where}: this device is not in tracekit's table, so memory_gb_per_s is required")
    peaks = {key.split("_")[1]: rate * 1e12 for key, rate in values.items() if key.startswith("peak_")}
    memory, link = (values.get(key) for key in ("memory_gb_per_s", "link_gb_per_s"))
    return DeviceOverride(name, peaks, memory and memory * 1e9, link and link * 1e9)


def _baseline_thresholds(table: BaselineTable) -> Thresholds:
    known = metrics.compared_metrics()
    keys = None if table.metrics is None else tuple(metrics.find(name, known).key for name in table.metrics)
    return Thresholds(
        keys,
        table.min_change_ratio,
        table.confidence,
        table.min_new_cost_ratio,
        table.max_cpu_stretch,
        table.min_cpu_recordings,
    )


def _located(key: str, parse: Callable[[Any], T], value: object) -> T:
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
    converted = _convert(table, kind, where, strict=not is_text)
    return {name: getattr(converted, name) for name in cast("dict[str, object]", table)}


def _threshold_type(threshold: "dataclasses.Field[Any]") -> Any:
    kind = type(threshold.default)
    return kind if kind is not float else Ratio if threshold.name.endswith("_ratio") else FiniteNumber


# Errors -------------------------------------------------------------------------------------------------------------

_TABLES: Mapping[str, type[msgspec.Struct]] = {"ignore": Ignore, "baseline": BaselineTable}
_EXPECTED = {
    "float": "a number",
    "int": "an integer",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "date": "a date such as 2027-01-31",
}


def _convert(value: object, kind: type[T], where: str, *, strict: bool = True) -> T:
    """Return a value as a type. Raises ConfigError that names the key and what is expected there."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        problem, _, location = str(error).partition(" - at `$")
        key = location.rstrip("`").lstrip(".")
        table = _TABLES.get(key.partition("[")[0], kind if not key else None)
        names = getattr(table, "__struct_fields__", ())
        message = _message(problem, key, _value_at(value, key), names)
        raise ConfigError(f"{where}: {key}{': ' * bool(key)}{message}") from None


def _message(problem: str, key: str, value: object, names: Sequence[str]) -> str:
    """Return an error of msgspec in terms of TOML; `names` are the keys of the table at this place."""
    quoted = re.findall(r"`([^`]*)`", problem)
    if "unknown field" in problem:
        return f"unknown key {quoted[0]!r}: {_suggestion(names, quoted[0])}"
    if "missing required field" in problem:
        return f"{quoted[0]} is required"
    expected = quoted[0].partition(" |")[0] if quoted else "date"
    text = _EXPECTED.get(expected, expected)
    if "matching regex" in problem:
        text = "text that is not blank"
    elif bound := re.search(r"` ([<>]=?) (\S+)$", problem):
        text = "a finite number" if "e+" in bound[2] else f"a number {bound[1]} {bound[2]}"
        text = "a ratio from 0 to 1" if key.endswith("_ratio") else text
    elif expected == "object" and names:
        text = f"a table of {', '.join(names)}"
    return f"expected {text}, not {value!r}"


def _value_at(value: Any, key: str) -> object:
    """Return the value of a key such as ``ignore[0].until``."""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", key):
        value = value[name or int(index)]
    return value


# Rules by name ------------------------------------------------------------------------------------------------------


def _require_rule(pattern: str, catalog: Catalog, where: str) -> None:
    """Raise ConfigError if no rule has this code, name or family, or the code of this finding id."""
    patterns = {pattern, pattern.partition("-")[0]}
    if not any(_matches(name, rule) for name in patterns for rule in catalog):
        raise ConfigError(f"{where}: no rule is called {pattern!r}: {_suggestion(_patterns(catalog), pattern)}")


def _matches(pattern: str, rule: type[Rule]) -> bool:
    return pattern in (rule.code, rule.name(), rule.code.rstrip("0123456789"))


def _patterns(catalog: Catalog) -> list[str]:
    families = dict.fromkeys(rule.code.rstrip("0123456789") for rule in catalog)
    return [*families, *_names(catalog)]


def _names(catalog: Catalog) -> list[str]:
    return [text for rule in catalog for text in (rule.code, rule.name())]


def _rule(pattern: str, catalog: Catalog, where: str = "") -> type[Rule]:
    for rule in catalog:
        if pattern in (rule.code, rule.name()):
            return rule
    start = f"{where}{': ' * bool(where)}"
    if family := [rule.code for rule in catalog if _matches(pattern, rule)]:
        raise ConfigError(f"{start}{pattern} is a family of rules: name one of {', '.join(family)}")
    raise ConfigError(f"{start}no rule is called {pattern!r}: {_suggestion(_names(catalog), pattern)}")


_MAX_LISTED = 12  # more are listed by `tracekit rules`


def _suggestion(names: Iterable[str], given: str) -> str:
    known = list(names)
    close = difflib.get_close_matches(given, known, n=1) or [name for name in known if name.lower() == given.lower()]
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(known)}" if len(known) <= _MAX_LISTED else "tracekit rules lists them all"
