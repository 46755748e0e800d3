"""The tables of a history file: every column with its type, its unit and what it means."""

import polars as pl

from tracekit.model.schema import Column, Table

_INT, _TEXT, _FLOAT, _BOOL = pl.Int64(), pl.String(), pl.Float64(), pl.Boolean()
_RUN = Column("run", _TEXT, "", "Name of the run by its content: the same files are the same run.")

VERSION = Table(
    "tracekit_history",
    "history file: there is one",
    (Column("schema", _INT, "", "Version of these tables; a reader of an earlier one refuses a later one."),),
)
RUNS = Table(
    "runs",
    "checked run",
    (
        _RUN,
        Column(
            "digest", _TEXT, "", "Hash of all that is stored of the run: it differs where another check of it differs."
        ),
        Column("name", _TEXT, "", "Name of the run's folder."),
        Column("at_ns", _INT, "ns", "Unix time at which it was recorded, else at which it was added: their order."),
        Column("added_ns", _INT, "ns", "Unix time at which it was added."),
        Column("commit", _TEXT, "", "Commit that was trained; null where not known."),
        Column("commit_text", _TEXT, "", "Message of that commit; null where not known."),
        Column("branch", _TEXT, "", "Branch that was trained; null where not known."),
        Column("fingerprint", _TEXT, "", "Hash of what must agree for runs to be in one series."),
        Column("tool_version", _TEXT, "", "Version of tracekit that checked it."),
        Column("passed", _BOOL, "", "Whether the check passed; null where it was not checked."),
        Column("failures", pl.List(_TEXT), "", "What failed the check: ids of findings, metrics, budgets."),
    ),
)
FACTS = Table(
    "facts",
    "run and fact of its manifest",
    (
        _RUN,
        Column("field", _TEXT, "", "Name of the fact, such as model.name or versions.torch."),
        Column("value", _TEXT, "", "What the manifest says, as text."),
        Column("is_identity", _BOOL, "", "Whether it is part of the fingerprint."),
    ),
)
METRICS = Table(
    "metrics",
    "run and metric",
    (
        _RUN,
        Column("metric", _TEXT, "", "Name of the metric, as tracekit compare has it; its ending is its unit."),
        Column("median", _FLOAT, "", "Median over steps: of times the worst rank's, of all else the mean over ranks."),
        Column("low", _FLOAT, "", "Lower end of the median's 95% interval; null below 6 samples."),
        Column("high", _FLOAT, "", "Upper end of it."),
        Column("samples", _INT, "", "Steps that it rests on."),
    ),
)
FINDINGS = Table(
    "findings",
    "run and finding",
    (
        _RUN,
        Column("finding", _TEXT, "", "Id of the finding, the same from run to run."),
        Column("code", _TEXT, "", "Code of its rule."),
        Column("name", _TEXT, "", "Name of its rule."),
        Column("severity", _TEXT, "", "info, warning or error."),
        Column("impact_ratio", _FLOAT, "ratio", "Share of step time lost."),
        Column("cost_ns", _INT, "ns", "Time lost per step on the worst rank."),
        Column("cost_bytes", _INT, "bytes", "Memory that it takes."),
        Column("message", _TEXT, "", "What it says."),
    ),
)
RUN_TABLES = (RUNS, FACTS, METRICS, FINDINGS)
"""The tables with what is known of runs."""
