"""Settings: which rules run, with which thresholds, which findings are ignored and why, and what fails a check.

They stand in ``tracekit.toml``, or under ``[tool.tracekit]`` in pyproject.toml:

    [tool.tracekit]
    fail_on = "warning"
    select = ["COMM", "blocking-checkpoint"]
    ignore = [{code = "MEM001", reason = "known, being fixed", until = 2027-01-31}]

    [tool.tracekit.rules.COMM001]
    max_exposed_ratio = 0.3

    [tool.tracekit.baseline]
    metrics = ["step_time", "allocated"]

    [tool.tracekit.budget]
    step_time = "412ms"
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from pathlib import Path
from typing import TypeAlias

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
"""The rules that settings can speak of."""


@dataclass(frozen=True)
class Ignore:
    """A finding that somebody decided to live with: by rule code, rule name, family (``COMM``) or finding id."""

    code: str
    reason: str
    until: date | None = None


@dataclass(frozen=True)
class CheckSettings:
    """What a check is set to. `fail_on` None fails on nothing; an empty `select` selects every rule."""

    path: str = ""
    fail_on: Severity | None = Severity.ERROR
    select: tuple[str, ...] = ()
    thresholds: Mapping[str, Mapping[str, Threshold]] = field(default_factory=dict)
    """By rule code, then by field."""
    ignore: tuple[Ignore, ...] = ()
    baseline: Thresholds = field(default_factory=Thresholds)
    budget: Budgets = field(default_factory=Budgets)


def resolve(
    path: Path | None,
    catalog: Catalog,
    *,
    fail_on: str | None = None,
    select: Iterable[str] = (),
    assignments: Iterable[str] = (),
) -> CheckSettings:
    """Return the settings of a file, or of the nearest one, overridden by options of the command line."""
    file = path or find_file(Path.cwd())
    config = with_settings(read(file, catalog) if file else CheckSettings(), assignments, catalog)
    selected = tuple(name.strip() for names in select for name in names.split(",") if name.strip())
    return replace(
        config,
        select=selected or config.select,
        fail_on=config.fail_on if fail_on is None else parse_fail_on(fail_on),
    )


def find_file(folder: Path) -> Path | None:
    """Return the settings file that counts in `folder`: the first found going up; tracekit.toml before pyproject.toml.

    A pyproject.toml without ``[tool.tracekit]`` is passed over.
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
        raise ConfigError(f"{path}: there is no [tool.tracekit] in it")
    return _Reader(path, catalog).config(section or {})


def parse_fail_on(text: str) -> Severity | None:
    """Return the severity from which findings fail a check; None for "never". Raises ConfigError."""
    names = {severity.label: severity for severity in Severity}
    if text != NEVER and text not in names:
        raise ConfigError(f"{text!r} is no severity: {_suggestion((NEVER, *names), text)}")
    return names.get(text)


def with_settings(config: CheckSettings, settings: Iterable[str], catalog: Catalog) -> CheckSettings:
    """Return `config` with settings such as ``COMM001.max_exposed_ratio=0.3`` laid over it. Raises ConfigError."""
    thresholds = {code: dict(fields) for code, fields in config.thresholds.items()}
    for setting in settings:
        name, has_value, text = setting.partition("=")
        code, has_field, key = name.strip().partition(".")
        if not (has_value and has_field):
            raise ConfigError(f"--set {setting}: expected CODE.field=value, such as COMM001.max_exposed_ratio=0.3")
        rule, key = _rule(code, catalog, f"--set {setting}"), key.strip()
        kind = _field_type(rule, key, f"--set {setting}")
        value = _from_text(text.strip(), kind)
        thresholds.setdefault(rule.code, {})[key] = _checked(value, kind, key, f"--set {setting}")
    return replace(config, thresholds=thresholds)


def with_strict_budgets(config: CheckSettings) -> CheckSettings:
    """Return `config` with budgets that fail where they cannot be told."""
    return replace(config, budget=replace(config.budget, is_strict=True))


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


def apply_ignores(report: Report, ignores: Sequence[Ignore], catalog: Catalog, *, today: date) -> Report:
    """Return the report with what the settings ignore moved out of its findings, and notes that say so.

    An ignore whose time has passed is said aloud too, and ignores nothing.
    """
    pairs = [(each, ignore_for(each, ignores, catalog, today=today)) for each in report.findings]
    aside = [IgnoredFinding(each, ignore.reason, ignore.until) for each, ignore in pairs if ignore]
    notes = [f"{each.finding.id} is ignored{_until(each.until)}: {each.reason}" for each in aside]
    notes += [
        f"The ignore of {each.code} ({each.reason}) ended on {each.until} and no longer holds."
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
    """Return what says to ignore a finding, None where nothing does or its time has passed."""
    rules = {rule.code: rule for rule in catalog}
    for ignore in ignores:
        named = ignore.code == finding.id or (finding.code in rules and _matches(ignore.code, rules[finding.code]))
        if named and not is_expired(ignore, today):
            return ignore
    return None


def is_expired(ignore: Ignore, today: date) -> bool:
    """Return whether an ignore no longer holds: it holds through the day it names."""
    return ignore.until is not None and today > ignore.until


def _until(day: date | None) -> str:
    return f" until {day}" if day else ""


@dataclass(frozen=True)
class _Reader:
    """Turns one file's table into a Config; every complaint begins with the file and the key."""

    path: Path
    catalog: Catalog

    def config(self, table: Mapping[str, object]) -> CheckSettings:
        known: dict[str, Callable[[object], object]] = {
            "fail_on": self._fail_on,
            "select": self._select,
            "ignore": self._ignores,
            "rules": self._thresholds,
            "baseline": self._against,
            "budget": self._budgets,
        }
        for key in table:
            if key not in known:
                raise ConfigError(f"{self.path}: {key} is no setting: {_suggestion(known, key)}")
        found = {key: known[key](value) for key, value in table.items()}
        if "rules" in found:
            found["thresholds"] = found.pop("rules")
        return CheckSettings(path=str(self.path), **found)  # type: ignore[arg-type]  # each reader returns its field's type

    def _fail_on(self, value: object) -> Severity | None:
        try:
            return parse_fail_on(value if isinstance(value, str) else repr(value))
        except ConfigError as error:
            raise ConfigError(f"{self.path}: fail_on: {error}") from None

    def _select(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.path}: select: expected a list of rule codes or names, not {value!r}")
        for item in value:
            self._known(item, "select")
        return tuple(value)

    def _ignores(self, value: object) -> tuple[Ignore, ...]:
        if not isinstance(value, list):
            raise ConfigError(f'{self.path}: ignore: expected a list of {{code = "…", reason = "…"}}, not {value!r}')
        return tuple(self._one_ignore(item, f"ignore[{number}]") for number, item in enumerate(value))

    def _one_ignore(self, value: object, key: str) -> Ignore:
        names = [item.name for item in dataclasses.fields(Ignore)]
        if not isinstance(value, dict):
            raise ConfigError(f'{self.path}: {key}: expected {{code = "…", reason = "…"}}, not {value!r}')
        for name in value:
            if name not in names:
                raise ConfigError(f"{self.path}: {key}: {name} is no key of an ignore: {_suggestion(names, name)}")
        for name in ("code", "reason"):
            if not isinstance(value.get(name), str) or not value[name].strip():
                raise ConfigError(f"{self.path}: {key}: {name} is required, as text that is not empty")
        self._known(value["code"].partition("-")[0] if "-" in value["code"] else value["code"], key, value["code"])
        return Ignore(value["code"], value["reason"].strip(), self._date(value.get("until"), f"{key}.until"))

    def _against(self, value: object) -> Thresholds:
        names = [item.name for item in dataclasses.fields(Thresholds)]
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: baseline: expected a table of {', '.join(names)}, not {value!r}")
        for key in value:
            if key not in names:
                raise ConfigError(f"{self.path}: baseline: {key} is no setting: {_suggestion(names, key)}")
        given = dict(value)
        if "metrics" in given:
            given["metrics"] = self._metrics(given["metrics"])
        if "min_change_ratio" in given:
            given["min_change_ratio"] = _checked(
                given["min_change_ratio"], float, "min_change_ratio", f"{self.path}: baseline"
            )
        if "confidence" in given:
            given["confidence"] = _checked(given["confidence"], float, "confidence", f"{self.path}: baseline")
            if not 0.5 <= given["confidence"] < 1:
                raise ConfigError(f"{self.path}: baseline: confidence: expected 0.5 to below 1, not {value!r}")
        return Thresholds(**given)

    def _metrics(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{self.path}: baseline.metrics: expected a list of metrics, not {value!r}")
        try:
            return tuple(metrics.find(item, metrics.compared_metrics()).key for item in value)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: baseline.metrics: {error}") from None

    def _budgets(self, value: object) -> Budgets:
        try:
            return budgets.parse(value)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: budget: {error}") from None

    def _date(self, value: object, key: str) -> date | None:
        if isinstance(value, str):
            try:
                return date.fromisoformat(value)
            except ValueError:
                pass
        if isinstance(value, datetime):
            return value.date()
        if value is None or isinstance(value, date):
            return value
        raise ConfigError(f"{self.path}: {key}: expected a date such as 2027-01-31, not {value!r}")

    def _thresholds(self, value: object) -> dict[str, dict[str, Threshold]]:
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: rules: expected tables such as [rules.COMM001], not {value!r}")
        thresholds: dict[str, dict[str, Threshold]] = {}
        for code, settings in value.items():
            where = f"{self.path}: rules.{code}"
            rule = _rule(code, self.catalog, where)
            if not isinstance(settings, dict):
                raise ConfigError(f"{where}: expected a table of thresholds, not {settings!r}")
            for key, given in settings.items():
                kind = _field_type(rule, key, where)
                thresholds.setdefault(rule.code, {})[key] = _checked(given, kind, key, where)
        return thresholds

    def _known(self, pattern: str, key: str, whole: str = "") -> None:
        if not any(_matches(name, rule) for name in {pattern, whole or pattern} for rule in self.catalog):
            names = _suggestion(_patterns(self.catalog), pattern)
            raise ConfigError(f"{self.path}: {key}: no rule is called {whole or pattern!r}: {names}")


def _parse(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a {FILE} or a {PROJECT_FILE}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _section(path: Path, table: Mapping[str, object]) -> Mapping[str, object] | None:
    if path.name != PROJECT_FILE:
        return table
    tool = table.get("tool")
    section = tool.get("tracekit") if isinstance(tool, dict) else None
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{path}: tool.tracekit: expected a table, not {section!r}")
    return section


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


def _field_type(rule: type[Rule], key: str, where: str) -> type:
    defaults = {item.name: item.default for item in dataclasses.fields(rule)}
    if not defaults:
        raise ConfigError(f"{where}: {rule.code} has no thresholds to set")
    if key not in defaults:
        raise ConfigError(f"{where}: {key} is no threshold of {rule.code}: {_suggestion(defaults, key)}")
    return type(defaults[key])


def _from_text(text: str, kind: type) -> object:
    """Return the text of a --set as the type of its field where it can be read so, else as it stands."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text


def _checked(value: object, kind: type, key: str, where: str) -> Threshold:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind or not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{where}: {key}: expected {_KINDS[kind]}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {key}: expected a finite number, not {value!r}")
    if key.endswith("_ratio") and isinstance(value, float) and not 0 <= value <= 1:
        raise ConfigError(f"{where}: {key}: expected a ratio from 0 to 1, not {value!r}")
    return value


_MOST_LISTED = 12  # only of rules are there more
_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


def _suggestion(names: Iterable[str], given: str) -> str:
    known = list(names)
    close = difflib.get_close_matches(given, known, n=1) or [name for name in known if name.lower() == given.lower()]
    if close:
        return f"did you mean {close[0]}?"
    return f"expected one of {', '.join(known)}" if len(known) <= _MOST_LISTED else "tracekit rules lists them all"
