"""Rules by what users call them: code, name, family or the id of a finding. Needs no rule, only its names."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tracekit.cli import settings_file
from tracekit.errors import ConfigError


class NamedRule(Protocol):
    """A rule, or its document."""

    @property
    def code(self) -> str:
        """Return the code, such as COMM001."""

    def name(self) -> str:
        """Return the name in kebab case."""


R = TypeVar("R", bound=NamedRule)


def find_by_finding(name: str, catalog: Sequence[R]) -> R:
    """Return the rule of a code, a name or a finding's id. Raises ConfigError with the nearest match."""
    code = name.partition("-")[0]
    return find(code if any(code == rule.code for rule in catalog) else name, catalog)


def find(pattern: str, catalog: Sequence[R], where: str = "") -> R:
    """Return the rule of a code or a name. Raises ConfigError, which starts with `where`, with the nearest match."""
    for rule in catalog:
        if pattern in (rule.code, rule.name()):
            return rule
    start = f"{where}: " if where else ""
    if family := [rule.code for rule in catalog if matches(pattern, rule)]:
        raise ConfigError(f"{start}{pattern} is a family of rules: name one of {', '.join(family)}")
    raise ConfigError(f"{start}no rule is called {pattern!r}: {settings_file.suggestion(_names(catalog), pattern)}")


def matches(pattern: str, rule: NamedRule) -> bool:
    """Return whether a rule has this code, name or family."""
    return pattern in (rule.code, rule.name(), _family(rule))


def require(pattern: str, catalog: Sequence[NamedRule], where: str) -> None:
    """Raise ConfigError if no rule has this code, name or family, or the code of this finding id."""
    patterns = {pattern, pattern.partition("-")[0]}
    if not any(matches(name, rule) for name in patterns for rule in catalog):
        raise ConfigError(f"{where}: {_unknown(pattern, catalog)}")


def require_matches(patterns: Iterable[str], catalog: Sequence[NamedRule]) -> None:
    """Raise ConfigError if a pattern is no code, name or family of a rule."""
    for pattern in patterns:
        if not any(matches(pattern, rule) for rule in catalog):
            raise ConfigError(_unknown(pattern, catalog))


def _unknown(pattern: str, catalog: Sequence[NamedRule]) -> str:
    families = dict.fromkeys(map(_family, catalog))
    return f"no rule is called {pattern!r}: {settings_file.suggestion([*families, *_names(catalog)], pattern)}"


def _family(rule: NamedRule) -> str:
    return rule.code.rstrip("0123456789")


def _names(catalog: Sequence[NamedRule]) -> list[str]:
    return [text for rule in catalog for text in (rule.code, rule.name())]
