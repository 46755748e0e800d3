"""The command line: it sets the fields of a `TrainingConfig`."""

import argparse
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from instrumented_trainers.config import options, toml_file, validation
from instrumented_trainers.config.settings import OVERRIDABLE, STRATEGIES, InvalidConfigError, TrainingConfig

# Required, or resolved after parsing.
_OWN_DEFAULTS = ("strategy", "out", "world_size", "device")


def parse(
    arguments: Sequence[str] | None = None, *, dry_run: Callable[[TrainingConfig], Sequence[str]] = lambda _: ()
) -> TrainingConfig:
    """Parse the command line, and the file that ``--config`` names. Exits with code 2 and one line if it is invalid.

    The command line has priority over the file, and the file over the defaults. With ``--print-config`` this prints
    the result as TOML, with ``--dry-run`` the lines that `dry_run` returns of it, and exits with code 0.
    """
    parser = _parser()
    values = _values(parser, arguments)
    values["device"] = _device(values["device"])
    values["world_size"] = _world_size(values["world_size"], values["device"])
    for field in fields(TrainingConfig):
        if isinstance(values[field.name], list):
            values[field.name] = tuple(values[field.name])
    config = TrainingConfig(**{field.name: values[field.name] for field in fields(TrainingConfig)})
    config = _apply_overrides(config, parser)
    if values["print_config"]:
        sys.stdout.write(toml_file.dumps(config, _groups(parser)))
        parser.exit()
    if reason := validation.problem(config, is_dry_run=values["dry_run"]):
        parser.error(reason)
    if values["dry_run"]:
        sys.stdout.write("\n".join(dry_run(config)) + "\n")
        parser.exit()
    return config


def _values(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the value of every option: from the command line, else from the file, else the default."""
    # None, which no option gives, marks what the command line does not set; argparse leaves it, for it is there.
    unset = argparse.Namespace(**{action.dest: None for action in parser._actions})
    from_line = {name: value for name, value in vars(parser.parse_args(arguments, unset)).items() if value is not None}
    try:
        from_file = toml_file.read(from_line["config"], parser) if "config" in from_line else {}
    except InvalidConfigError as error:
        parser.error(str(error))
    defaults = {action.dest: parser.get_default(action.dest) for action in parser._actions}
    values = {**defaults, **from_file, **from_line}
    if values["dry_run"]:
        values["out"] = values["out"] or Path()
    missing = [f"--{name}" for name in ("strategy", "out") if values[name] is None]
    if missing:
        parser.error(f"{', '.join(missing)}: required, as an option or in the file of --config")
    return values


def _groups(parser: argparse.ArgumentParser) -> list[tuple[str, list[str]]]:
    """Return the names of the settings in the order of the options, group by group."""
    setting_names = {field.name for field in fields(TrainingConfig)}
    groups = [
        (str(group.title), [action.dest for action in group._group_actions if action.dest in setting_names])
        for group in parser._action_groups
    ]
    return [("run" if title == "options" else title, names) for title, names in groups if names]


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, and explains the faults only where its help is read."""

    def format_help(self) -> str:
        from instrumented_trainers import faults  # it imports torch

        (group,) = (group for group in self._action_groups if group.title == "faults")
        group.description = f"Real faults, to test whether they are found. Losses do not change.\n{faults.overview()}"
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"instrumented_trainers: {message} (--help lists the options)\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one to show, and keeps the lines of a text of several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = functools.partial(textwrap.fill, width=width, initial_indent=indent, subsequent_indent=indent + "    ")
        return "\n".join(fill(line) for line in text.splitlines()) if "\n" in text else fill(text)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool | tuple):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m instrumented_trainers",
        usage="%(prog)s --strategy NAME --out RUN [options]",
        description="Train a Llama-style model and record the run: a trace per rank of some steps, metrics of every "
        "step, and the stages of each checkpoint. Starts the ranks itself; under torchrun it is one of them.",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--strategy", choices=STRATEGIES, help="how to parallelize over the ranks")
    parser.add_argument("--out", type=Path, metavar="RUN", help="folder to write the run to")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing run")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with these options as keys; the command line has priority",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as TOML, which --config reads, and exit"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the memory, traffic and checkpoint size that the training would have, and exit; any number of GPUs",
    )
    for title, add in (
        ("ranks", options.add_ranks),
        ("parallelism", options.add_parallelism),
        ("model and data", options.add_model),
        ("optimization", options.add_optimization),
        ("evaluation", options.add_evaluation),
        ("logging", options.add_logging),
        ("recording", options.add_recording),
        ("checkpoints", options.add_checkpoints),
        ("faults", options.add_faults),
    ):
        add(parser.add_argument_group(title))
    defaults = {field.name: field.default for field in fields(TrainingConfig) if field.name not in _OWN_DEFAULTS}
    parser.set_defaults(**defaults)
    return parser


def _device(requested: str) -> str:
    if requested == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested


def _world_size(requested: int | None, device: str) -> int:
    """Return the number of ranks: from the launcher, else the user's, else one per GPU or two."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if requested or device != "cuda":
        return requested or 2
    import torch

    return torch.cuda.device_count() or 1


def _apply_overrides(config: TrainingConfig, parser: argparse.ArgumentParser) -> TrainingConfig:
    """Return the run with the settings that `--override` names, under their full names."""
    values, overrides = {}, []
    actions = {action.dest: action for action in parser._actions}
    for text in config.override:
        name, equals, value = text.partition("=")
        name = {"lr": "learning_rate"}.get(name, name).replace("-", "_")
        if name not in OVERRIDABLE or not equals:
            parser.error(f"--override {text}: NAME=VALUE, NAME one of lr, {', '.join(OVERRIDABLE)}")
        try:
            values[name] = parser._get_value(actions[name], value)
            parser._check_value(actions[name], values[name])
        except argparse.ArgumentError as error:
            parser.error(f"--override {text}: {error.message}")
        overrides.append(f"{name}={values[name]}")
    if config.override and config.resume is None:
        parser.error("--override: only with --resume; a new training takes its settings from their options")
    return replace(config, **values, override=tuple(overrides))
