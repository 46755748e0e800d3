"""Options that several commands share: dataclasses that `expand_options` turns into a command's parameters."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo

from tracekit.cli import output, question, run_loading
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.model.run import Run
    from tracekit.model.source import Executor
    from tracekit.model.trace import TraceFact
    from tracekit.report.document import Document

_RANGE = re.compile(r"(\d+)(?:[-–](\d+))?\Z")
_MAX_RANKS = 1 << 20

UseCache = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Reuse tables parsed by earlier commands, and store newly parsed ones."),
]
StepName = Annotated[
    str | None,
    typer.Option(
        "--step-name",
        metavar="NAME",
        help="Each occurrence of the span NAME, such as an annotation, is a step.  [default: the profiler's steps]",
    ),
]
RoleName = Annotated[
    str | None,
    typer.Option(
        "--role",
        metavar="NAME",
        help="Of a job of several programs (trainer, rollout), the run of this one.  [default: that with most ranks]",
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Write to FILE instead of stdout, once it is complete."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file.  [default: nearest tracekit.toml or pyproject.toml]"),
]
AllowDifferent = Annotated[
    bool,
    typer.Option(
        "--allow-different", help="Compare even if model, strategy, world size, device or versions are different."
    ),
]


class Format(StrEnum):
    """Formats of a document: one renderer of `tracekit.report.render` each."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


class ExecutorKind(StrEnum):
    """What measures the traces of a run."""

    THREADS = "threads"
    PROCESSES = "processes"
    DASK = "dask"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run that a command reads."""

    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A folder of traces, a trace file, a quoted glob, or a URL such as s3://bucket/run."
        ),
    ]
    cache: UseCache = True
    step_name: StepName = None
    role: RoleName = None

    def open(self, executor: "Executor | None" = None) -> "Run":
        """Return the run. Raises InputError if it cannot be read."""
        return run_loading.open_run(
            self.run, cache=self.cache, step_name=self.step_name, role=self.role, executor=executor
        )

    def measure(self, facts: "Sequence[TraceFact]", executor: "Executor | None" = None) -> "Run":
        """Return the run with facts measured. Raises InputError if it cannot be read."""
        return run_loading.open_measured(
            self.run, facts, cache=self.cache, step_name=self.step_name, role=self.role, executor=executor
        )


@dataclass(frozen=True, kw_only=True)
class SelectedWork:
    """The part of a run that is written."""

    step: Annotated[int | None, typer.Option(metavar="N", help="Only work in this step.")] = None
    ranks: Annotated[str | None, typer.Option(metavar="0,2-5", help="Only these ranks.")] = None

    def rank_numbers(self) -> list[int] | None:
        """Return the ranks in order; None for all. Raises ConfigError where the option has another form."""
        return None if self.ranks is None else _parse_ranks(self.ranks)


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """What measures the traces of a run."""

    executor: Annotated[
        ExecutorKind | None,
        typer.Option(
            help="Measure traces in threads, in processes, or on a Dask cluster.  "
            "[default: threads; processes for runs of 32 or more local traces]"
        ),
    ] = None
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Threads or processes.  [default: one per processor]")
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A Dask cluster: local:N, slurm:N or a scheduler, tcp://HOST:PORT."),
    ] = None

    def open(self, paths: "Sequence[str]") -> "contextlib.AbstractContextManager[Executor]":
        """Return a context with the executor for these runs, whose workers stop at its end. Raises ConfigError.

        Call it before Polars is imported: it also sets the number of Polars' threads.
        """
        from tracekit import executors

        executors.limit_polars_threads(paths)
        kind, workers = self.executor, self.workers
        if kind is None:
            processes = None if self.cluster else executors.process_count(paths)
            kind = ExecutorKind.PROCESSES if processes else ExecutorKind.THREADS
            workers = workers or processes
        if self.cluster or kind is ExecutorKind.DASK:
            question.current.get().withdraw()
        return executors.open_executor(kind.value, workers=workers, cluster=self.cluster)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The destination of a command's result."""

    out: OutputFile = None

    @property
    def style(self) -> dict[str, Any]:
        """Return the width and whether to use color, as keyword arguments of a renderer."""
        return {"width": output.width(self.out), "color": output.color(self.out)}

    def emit(self, text: str) -> None:
        """Write a text result."""
        output.emit(text, self.out)

    def write_in(self, document: "Document", document_format: Format = Format.TEXT) -> None:
        """Write a document in a format."""
        # Only the renderer of this format is loaded: rich loads in a tenth of a second.
        if document_format is Format.TEXT:
            from tracekit.report.render import text

            written = text.render(document, **self.style)
        elif document_format is Format.JSON:
            from tracekit.report.render import json

            written = json.render(document)
        elif document_format is Format.MARKDOWN:
            from tracekit.report.render import markdown

            written = markdown.render(document)
        else:
            from tracekit.report.render import html

            written = html.render(document)
        self.emit(written)


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(OutputOptions):
    """The format and destination of a document."""

    document_format: Annotated[
        Format, typer.Option("--format", help="Text, Markdown or an HTML page for people, JSON for programs.")
    ] = Format.TEXT

    @property
    def is_json(self) -> bool:
        """Return whether the result is for a program."""
        return self.document_format is Format.JSON

    def write_document(self, document: "Document") -> None:
        """Write a document in the format that the user chose."""
        self.write_in(document, self.document_format)


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer in which the fields of dataclass parameters are options of their own.

    Arguments come first; options keep their order. The command itself gets the dataclasses.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            for field in dataclasses.fields(kind):
                default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
                keyword = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=field.type))
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    arguments: list[inspect.Parameter] = []
    options: list[inspect.Parameter] = []
    for parameter in parameters:
        is_argument = any(isinstance(note, ArgumentInfo) for note in get_args(parameter.annotation))
        (arguments if is_argument else options).append(parameter)
    signature = inspect.Signature([*arguments, *options])

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        bound = signature.bind(**values)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in dataclasses.fields(group)})
        command(**arguments)

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper


def _parse_ranks(text: str) -> list[int]:
    """Return the ranks of an option such as 0,2-5, in order. Raises ConfigError where it has another form."""
    ranks: set[int] = set()
    for part in output.split_names(text):
        match = _RANGE.match(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < _MAX_RANKS:
            raise ConfigError(f"--ranks {text!r}: expected ranks and ranges of them, such as 0,2-5")
        ranks.update(range(first, last + 1))
    if not ranks:
        raise ConfigError("--ranks: expected ranks and ranges of them, such as 0,2-5")
    return sorted(ranks)
