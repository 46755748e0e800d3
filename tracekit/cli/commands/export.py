"""``tracekit export``: a run as one file for Perfetto."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer

from tracekit.cli import output
from tracekit.cli.options import RunOptions, SelectedWork, expand_options

if TYPE_CHECKING:
    from tracekit.model.run import Run

_ZIP_LEVEL = 2


@expand_options
def export(
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "--output",
            "-o",
            metavar="FILE",
            help="Trace file to write, such as run.pftrace; compressed if the name ends in .gz.",
        ),
    ],
    findings: Annotated[
        bool, typer.Option("--findings/--no-findings", help="Add a track with the findings of tracekit check.")
    ] = True,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Add a track with the critical path of the step.")
    ] = False,
    work: SelectedWork,
    source: RunOptions,
) -> None:
    """Write a run as one Perfetto trace for ui.perfetto.dev: all ranks, on one clock.

    Each rank is a process; each stream or thread is a track whose name shows its role. Slices that overlap others
    without nesting get an additional track, so that none is dropped. Arrows connect launches with kernels, counters
    show memory, and findings of tracekit check are above each rank, below them the parts of the critical path there.
    """
    from tracekit.replay.graph.critical_path import path
    from tracekit.report.export import perfetto
    from tracekit.rules import engine

    step, selected = work.step, work.rank_numbers()
    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback((1 + findings) * len(run.sources))
        shown = engine.check(run, on_progress=callback).findings if findings else ()
        explained = path.critical_path(run, step) if critical_path else None
        with output.atomic_file(out) as file, _compressed(file, out) as packed:
            written = perfetto.write(
                run, packed, findings=shown, path=explained, step=step, ranks=selected, on_progress=callback
            )
    extra = f"; {_count(written.own_tracks, 'track')} added for overlapping slices" if written.own_tracks else ""
    output.notify(
        f"{out}: {_count(written.slices, 'slice')} of {_count(written.traces, 'trace')}{extra}; open at ui.perfetto.dev"
    )
    _report_unaligned(run)


def _report_unaligned(run: "Run") -> None:
    """Report which ranks of several are not on the run's clock."""
    import polars as pl

    from tracekit.model import units

    unaligned = run.offsets.filter(pl.col("residual_ns").is_null())["rank"].unique()
    if len(unaligned) and len(run.ranks) > 1:
        several = len(unaligned) > 1
        output.notify(
            f"rank{'s' * several} {units.ranges(unaligned)} share{'s' * (not several)} too few collectives: "
            f"{'each is' if several else 'it is'} on its own clock in the file"
        )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


@contextlib.contextmanager
def _compressed(file: BinaryIO, out: Path) -> Iterator[BinaryIO]:
    if out.suffix != ".gz":
        yield file
        return
    from isal import igzip

    # Neither a time nor a name inside: the same run gives the same bytes.
    with igzip.IGzipFile(filename="", mode="wb", compresslevel=_ZIP_LEVEL, fileobj=file, mtime=0) as packed:
        yield cast("BinaryIO", packed)
