"""Settings in a TOML file: read for the command line, and written from a resolved configuration.

The keys are the options' names, without ``--`` (``world-size`` or ``world_size``), without tables.
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from instrumented_trainers.config.settings import InvalidConfigError, TrainingConfig

# Options of the command line that are no settings of a training.
_NOT_SETTINGS = ("help", "config", "print_config")


def read(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the settings in the file by field name, each converted and checked by its option in `parser`.

    Raises InvalidConfigError for a file that cannot be read, an unknown key or a value that the option refuses.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfigError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfigError(f"--config {path}: not TOML: {error}") from error
    actions = {action.dest: action for action in parser._actions if action.dest not in _NOT_SETTINGS}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in actions:
            raise InvalidConfigError(f"--config {path}: {_unknown(key, actions)}")
        if name in settings:
            raise InvalidConfigError(f"--config {path}: {key} is set twice")
        try:
            settings[name] = _convert(value, actions[name], parser)
        except argparse.ArgumentError as error:
            raise InvalidConfigError(
                f"--config {path}: {key} = {json.dumps(value, default=str)}: {error.message}"
            ) from error
    return settings


def dumps(config: TrainingConfig, groups: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return the configuration as TOML, by `groups` of a title and field names. Settings that are None have no key."""
    values, blocks = vars(config), []
    for title, names in groups:
        lines = [f"{name.replace('_', '-')} = {_literal(values[name])}" for name in names if values[name] is not None]
        blocks.append("\n".join([f"# {title}", *lines]))
    return "\n\n".join(blocks) + "\n"


def _unknown(key: str, actions: Mapping[str, argparse.Action]) -> str:
    names = [name.replace("_", "-") for name in actions]
    near = difflib.get_close_matches(key.replace("_", "-"), names, n=1)
    return f"{key} is no setting" + (f"; did you mean {near[0]}?" if near else "")


def _convert(value: Any, action: argparse.Action, parser: argparse.ArgumentParser) -> Any:
    """Return a value as the command line would give it. Raises ArgumentError if the option refuses it."""
    if action.nargs == 0:
        return _require_type(value, bool, action, "true or false")
    if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction):
        return [_scalar(element, action, parser) for element in _require_type(value, list, action, "a list")]
    return _scalar(value, action, parser)


def _scalar(value: Any, action: argparse.Action, parser: argparse.ArgumentParser) -> Any:
    if action.type in (None, Path) or action.choices is not None:
        _require_type(value, str, action, "text in quotes")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise argparse.ArgumentError(action, "it must be a number")
    converted = parser._get_value(action, str(value))
    parser._check_value(action, converted)
    return converted


def _require_type(value: Any, kind: type, action: argparse.Action, words: str) -> Any:
    if not isinstance(value, kind):
        raise argparse.ArgumentError(action, f"it must be {words}")
    return value


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(element) for element in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    # TOML's basic strings have the escapes of JSON, and Python's numbers are TOML's.
    return json.dumps(str(value)) if isinstance(value, str | Path) else repr(value)
