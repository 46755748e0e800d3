"""Configuration of a training: the user's command with the changes that are applied to it."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tracekit.tune.changes.change import ON, TRAINERS, Change, fill_template


class Way(StrEnum):
    """How a change is applied; the last two are not applied by us."""

    OPTION = "option"
    ARGUMENT = "argument"
    VARIABLE = "variable"
    PATCH = "patch"
    HAND = "hand"


@dataclass(frozen=True)
class Setting:
    """A change with its value, as it applies to a command: by words after it, or by a variable before it."""

    change: Change
    value: str
    way: Way
    text: str
    """What is added to the command, or what to write into the source."""

    @property
    def is_applied(self) -> bool:
        """Whether a trial can run with it, without a change of the user's files."""
        return self.way in (Way.OPTION, Way.ARGUMENT, Way.VARIABLE)

    @property
    def words(self) -> tuple[str, ...]:
        """Words after the command."""
        return tuple(shlex.split(self.text)) if self.way in (Way.OPTION, Way.ARGUMENT) else ()

    @property
    def title(self) -> str:
        """Name of the change and its value."""
        return self.change.name if self.value == ON else f"{self.change.name} {self.value}"


@dataclass(frozen=True)
class Configuration:
    """A command and the settings that are applied to it, in the order in which they were kept."""

    command: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the user's command for changes, by `Change.key`, as the settings file states them."""
    settings: tuple[Setting, ...] = ()

    @property
    def is_of_trainers(self) -> bool:
        """Whether the command starts our trainers, which record themselves."""
        return TRAINERS in self.command

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the command; of options that are given twice, programs take the last."""
        return (*self.command, *(word for setting in self.settings for word in setting.words))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables, by name."""
        pairs = [setting.text.partition("=") for setting in self.settings if setting.way is Way.VARIABLE]
        return {name: value for name, _, value in pairs}

    @property
    def line(self) -> str:
        """The command line for a shell, variables first."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def with_setting(self, setting: Setting) -> "Configuration":
        """The configuration with one more setting."""
        return replace(self, settings=(*self.settings, setting))

    def setting(self, change: Change, value: str, *, is_of_trainers: bool) -> Setting:
        """How a change applies: by options of our trainers, the user's arguments, a variable, a patch, else by hand."""
        if is_of_trainers and change.option:
            return Setting(change, value, Way.OPTION, fill_template(change.option, value))
        if change.key in self.arguments:
            return Setting(change, value, Way.ARGUMENT, fill_template(self.arguments[change.key], value))
        if change.variable:
            return Setting(change, value, Way.VARIABLE, self._variable(change, value))
        if change.keyword is not None:
            text = f"{change.keyword.functions[0]}(…, {fill_template(change.keyword.text, value)})"
            return Setting(change, value, Way.PATCH, text)
        return Setting(change, value, Way.HAND, "")

    def _variable(self, change: Change, value: str) -> str:
        name, _, text = fill_template(change.variable, value).partition("=")
        current = self.variables.get(name) or os.environ.get(name)
        is_joined = change.joins_variable and current
        return f"{name}={current},{text}" if is_joined else f"{name}={text}"
