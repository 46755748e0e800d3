"""The tables of a history file: every column with its type, its unit and what it means."""

import polars as pl

from tracekit.model import schema

_TEXT, _FLOAT, _BOOL = pl.String(), pl.Float64(), pl.Boolean()
_RUN = schema.column("run", "Name of the run by its content: the same files are the same run.", _TEXT)

VERSION = schema.table(
    "tracekit_history",
    "history file: there is one",
    schema.column("schema", "Version of these tables; a reader of an earlier one refuses a later one."),
)
RUNS = schema.table(
    "runs",
    "checked run",
    _RUN,
    schema.column(
        "digest", "Hash of all that is stored of the run: it differs where another check of it differs.", _TEXT
    ),
    schema.column("name", "Name of the run's folder.", _TEXT),
    schema.column("at_ns", "Unix time at which it was recorded, else at which it was added: their order."),
    schema.column("added_ns", "Unix time at which it was added."),
    schema.column("commit", "Commit that was trained; null where not known.", _TEXT),
    schema.column("commit_text", "Message of that commit; null where not known.", _TEXT),
    schema.column("branch", "Branch that was trained; null where not known.", _TEXT),
    schema.column("fingerprint", "Hash of what must agree for runs to be in one series.", _TEXT),
    schema.column("tool_version", "Version of tracekit that checked it.", _TEXT),
    schema.column("passed", "Whether the check passed; null where it was not checked.", _BOOL),
    schema.column("failures", "What failed the check: ids of findings, metrics, budgets.", pl.List(_TEXT)),
)
FACTS = schema.table(
    "facts",
    "run and fact of its manifest",
    _RUN,
    schema.column("field", "Name of the fact, such as model.name or versions.torch.", _TEXT),
    schema.column("value", "What the manifest says, as text.", _TEXT),
    schema.column("is_identity", "Whether it is part of the fingerprint.", _BOOL),
)
METRICS = schema.table(
    "metrics",
    "run and metric",
    _RUN,
    schema.column("metric", "Name of the metric, as tracekit compare has it; its ending is its unit.", _TEXT),
    schema.column("median", "Median over steps: of times the worst rank's, of all else the mean over ranks.", _FLOAT),
    schema.column("low", "Lower end of the median's 95% interval; null below 6 samples.", _FLOAT),
    schema.column("high", "Upper end of it.", _FLOAT),
    schema.column("samples", "Steps that it rests on."),
)
FINDINGS = schema.table(
    "findings",
    "run and finding",
    _RUN,
    schema.column("finding", "Id of the finding, the same from run to run.", _TEXT),
    schema.column("code", "Code of its rule.", _TEXT),
    schema.column("name", "Name of its rule.", _TEXT),
    schema.column("severity", "info, warning or error.", _TEXT),
    schema.Column("impact_ratio", _FLOAT, "ratio", "Share of step time lost; in findings on saves, of training time."),
    schema.column("cost_ns", "Time lost per step on the worst rank."),
    schema.column("cost_bytes", "Memory that it takes."),
    schema.column("message", "What it says.", _TEXT),
)
RUN_TABLES = (RUNS, FACTS, METRICS, FINDINGS)
"""The tables with what is known of runs."""
