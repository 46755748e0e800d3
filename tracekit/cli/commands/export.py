"""``tracekit export``: a run as one file for Perfetto."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.run_loading import RunArgument, UseCache
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.model.run import Run, Source
    from tracekit.rules.rule import Finding

_RANGE = re.compile(r"(\d+)(?:[-–](\d+))?\Z")
_ZIP_LEVEL = 2
_UNALIGNED_RANK = "rank {} shares too few collectives with others: it is"
_MAX_RANKS = 1 << 20


def export(
    run: RunArgument,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "--output",
            "-o",
            metavar="FILE",
            help="Where it goes, such as run.pftrace; compressed if the name ends in .gz.",
        ),
    ],
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only what touches this step.")] = None,
    ranks: Annotated[str | None, typer.Option("--ranks", metavar="0,2-5", help="Only these ranks.")] = None,
    findings: Annotated[
        bool, typer.Option("--findings/--no-findings", help="Show what check finds as a track.")
    ] = True,
    cache: UseCache = True,
) -> None:
    """Write a run as one Perfetto trace, which ui.perfetto.dev opens: all ranks, on one clock.

    A rank is a process, a stream or thread a track, with its role in its name. Slices that overlap others of their
    track without nesting have tracks of their own: nothing is dropped. Arrows go from launches to kernels, counters
    show memory, and what tracekit check finds lies above each rank.
    """
    import polars as pl

    from tracekit.model import units
    from tracekit.report.export import perfetto

    wanted = None if ranks is None else sorted(set(_parse_ranks(ranks)))
    if wanted == []:
        raise ConfigError("--ranks: expected ranks and ranges of them, such as 0,2-5")
    opened = run_loading.open_run(run, cache=cache)
    with output.progress() as bar:
        step_on = bar.trace_callback((1 + findings) * len(opened.sources))
        found = _findings(opened, step_on) if findings else ()
        with output.atomic_file(out) as file, _compressed(file, out) as packed:
            done = perfetto.write(opened, packed, findings=found, step=step, ranks=wanted, on_progress=step_on)
    own = f"; {_count(done.own_tracks, 'track')} for slices that overlap others" if done.own_tracks else ""
    output.notify(
        f"{out}: {_count(done.slices, 'slice')} of {_count(done.traces, 'trace')}{own}; open it at ui.perfetto.dev"
    )
    if opened.offsets["residual_ns"].null_count() and len(opened.ranks) > 1:
        alone = opened.offsets.filter(pl.col("residual_ns").is_null())["rank"].unique()
        ranks_are = "ranks {} share too few collectives with others: each is" if len(alone) > 1 else _UNALIGNED_RANK
        output.notify(f"{ranks_are.format(units.ranges(alone))} on its own clock in the file")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _parse_ranks(text: str) -> Iterator[int]:
    for part in output.split_names(text):
        found = _RANGE.match(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if not 0 <= last - first < _MAX_RANKS:
            raise ConfigError(f"--ranks {text!r}: expected ranks and ranges of them, such as 0,2-5")
        yield from range(first, last + 1)


def _findings(run: "Run", on_progress: "Callable[[Source], None]") -> "tuple[Finding, ...]":
    from tracekit.rules import engine

    return engine.check(run, on_progress=on_progress).findings


@contextlib.contextmanager
def _compressed(file: BinaryIO, out: Path) -> Iterator[BinaryIO]:
    if out.suffix != ".gz":
        yield file
        return
    from isal import igzip

    # Neither a time nor a name inside: the same run gives the same bytes.
    with igzip.IGzipFile(filename="", mode="wb", compresslevel=_ZIP_LEVEL, fileobj=file, mtime=0) as packed:
        yield cast("BinaryIO", packed)
