"""Commands that had other names in the version before: what to type now. They go on working until the next version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class RenamedCommand:
    """What replaces a command: the words to type in place of its name, and in place of its options."""

    words: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


RENAMED: Mapping[str, RenamedCommand] = {
    "rules": RenamedCommand(("explain", "--kind", "rule")),
    "schema": RenamedCommand(("explain", "--kind", "table")),
    "ops": RenamedCommand(("kernels", "--of", "host")),
    "flamegraph": RenamedCommand(("kernels", "--by", "stack"), {"--by-rank": ("--by", "stack,rank")}),
    "critical-path": RenamedCommand(("whatif", "--critical-path")),
}


def renamed_command(words: Sequence[str]) -> str | None:
    """Old name that a command line uses; None for one without."""
    name = next((word for word in words if not word.startswith("-")), None)
    return name if name in RENAMED else None


def current_words(words: Sequence[str]) -> list[str]:
    """Words of a command line, with today's command in place of an old name.

    >>> current_words(["ops", "RUN", "--top", "3"])
    ['kernels', '--of', 'host', 'RUN', '--top', '3']
    """
    name = renamed_command(words)
    if name is None:
        return list(words)
    position = list(words).index(name)
    command = RENAMED[name]
    options = [part for word in words[position + 1 :] for part in command.options.get(word, (word,))]
    return [*words[:position], *command.words, *options]
