"""A group of commands whose modules are imported when a command is used, not when `--help` lists them."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup


@dataclass(frozen=True)
class LazyCommand:
    """A command, or a group of commands: its name, what `--help` says of it, and where it is defined."""

    name: str
    short_help: str
    module: str = ""
    """The module of `tracekit.cli.commands`; by default, its name is that of the command."""
    context_settings: Mapping[str, Any] | None = None

    def load(self) -> Any:
        """Return typer's command, made of the function or group of this name in the module."""
        name = self.name.replace("-", "_")
        defined = getattr(importlib.import_module(f"tracekit.cli.commands.{self.module or name}"), name)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(defined, typer.Typer):
            app.add_typer(defined, name=self.name)
        else:
            settings = None if self.context_settings is None else dict(self.context_settings)
            app.command(self.name, context_settings=settings)(defined)
        return typer.main.get_group(app).commands[self.name]


class LazyCommands(Mapping[str, Any]):
    """Typer's commands by name, each of which is loaded when it is looked up."""

    def __init__(self, listed: Sequence[LazyCommand]) -> None:
        """Load none of the listed commands."""
        self.listed = {command.name: command for command in listed}

    def __getitem__(self, name: str) -> Any:
        return self.listed[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


class LazyGroup(TyperGroup):
    """A group whose `commands` are LazyCommands; subclasses list them."""

    LISTED: Sequence[LazyCommand] = ()

    def __init__(self, **attributes: Any) -> None:
        """Replace the commands, of which there are none, by the listed ones."""
        super().__init__(**attributes)
        self._lazy = LazyCommands(self.LISTED)
        self.commands = self._lazy  # type: ignore[assignment]  # nothing adds commands later

    def list_commands(self, _context: Any) -> list[str]:
        """Return the names of the commands, in the order of the list."""
        return list(self.commands)

    def format_commands(self, _context: Any, formatter: Any) -> None:
        """Write the name and the help of each command."""
        rows = [(command.name, command.short_help) for command in self.LISTED]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
