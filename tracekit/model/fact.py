"""Fact: a measurement with a name, its scope, and the columns of its table where it is published."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import update_wrapper
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import polars as pl

from tracekit.model import schema
from tracekit.model.schema import Table
from tracekit.model.trace import Trace, TraceFact

S = TypeVar("S")


class Scope(Enum):
    """What a fact measures."""

    TRACE = "trace"
    """Each trace by itself: `Run.table` maps the fact over all traces, and adds their window and rank."""
    RUN = "run"
    """All traces together, from tables of the run."""


class Fact(Generic[S]):
    """A pure function of a trace or of a run to a table, as `trace_fact` and `run_fact` make it.

    `table` documents the columns, units and grain of a published fact: SQL, docs/schema.md and `Run.table` of the
    library serve it by the table's name. A fact that `is_cached` is measured once for a run.
    """

    __qualname__: str

    def __init__(
        self, measure: Callable[[S], pl.DataFrame], scope: Scope, *, table: Table | None = None, is_cached: bool = True
    ) -> None:
        """Wrap a function that can be imported by its module and name."""
        update_wrapper(self, measure)
        self.measure = measure
        self.scope = scope
        self.table = table
        self.is_cached = is_cached

    @property
    def name(self) -> str:
        """The name of a published table, else that of the function with its module."""
        return self.table.name if self.table else f"{self.__module__.rpartition('.')[2]}.{self.__qualname__}"

    @property
    def published_table(self) -> Table:
        """Table of the whole run: of a fact of traces, window and rank come before the columns of `table`."""
        assert self.table is not None, f"{self.name} is not published"
        if self.scope is Scope.RUN:
            return self.table
        return replace(self.table, columns=(*RANK_COLUMNS, *self.table.columns))

    def __call__(self, source: S) -> pl.DataFrame:
        """Measure a trace or a run, without any cache. A published table has exactly its documented columns."""
        rows = self.measure(source)
        return self.table.conform(rows) if self.table else rows

    def __reduce__(self) -> str:
        return self.__qualname__  # by reference, as a function

    def __repr__(self) -> str:
        return f"<Fact {self.name} of a {self.scope.value}>"


RANK_COLUMNS = (
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("rank", "Global rank of the process."),
)


class TraceTable(Fact[Trace]):
    """A table of the trace itself as a fact, so that an executor reads it as it measures others."""

    def __init__(self, name: str) -> None:
        """Publish the table of this name of `schema.TABLES`."""
        super().__init__(attrgetter(name), Scope.TRACE, table=schema.TABLES[name])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceTable) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> Any:
        return TraceTable, (self.name,)


@overload
def trace_fact(measure: TraceFact) -> Fact[Trace]: ...
@overload
def trace_fact(*, table: Table) -> Callable[[TraceFact], Fact[Trace]]: ...
def trace_fact(measure: TraceFact | None = None, *, table: Table | None = None) -> Any:
    """Make a function of a trace a fact: ``@trace_fact``, or ``@trace_fact(table=…)`` to publish it."""
    if measure is None:
        return lambda function: Fact(function, Scope.TRACE, table=table)
    return Fact(measure, Scope.TRACE)


@overload
def run_fact(measure: Callable[[S], pl.DataFrame]) -> Fact[S]: ...
@overload
def run_fact(*, table: Table, is_cached: bool = True) -> Callable[[Callable[[S], pl.DataFrame]], Fact[S]]: ...
def run_fact(
    measure: Callable[[S], pl.DataFrame] | None = None, *, table: Table | None = None, is_cached: bool = True
) -> Any:
    """Make a function of a run a fact: ``@run_fact``, or ``@run_fact(table=…)`` to publish it.

    `is_cached` is False for a table that the run holds already, that may change, or that is large and seldom read.
    """
    if measure is None:
        return lambda function: Fact(function, Scope.RUN, table=table, is_cached=is_cached)
    return Fact(measure, Scope.RUN)
