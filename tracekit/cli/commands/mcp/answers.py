"""What an agent may ask of runs. Each answer is a small JSON value: numbers with their units in their names.

Times are in ns, sizes in bytes, shares from 0 to 1. Texts that may quote a recording are marked (`quoting`).
"""

import dataclasses
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl
from pydantic import Field

from tracekit.analysis.hangs import diagnosis
from tracekit.analysis.time import breakdown, rank_shares
from tracekit.cli.commands import explain as explaining
from tracekit.cli.commands import memory as memory_command
from tracekit.cli.commands import summary as summary_command
from tracekit.cli.commands.mcp import quoting, roots
from tracekit.cli.commands.mcp.quoting import MAX_SENTENCE, quote, quote_all
from tracekit.cli.commands.mcp.roots import Roots
from tracekit.errors import InputError, did_you_mean
from tracekit.ingest.hang_dumps import folder as hang_dumps
from tracekit.library import run as library
from tracekit.library.answers import Report
from tracekit.model import units
from tracekit.plan import checkpoint
from tracekit.replay.graph import larger_jobs
from tracekit.report import document, phrases
from tracekit.report import hang as hang_report
from tracekit.report import memory as memory_report
from tracekit.rules import report_cache
from tracekit.rules.rule import Finding, Severity, is_data_quality
from tracekit.sql import run_query, table_documents

MAX_BYTES = 20_000
"""Largest answer: an agent reads it whole, and each costs it a part of what it can remember."""
MAX_ROWS = 50
_MAX_OPEN = 4
_SUMS_BYTES = 7_000
_SQL_TIMEOUT_S = 30.0
_SQL_MEMORY_BYTES = 2 << 30
_KERNEL_COLUMNS = ("rank", "step", "kind", "name", "lane", "start_ns", "dur_ns")


RunName = Annotated[str, Field(description="Name of a run, as list_runs gives it.")]
Offset = Annotated[int, Field(description="The first row, from 0.", ge=0)]
Limit = Annotated[int, Field(description="Rows at most.", ge=1, le=10 * MAX_ROWS)]
_BY = ", ".join(kind.value for kind in summary_command.By)


Answer = dict[str, Any]


@dataclass
class _OpenRun:
    run: library.Run
    stamp: str
    report: Report | None = None


class Answers:
    """Answers about the runs below some roots; each method of `QUESTIONS` is a tool of the server.

    One question is answered at a time. The last runs stay open.
    """

    def __init__(self, roots_: Roots, *, cache: bool = True, max_bytes: int = MAX_BYTES) -> None:
        """Read only what is below the roots; an answer takes `max_bytes` of JSON at most."""
        self._roots, self._cache, self._max_bytes = roots_, cache, max_bytes
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, question: Callable[[], Answer]) -> str:
        """The answer to a question as JSON within the budget, with the notice on what is quoted."""
        with self._lock:
            return quoting.as_json(quoting.fit({"notice": quoting.NOTICE, **question()}, self._max_bytes))

    def list_runs(self) -> Answer:
        """List the runs: model, strategy, ranks, and the costliest finding of each run that was checked before."""
        rows: list[Answer] = []
        for name, path in self._roots.runs().items():
            linked = self._roots.link_outside(path)
            if linked:
                rows.append({"run": name, "has": [], "problem": f"not read: {quote(linked)} links out of the roots"})
                continue
            stated, checked = roots.manifest(path), report_cache.summary(str(path))
            row: Answer = {
                "run": name,
                "has": roots.contents(path),
                "model": quote(stated.model.name) if stated.model.name else None,
                "strategy": quote_all(stated.strategy),
                "world_size": stated.world_size,
                "role": quote(stated.role) if stated.role else None,
                "is_simulated": stated.simulated,
                "is_checked": checked is not None,
            }
            if checked is not None:
                row |= {
                    "costliest_finding": quote(checked.first_finding, MAX_SENTENCE) if checked.first_finding else None,
                    "saving_ratio": checked.impact,
                    "step_time_ns": checked.step_time_ns,
                }
            rows.append(row)
        if not rows:
            return {"runs": [], "next": "nothing is there: start tracekit mcp on runs or on folders of runs"}
        return {"runs": rows, "next": "check(run) judges traces, memory(run) snapshots of memory, hang(run) hang dumps"}

    def check(self, run: RunName) -> Answer:
        """Say why a run is slow: findings with cause, place, saving and fix, the costliest first; trust in the data."""
        report = self._report(run)
        opened = report.run
        findings = [finding for finding in report.findings if not is_data_quality(finding.code)]
        doubts = [finding for finding in report.findings if is_data_quality(finding.code)]
        verdict = report.cannot_judge or (findings[0].sentence if findings else phrases.no_problems(report))
        shares = rank_shares.shares(opened)
        ratios = [name for name in shares.columns if name.endswith("_ratio")] if shares.height else []
        return {
            "run": run,
            "verdict": quote(verdict, MAX_SENTENCE),
            "ranks": len(opened.ranks),
            "mean_step_ns": breakdown.mean_step_ns(opened),
            "median_step_ns": breakdown.step_time_ns(opened),
            "findings": [_brief_finding(finding) for finding in findings],
            "time_of_all_ranks": _means(shares, ratios),
            "data": {
                "is_trusted": all(doubt.severity is Severity.INFO for doubt in doubts),
                "doubts": [_brief_finding(doubt) for doubt in doubts],
            },
            "next": "finding(run, finding) has the evidence; what_if(run) predicts the step without a cause",
        }

    def finding(
        self,
        run: RunName,
        finding: Annotated[str, Field(description="Id of a finding, such as RANK001-c7bd3402.")],
        offset: Offset = 0,
        limit: Limit = MAX_ROWS,
    ) -> Answer:
        """Show a finding with its whole message and fix, and the rows that prove it."""
        by_id = {judged.id: judged for judged in self._report(run).findings}
        if finding not in by_id:
            raise InputError(f"{finding}: {run} has no such finding{did_you_mean(finding, by_id)}; check lists them")
        named = by_id[finding]
        return {
            "run": run,
            **_brief_finding(named),
            "message": quote(named.message, 2 * MAX_SENTENCE),
            "fix": quote(named.fix, MAX_SENTENCE),
            "measured_ns": named.measured_ns or None,
            "evidence": _page(named.evidence, offset, limit),
            "next": f"explain({named.code}) says how the rule measures; kernels(run, rank, …) shows a moment",
        }

    def summary(
        self,
        run: RunName,
        by: Annotated[str, Field(description=f"What a row is: {_BY}.")] = "rank",
        offset: Offset = 0,
        limit: Limit = MAX_ROWS,
    ) -> Answer:
        """Show where the time goes: compute, exposed communication, copies and idle time; or waits, clocks, stages."""
        kinds = [kind.value for kind in summary_command.By]
        if by not in kinds:
            raise InputError(f"{by}: a row of summary is one of {_BY}{did_you_mean(by, kinds)}")
        _, rows_of = summary_command.view(summary_command.By(by))
        return {"run": run, "by": by, **_page(rows_of(self._run(run)), offset, limit)}

    def compare(
        self,
        reference: Annotated[str, Field(description="Name of the run to compare with.")],
        candidate: Annotated[str, Field(description="Name of the run that may be slower.")],
        by: Annotated[
            list[str] | None,
            Field(description="Explain the change of the step by operator, kernel or module, and path or shapes."),
        ] = None,
    ) -> Answer:
        """Say whether a run is slower than another, by how much, and what contributes to it."""
        compared = self._run(candidate).compare(self._run(reference), by=tuple(by or ()))
        written = compared.document()
        return {
            "reference": reference,
            "candidate": candidate,
            "sentences": _sentences(written),
            "comparison": quote_all(written.values, MAX_SENTENCE),
        }

    def what_if(
        self,
        run: RunName,
        causes: Annotated[
            list[str] | None, Field(description="Names of causes; by default all without which steps are shorter.")
        ] = None,
        gpus: Annotated[
            int | None,
            Field(ge=1, le=larger_jobs.MOST_GPUS, description="Predict the same job on so many GPUs instead."),
        ] = None,
        network_bytes_per_second: Annotated[
            float | None, Field(gt=0, description="With gpus: bus bandwidth of a ring across nodes (nccl-tests).")
        ] = None,
    ) -> Answer:
        """Predict the step time without each cause of lost time, or on more GPUs, by replay of the recorded steps."""
        if gpus is not None:
            network = larger_jobs.Network(bytes_per_s=network_bytes_per_second)
            prediction = larger_jobs.predict(self._run(run), gpus, network)
            return {"run": run, **quote_all(dataclasses.asdict(prediction), MAX_SENTENCE)}
        answer = self._run(run).what_if(*(causes or ()))
        return {"run": run, **_page(answer.to_frame(), 0, MAX_ROWS), "next": "explain(cause) says what is removed"}

    def tables(self) -> Answer:
        """List the tables of a run with their columns."""
        documents = table_documents.all_documents()
        return {
            "tables": [
                {"table": table.name, "one_row_per": table.grain, "columns": [column.name for column in table.columns]}
                for table in documents
            ],
            "next": "explain(table) has units and meanings; sql(run, select) reads them",
        }

    def sql(
        self,
        run: RunName,
        select: Annotated[str, Field(description="One SELECT in DuckDB's dialect over the tables of the run.")],
        limit: Limit = MAX_ROWS,
    ) -> Answer:
        """Read the tables of a run by SQL, in a process that can read nothing else."""
        with run_query.open_query(
            select, timeout_s=_SQL_TIMEOUT_S, memory_bytes=_SQL_MEMORY_BYTES, max_rows=limit + 1
        ) as query:
            rows = query.run(self._run(run))
        shown = quoting.rows(rows.head(limit))
        return {"run": run, "rows": shown, "has_more": rows.height > len(shown)}

    def kernels(
        self,
        run: RunName,
        rank: int,
        step: int | None = None,
        start_ns: Annotated[int | None, Field(description="Only what ends after it, on the rank's own clock.")] = None,
        end_ns: Annotated[int | None, Field(description="Only what starts before it.")] = None,
        offset: Offset = 0,
        limit: Limit = MAX_ROWS,
    ) -> Answer:
        """Show the work of a rank's device in a step or a range of time, in its order, and its sums by name."""
        table = self._run(run).table("activities").filter(pl.col("rank") == rank)
        if table.is_empty():
            raise InputError(f"{run}: rank {rank} has no device activities; summary(run) lists the ranks")
        steps = table["step"].drop_nulls().unique().sort()
        if step is not None and step not in steps:
            raise InputError(f"{run}: rank {rank} has no step {step}; it has {units.numbers('step', steps.to_list())}")
        end = pl.col("start_ns") + pl.col("dur_ns")
        table = table.filter(
            pl.lit(value=True) if step is None else pl.col("step") == step,
            pl.lit(value=True) if start_ns is None else end > start_ns,
            pl.lit(value=True) if end_ns is None else pl.col("start_ns") < end_ns,
        )
        total, largest = pl.col("dur_ns").sum().alias("total_ns"), pl.col("dur_ns").max().alias("max_ns")
        sums = table.group_by("kind", "name").agg(pl.len().alias("calls"), total, largest)
        return {
            "run": run,
            "by_name": quoting.rows(sums.sort("total_ns", "name", descending=[True, False]).head(limit), _SUMS_BYTES),
            **_page(table.sort("start_ns").select(_KERNEL_COLUMNS), offset, limit),
        }

    def hang(self, run: RunName) -> Answer:
        """Say which rank a hung job waits for, and what that rank does instead, from flight recorder dumps."""
        dumps = hang_dumps.read(Path(self._roots.path(run)))
        return {"run": run, "hang": quote_all(hang_report.document(diagnosis.diagnose(dumps)).values, MAX_SENTENCE)}

    def memory(
        self,
        run: RunName,
        replay: Annotated[
            str | None, Field(description="Allocator settings to replay, in the syntax of PYTORCH_CUDA_ALLOC_CONF.")
        ] = None,
    ) -> Answer:
        """Show who uses memory at the peak and what grows; with `replay`, what other allocator settings change."""
        options = memory_command.ReplayOptions(replay=replay)
        usage = memory_command.usage_of(self._roots.path(run), options, cache=self._cache)
        written = memory_report.document(usage)
        return {"run": run, "sentences": _sentences(written), "memory": quote_all(written.values, MAX_SENTENCE)}

    def explain(
        self, name: Annotated[str, Field(description="A rule, table, cause, metric or term; or the id of a finding.")]
    ) -> Answer:
        """Explain a rule (measurement, fix, blind spots), a table's columns, a cause, a metric or a term."""
        pages = explaining.pages(name, tuple(explaining.Kind))
        return {"name": name, "meanings": {kind: page.values for kind, page in pages.items()}}

    def plan_checkpoints(
        self,
        params: Annotated[float, Field(description="Parameters of the model.", gt=0)],
        write_bytes_per_second: Annotated[float, Field(description="Write bandwidth of storage.", gt=0)],
        interval_s: Annotated[float, Field(description="Seconds between saves.", gt=0)],
        mtbf_s: Annotated[float | None, Field(description="Mean time between failures of the job, in s.")] = None,
    ) -> Answer:
        """Estimate size, cost and interval of checkpoints."""
        storage = checkpoint.Storage(write_bytes_per_second)
        plan = checkpoint.checkpoint(params, checkpoint.Layout(), storage, interval_s=interval_s, mtbf_s=mtbf_s)
        return dataclasses.asdict(plan)

    def _run(self, name: str) -> library.Run:
        return self._open_run(name).run

    def _report(self, name: str) -> Report:
        opened = self._open_run(name)
        opened.report = opened.report or opened.run.check()
        return opened.report

    def _open_run(self, name: str) -> _OpenRun:
        path = self._roots.path(name)
        job, role = self._roots.job(path)
        states = report_cache.run_states(job)
        stamp = states.stamp if states else ""
        opened = self._open.pop(path, None)
        if opened is None or opened.stamp != stamp:
            opened = _OpenRun(library.load(job, cache=self._cache, role=role), stamp)
        self._open[path] = opened
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return opened


def _brief_finding(finding: Finding) -> Answer:
    end = finding.fix.find(". ")
    return {
        "id": finding.id,
        "rule": phrases.rule_name(finding.code),
        "severity": finding.severity.label,
        "sentence": quote(finding.sentence, MAX_SENTENCE),
        "saving_ns": finding.cost_ns or None,
        "saving_ratio": finding.impact or None,
        "saving_is": "by replay" if finding.is_priced else "at most" if finding.is_upper_bound else "as measured",
        "confidence": finding.confidence,
        "where": quote(phrases.place(finding), MAX_SENTENCE),
        "ranks": list(finding.ranks),
        "steps": list(finding.steps),
        "fix": quote(finding.fix if end < 0 else finding.fix[: end + 1], MAX_SENTENCE),
        "consequence_of": finding.consequence_of or None,
    }


def _sentences(written: document.Document) -> list[str]:
    """The first lines of a document, up to its first table, and its notes."""
    parts = [part for section in written.sections for part in section]
    lines = itertools.takewhile(lambda part: isinstance(part, document.Line), parts)
    words = [line.words for line in lines if isinstance(line, document.Line)]
    texts = ["".join(word if isinstance(word, str) else word[0] for word in line) for line in words]
    return [quote(text, MAX_SENTENCE) for text in (*texts, *written.notes)]


def _means(shares: pl.DataFrame, ratios: list[str]) -> Answer:
    means = shares.select(pl.col(ratios).mean()).row(0) if ratios else ()
    return {name.replace(" ", "_"): mean for name, mean in zip(ratios, means, strict=True)}


def _page(table: pl.DataFrame, offset: int, limit: int) -> Answer:
    """Some rows of a table, how many it has, and where to go on."""
    if offset < 0 or not 0 < limit <= 10 * MAX_ROWS:
        raise InputError(f"offset begins at 0, and limit is 1 to {10 * MAX_ROWS}")
    shown = quoting.rows(table.slice(offset, limit))
    end = offset + len(shown)
    return {
        "rows": shown,
        "total_rows": table.height,
        "next_offset": end if end < table.height else None,
    }


QUESTIONS = (
    Answers.list_runs,
    Answers.check,
    Answers.finding,
    Answers.summary,
    Answers.compare,
    Answers.what_if,
    Answers.tables,
    Answers.sql,
    Answers.kernels,
    Answers.hang,
    Answers.memory,
    Answers.explain,
    Answers.plan_checkpoints,
)
