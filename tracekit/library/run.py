"""Run: all traces of one job, with every answer about it as a method."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from tracekit.conventions.devices import DeviceOverride
from tracekit.conventions.read_settings import ReadSettings
from tracekit.errors import InputError, did_you_mean
from tracekit.ingest import loader
from tracekit.ingest.files import RunLocation
from tracekit.ingest.loader import Progress
from tracekit.model import escaping
from tracekit.model import run as model
from tracekit.model.fact import Fact
from tracekit.model.source import Executor
from tracekit.model.trace import TraceFact
from tracekit.rules.rule import Rule
from tracekit.sql import table_documents

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tracekit.library.answers import Report, Timeline, WhatIf
    from tracekit.library.comparison import Comparison, SizeComparison, StepComparison


class Run(model.Run):
    """All traces of one job. Traces are read when needed and evicted, so memory use stays flat.

    >>> run = tracekit.load("runs/today")  # doctest: +SKIP
    >>> run.table("breakdown")  # doctest: +SKIP
    >>> run.check()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Build a run as `tracekit.model.run.Run` does; `load` calls this."""
        super().__init__(*args, **options)
        # An attribute, no property: IPython evaluates no property to complete what follows it. Neither the tables nor
        # the report keep the run alive: the folder of an unpacked archive is removed as soon as its run is gone.
        this_run = weakref.ref(self)
        self.tables = Tables(lambda name: _require_run(this_run()).table(name))
        self._report: Callable[[], Report | None] = lambda: None

    def table(self, fact: "str | Fact[Any] | TraceFact", reads: Sequence[TraceFact] = ()) -> pl.DataFrame:
        """Rows of a table of docs/schema.md by its name, or of a fact. Measured once, then cached.

        A table of traces has columns window and rank in front. A function that is not decorated is taken for a fact of
        a trace. Raises InputError for an unknown name, TypeError for what is no fact.
        """
        if isinstance(fact, str):
            from tracekit.sql import run_tables  # with the facts of all tables

            facts = run_tables.facts()
            if fact not in facts:
                raise InputError(f"{fact}: no such table{did_you_mean(fact, facts)}; the tables are {', '.join(facts)}")
            return super().table(facts[fact])
        if not callable(fact):
            raise TypeError(f"a table is requested by its name or by a fact, not by {type(fact).__name__} {fact!r:.80}")
        try:
            return super().table(fact, reads)
        except AttributeError as error:
            if isinstance(fact, Fact):
                raise
            name = getattr(fact, "__qualname__", repr(fact))
            raise TypeError(
                f"{name} was called with each trace and failed: {error}. If it is a function of the run, decorate it "
                "with tracekit.model.fact.run_fact, or call it with the run"
            ) from error

    def check(self, rules: Iterable[Rule] | None = None) -> "Report":
        """Findings by severity and cost, by all rules with their default thresholds, or by `rules`."""
        from tracekit.library import answers

        if rules is not None:
            return answers.check(self, rules)
        judged = self._report()
        if judged is None:
            judged = answers.check(self)
            self._report = weakref.ref(judged)
        return judged

    def compare(
        self, other: "model.Run | str | Path", *, by: str | Sequence[str] = (), allow_different: bool = False
    ) -> "Comparison | SizeComparison | StepComparison":
        """Whether this run is better or worse than another one, the reference: verdicts with 99% intervals.

        Of a run on another number of GPUs or nodes, or with another batch: throughput, efficiency, and what grew. Of a
        path with several roles, the run with the role of this one is loaded.

        Args:
            other: A run, or the path of one, of a saved JSON report or of a baseline.
            by: "operator", "kernel" or "module", and "path" or "shapes" with it: explain the change of the step.
            allow_different: Whether model, world size and device may differ.
        """
        from tracekit.library import comparison

        reference = (
            other if isinstance(other, model.Run) else comparison.saved_samples(Path(other)) or self._counterpart(other)
        )
        if not by:
            return comparison.compare(reference, self, allow_different=allow_different)
        keys = (by,) if isinstance(by, str) else tuple(by)
        return comparison.compare_steps(reference, self, keys, allow_different=allow_different)

    def _counterpart(self, path: str | Path) -> "Run":
        """The run at a path; of several roles the one with this run's role. Raises InputError if that is missing."""
        loaded = load(path)
        return load(path, role=self.role) if self.role and loaded.roles else loaded

    def what_if(self, *causes: str, gpu_hour_price: float | None = None) -> "WhatIf":
        """Saving per step without each of `causes`, by replay; by default of all that save anything.

        Causes of findings come first, with the savings that `check` states.
        """
        from tracekit.library.answers import WhatIf
        from tracekit.rules import stated_savings

        return WhatIf(self.name, stated_savings.answer(self.check(), causes, gpu_hour_price=gpu_hour_price))

    def plot(self, name: str) -> "go.Figure":
        """A figure of the dashboard by its name in docs/notebook.md. Raises InputError for another name."""
        from tracekit.library.notebook_figure import NotebookFigure
        from tracekit.report import charts, figures

        drawn = figures.draw(self, name)
        titled = charts.with_title(drawn.figure, f"{self.name} · {drawn.heading}")
        return NotebookFigure.of(titled, self.name, drawn.heading)

    def timeline(self, *, max_bytes: int = 3_000_000) -> "Timeline":
        """The interactive timeline of all ranks, with the evidence of findings; first profiled window.

        A notebook stores the timeline that a cell shows: with less than `max_bytes`, short slices are merged.
        """
        from tracekit.library.answers import Timeline

        return Timeline(self.check(), max_bytes)


class Tables:
    """Tables of docs/schema.md: ``run.tables.steps`` and ``run.tables["steps"]`` are ``run.table("steps")``."""

    def __init__(self, table: Callable[[str], pl.DataFrame]) -> None:
        """Serve the tables of a run, each by `table` when it is requested."""
        self._table = table

    def __getitem__(self, name: str) -> pl.DataFrame:
        return self._table(name)

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name.startswith("_") or name not in list(self):  # IPython asks for names such as _repr_mimebundle_
            raise AttributeError(f"no table {name}; the tables are {', '.join(self)}")
        return self._table(name)

    def __iter__(self) -> Iterator[str]:
        return (document.name for document in table_documents.all_documents())

    def __len__(self) -> int:
        return len(table_documents.all_documents())

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"<{len(self)} tables: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        documents = table_documents.all_documents()
        return escaping.html_table(("table", "one row per"), [(table.name, table.grain) for table in documents])


def _require_run(run: Run | None) -> Run:
    if run is None:
        raise InputError("the run of these tables no longer exists: assign what tracekit.load returns to a variable")
    return run


def load(
    where: RunLocation,
    *,
    on_progress: Progress | None = None,
    cache: bool = True,
    devices: Sequence[DeviceOverride] = (),
    step_name: str | None = None,
    executor: Executor | None = None,
    role: str | None = None,
) -> Run:
    """Load a run: a folder, archive, list or glob of trace files, one trace file, or a URL (s3://, gs://, …).

    Only headers are read now; a trace is read when a table is requested.

    Args:
        where: The path, paths or URL.
        on_progress: Called as `on_progress(done, total)` after each file.
        cache: Whether parsed tables are stored in the user's cache, and read from there.
        devices: Peaks and bandwidths that replace those of the table of devices.
        step_name: The name of a span, such as an annotation, each occurrence of which is a step.
        executor: What measures the traces; by default threads of this process.
        role: The role to return the run of, where processes of several roles (trainer, rollout) were recorded; by
            default that with most ranks. `run.roles` has the runs of all roles by name.

    Raises:
        InputError: A path does not exist or has no trace, there is no such role, or a trace has no span of that name.
        BadTraceError: No trace can be read.
    """
    settings = ReadSettings(tuple(devices), step_name)
    options: dict[str, Any] = {"cache": cache, "settings": settings, "executor": executor, "role": role}
    run = loader.load(where, on_progress=on_progress, run_class=Run, **options)
    return cast("Run", run)
