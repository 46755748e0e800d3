"""Settings files: where they are, and what they state as tables. Needs no rule and no metric.

Settings are in ``tracekit.toml``, or under ``[tool.tracekit]`` in pyproject.toml; docs/ci.md shows all keys.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tracekit.conventions import devices, regular_files
from tracekit.conventions.devices import DeviceOverride
from tracekit.conventions.read_settings import ReadSettings
from tracekit.errors import ConfigError, similar_names

if TYPE_CHECKING:
    from tracekit.rules.documents import RuleDocument
    from tracekit.rules.rule import Rule

FILE = "tracekit.toml"
PROJECT_FILE = "pyproject.toml"
_MAX_CHARACTERS = 1 << 20
# tomllib takes time by the square of the parts of a dotted key: 3.3 s for 16,000.
_DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){100}""")
T = TypeVar("T")
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


R = TypeVar("R", bound="type[Rule] | RuleDocument")


def find_file(folder: Path) -> Path | None:
    """Return the settings file of `folder`: the nearest one upwards; tracekit.toml before pyproject.toml.

    A pyproject.toml without ``[tool.tracekit]`` is skipped.
    """
    for place in (folder, *folder.parents):
        if (place / FILE).is_file():
            return place / FILE
        project = place / PROJECT_FILE
        if project.is_file() and section(project, parse(project)) is not None:
            return project
    return None


def nearest_read_settings(folder: Path | None = None, *, step_name: str | None = None) -> ReadSettings:
    """Return devices and steps of the nearest settings file upwards, from `folder` or the current one.

    `step_name` replaces that of the file. Raises ConfigError where they cannot be used.
    """
    path = find_file(folder or Path.cwd())
    stated = section(path, parse(path)) if path else None
    tables = (stated or {}).get("devices", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: devices: expected a table, not {tables!r}")
    stated_name = (stated or {}).get("step_name")
    if stated_name is not None and (not isinstance(stated_name, str) or not stated_name.strip()):
        raise ConfigError(f"{path}: step_name: expected the name of a span, not {stated_name!r}")
    return ReadSettings(device_overrides(tables, str(path)), step_name or stated_name)


def parse(path: Path) -> dict[str, object]:
    """Return the content of a TOML file. Raises ConfigError if it cannot be read or is no TOML."""
    try:
        text = regular_files.read_text(path)
        if len(text) > _MAX_CHARACTERS or _DEEP_KEY.search(text):
            raise ValueError("longer than 1 MiB, or with a key of more than 100 parts")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a {FILE} or a {PROJECT_FILE}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of 5,000 digits, or nested too deeply
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def section(path: Path, table: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the settings in the table of a file: of a pyproject.toml, ``tool.tracekit``; None if it has none.

    Raises ConfigError if ``tool.tracekit`` is no table.
    """
    if path.name != PROJECT_FILE:
        return table
    tool = table.get("tool")
    ours = tool.get("tracekit") if isinstance(tool, dict) else None
    if ours is not None and not isinstance(ours, dict):
        raise ConfigError(f"{path}: tool.tracekit: expected a table, not {ours!r}")
    return ours


def device_overrides(tables: Mapping[str, object], where: str) -> tuple[DeviceOverride, ...]:
    """Read device overrides from tables by device name. Raises ConfigError, which starts with `where`."""
    return tuple(_device_override(name, table, f'{where}: devices."{name}"') for name, table in tables.items())


def _device_override(name: str, table: object, where: str) -> DeviceOverride:
    stated = convert(table, DeviceTable, where)
    values = {key: getattr(stated, key) for key in stated.__struct_fields__ if getattr(stated, key) is not None}
    if not name.strip() or not values:
        raise ConfigError(f"{where}: expected a name and some of {', '.join(stated.__struct_fields__)}")
    if devices.find(name) is None and stated.memory_gb_per_s is None:
        raise ConfigError(f"{where}: this device is not in tracekit's table, so memory_gb_per_s is required")
    peaks = {key.split("_")[1]: rate * 1e12 for key, rate in values.items() if key.startswith("peak_")}
    memory, link = (values.get(key) for key in ("memory_gb_per_s", "link_gb_per_s"))
    return DeviceOverride(name, peaks, memory and memory * 1e9, link and link * 1e9)


# Errors -------------------------------------------------------------------------------------------------------------

_EXPECTED = {
    "float": "a number",
    "int": "an integer",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "date": "a date such as 2027-01-31",
}


def convert(
    value: object,
    kind: type[T],
    where: str,
    *,
    strict: bool = True,
    tables: Mapping[str, type[msgspec.Struct]] = MappingProxyType({}),
) -> T:
    """Return a value as a type. Raises ConfigError that names the key and what is expected there.

    `tables` are the types of the tables below the keys of `kind`, whose keys an error lists.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        problem, _, location = str(error).partition(" - at `$")
        key = location.rstrip("`").lstrip(".")
        table = tables.get(key.partition("[")[0], kind if not key else None)
        names = getattr(table, "__struct_fields__", ())
        message = _message(problem, key, _value_at(value, key), names)
        raise ConfigError(f"{where}: {key}{': ' if key else ''}{message}") from None


def _message(problem: str, key: str, value: object, names: Sequence[str]) -> str:
    """Return an error of msgspec in terms of TOML; `names` are the keys of the table at this place."""
    quoted = re.findall(r"`([^`]*)`", problem)
    if "unknown field" in problem:
        return f"unknown key {quoted[0]!r}: {suggestion(names, quoted[0])}"
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
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", key):
        value = value[name or int(index)]
    return value


_MAX_LISTED = 12  # more are listed by `tracekit explain`


def suggestion(names: Iterable[str], word: str) -> str:
    """Return a hint at the name that was meant: the nearest one, or all of them if they are few."""
    choices = list(names)
    if similar := similar_names(word, choices):
        return f"did you mean {' or '.join(similar)}?"
    return f"expected one of {', '.join(choices)}" if len(choices) <= _MAX_LISTED else "tracekit explain lists them all"


def find_rule(pattern: str, catalog: Sequence[R], where: str = "") -> R:
    """Return the rule of a code or a name. Raises ConfigError, which starts with `where`, with the nearest match."""
    for rule in catalog:
        if pattern in (rule.code, rule.name()):
            return rule
    start = f"{where}: " if where else ""
    if family := [rule.code for rule in catalog if is_rule_named(pattern, rule)]:
        raise ConfigError(f"{start}{pattern} is a family of rules: name one of {', '.join(family)}")
    raise ConfigError(f"{start}no rule is called {pattern!r}: {suggestion(_names(catalog), pattern)}")


def is_rule_named(pattern: str, rule: "type[Rule] | RuleDocument") -> bool:
    """Return whether a rule has this code, name or family."""
    return pattern in (rule.code, rule.name(), _family(rule))


def require_rule(pattern: str, catalog: "Sequence[type[Rule] | RuleDocument]", where: str) -> None:
    """Raise ConfigError if no rule has this code, name or family, or the code of this finding id."""
    patterns = {pattern, pattern.partition("-")[0]}
    if not any(is_rule_named(name, rule) for name in patterns for rule in catalog):
        raise ConfigError(f"{where}: {unknown_rule(pattern, catalog)}")


def unknown_rule(pattern: str, catalog: "Sequence[type[Rule] | RuleDocument]") -> str:
    """Message that no rule has this code, name or family, with the nearest match."""
    families = dict.fromkeys(map(_family, catalog))
    return f"no rule is called {pattern!r}: {suggestion([*families, *_names(catalog)], pattern)}"


def _family(rule: "type[Rule] | RuleDocument") -> str:
    return rule.code.rstrip("0123456789")


def _names(catalog: "Sequence[type[Rule] | RuleDocument]") -> list[str]:
    return [text for rule in catalog for text in (rule.code, rule.name())]
