"""Compute whose operations or bytes are not known: which operators and kernels it is, and why they are not."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import efficiency, flops, op_bytes, op_flops
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

_TEXT = pl.String()
NO_OPERATOR = "no operator recorded"
NO_SHAPES = "no shapes recorded"
NO_FORMULA = "no formula"
INSUFFICIENT = "inputs insufficient"

UNKNOWN_WORK = schema.table(
    "unknown_work",
    "operator, or kernel without one, and reason: compute whose operations or bytes are not known",
    schema.column("name", "Innermost operator around the launch; the kernel where there is none.", _TEXT),
    schema.column("reason", f"'{NO_OPERATOR}' (as in CUDA graphs), '{NO_SHAPES}', '{NO_FORMULA}', "
                  f"'{INSUFFICIENT}' (such as lengths of packed sequences), or what a kernel's name lacks.", _TEXT),
    schema.column("count", "Kernels; on a CPU run, ops."),
    schema.column("total_ns", "Their time; times of concurrent kernels add up."),
    schema.column("flops_unknown_ns", "The part of it whose floating-point operations are not known."),
    schema.column("compute_ratio", "Share of total_ns in the compute of the rank.", pl.Float64()),
)  # fmt: skip
_KEYS = ("name", "reason")


@trace_fact(table=UNKNOWN_WORK)
def unknown_work(trace: Trace) -> pl.DataFrame:
    """Return the compute of the steps whose operations or bytes are not known: columns UNKNOWN_WORK, longest first.

    Where no steps are marked, that of the window; saves are left out. Operators that multiply no matrices have known
    operations, none, and may have unknown bytes.
    """
    work = _step_compute(trace)
    unknown = work.filter(~(pl.col("is_known") & pl.col("has_work")))
    sums = unknown.group_by(pl.coalesce("op", "name").alias("name"), _reason(unknown).alias("reason")).agg(
        pl.len().alias("count"),
        pl.col("dur_ns").sum().alias("total_ns"),
        pl.col("dur_ns").filter(~pl.col("is_known")).sum().alias("flops_unknown_ns"),
    )
    shares = sums.with_columns(compute_ratio=_compute_ratio(int(work["dur_ns"].sum())))
    return UNKNOWN_WORK.conform(shares).pipe(_longest_first)


def by_operator(run: Run) -> pl.DataFrame:
    """Return the unknown work of all ranks and windows: the columns of UNKNOWN_WORK, one row per operator and reason.

    compute_ratio is the share in the compute of all ranks.
    """
    rank_rows = run.table(unknown_work)
    whole_ns = int(run.table(_total_compute)["compute_ns"].sum())
    sums = rank_rows.group_by(_KEYS).agg(pl.col("count", "total_ns", "flops_unknown_ns").sum())
    return (
        sums.with_columns(compute_ratio=_compute_ratio(whole_ns))
        .select(UNKNOWN_WORK.schema.names())
        .pipe(_longest_first)
    )


def note(run: Run) -> str | None:
    """Describe what is missing where operations are known for too little of the compute to compare; else None."""
    known_ns, whole_ns = run.table(flops.coverage).select("known_ns", "compute_ns").sum().row(0)
    if not whole_ns or known_ns / whole_ns >= efficiency.MIN_COVERAGE_RATIO:
        return None
    missing = by_operator(run).filter(pl.col("flops_unknown_ns") > 0).sort("flops_unknown_ns", descending=True)
    listing = ", ".join(
        f"{row['name']} {row['flops_unknown_ns'] / whole_ns:.1%} ({row['reason']})"
        for row in missing.head(_NAMED).to_dicts()
    )
    return (
        f"operations are known for {known_ns / whole_ns:.1%} of the compute time, less than "
        f"{efficiency.MIN_COVERAGE_RATIO:.0%}: flops and MFU are lower bounds, and are not compared. Not known are "
        f"{listing}; all are in --by unknown-work"
    )


_NAMED = 3


def _compute_ratio(whole_ns: int) -> pl.Expr:
    """Return the share of total_ns in the whole compute; null where no compute takes time."""
    return pl.col("total_ns") / pl.when(whole_ns > 0).then(whole_ns)


def _step_compute(trace: Trace) -> pl.DataFrame:
    work = flops.compute(trace).filter(pl.col("phase").ne_missing(conventions.CHECKPOINT))
    in_steps = work.filter(pl.col("step").is_not_null())
    return work if in_steps.is_empty() else in_steps


@trace_fact
def _total_compute(trace: Trace) -> pl.DataFrame:
    return _step_compute(trace).select(compute_ns=pl.col("dur_ns").sum())


def _reason(work: pl.DataFrame) -> pl.Expr:
    names = work["op"].drop_nulls().unique().to_list()
    with_formula = [name for name in names if op_flops.has_formula(name) or op_bytes.has_formula(name)]
    kernel_names = work["name"].unique().to_list()
    lacks = {name: lacking for name in kernel_names if (lacking := flops.unknown_part(name))}
    tiled = [name for name in kernel_names if flops.has_tile_only(name)]
    has_op_formula = pl.col("op").is_in(with_formula).fill_null(value=False)
    return (
        pl.when(pl.col("name").is_in(list(lacks)) & ~has_op_formula)
        .then(pl.col("name").replace_strict(lacks, default=None, return_dtype=pl.String))
        .when(pl.col("op").is_null() & pl.col("name").is_in(tiled)).then(pl.lit(flops.TILE_ONLY))
        .when(pl.col("op").is_null()).then(pl.lit(NO_OPERATOR))
        .when(pl.col("shapes").is_null()).then(pl.lit(NO_SHAPES))
        .when(~pl.col("op").is_in(with_formula)).then(pl.lit(NO_FORMULA))
        .otherwise(pl.lit(INSUFFICIENT))
    )  # fmt: skip


def _longest_first(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.sort("total_ns", "name", "reason", descending=[True, False, False])


FACTS: tuple[TraceFact, ...] = (unknown_work, flops.coverage, _total_compute)
"""What `by_operator` and `note` need of each trace."""
