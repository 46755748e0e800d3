"""A baseline: what recordings of one training measured, in kilobytes, to compare later ones with.

On disk it is strict JSON of schema ``tracekit.baseline/1`` (reports/baseline.schema.json), one series a line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import polars as pl

from tracekit.analysis.compute import flops, step_charges
from tracekit.analysis.host.step_parts import fastest_calls
from tracekit.errors import InputError, NotComparableError
from tracekit.model import schema
from tracekit.model.environment import DEVICE, versions
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.regression import numbers
from tracekit.regression.metric_sources import part_places
from tracekit.regression.samples import run_samples, samples
from tracekit.rules.rule import Finding, Report, Severity

WORK_FACTS: tuple[TraceFact, ...] = (flops.products, flops.operator_calls)
COMPARED_FACTS: tuple[TraceFact, ...] = (versions, *WORK_FACTS)
WORK_COLUMNS = {"kind": pl.String, "name": pl.String, "shapes": pl.String, "share": pl.Float64}
FLOPS, CALLS = "flops", "calls"
_KINDS = (
    (
        FLOPS,
        0.5,
        "The work differs: {ratio} of the floating-point operations are in products of the same shapes, so fewer "
        "operations or a shorter step are no improvement by themselves",
    ),
    (
        CALLS,
        0.7,
        "The work differs: {ratio} of the operator calls have the same names, as of another model or after "
        "compilation, so less work or a shorter step are no improvement by themselves",
    ),
)
_LABELS = {DEVICE: "device", "world_size": "world size"}

SCHEMA = "tracekit.baseline/1"
FACTS: tuple[TraceFact, ...] = (
    samples,
    part_places,
    fastest_calls,
    step_charges.unit_samples,
    step_charges.work,
    step_charges.save_work,
    numbers.logged_numbers,
    *WORK_FACTS,
)
"""What a recording is made of: measured in one pass with the rules' facts, it costs next to nothing."""
MAX_RECORDINGS = 10

UNIT_COLUMNS = {"rank": pl.Int64, **step_charges.UNIT_COLUMNS}

_MOST_WORK = 60
_MOST_NUMBERS = 20_000
"""Values of loss, gradient norm and checksums, some 400 kB: those of the lowest ranks, for most ranks log the same."""
_ARGUMENTS = (
    "batch", "batch_size", "micro_batch_size", "global_batch_size", "local_batch_size", "micro_batches",
    "gradient_accumulation_steps", "tokens", "seq_len", "seq_length", "sequence_length", "precision", "dtype",
)  # fmt: skip
_VERSIONS = ("torch", "cuda", "nccl", "hip")
_WHOLE = ("role", "device", "device_name", "world_size", "strategy", "mesh", "model")
_SHOWN_CHARACTERS = 60
_SAVED_RATIO = 1e-4  # reports/baselines keeps five digits

Plain = bool | int | float | str | list[object] | None


@dataclass(frozen=True)
class KnownFinding:
    """A finding of a recording, as far as a later one needs to know it again."""

    id: str
    code: str
    severity: Severity
    impact: float
    cost_ns: int
    cost_bytes: int
    subject: str

    @classmethod
    def of(cls, f: Finding) -> "KnownFinding":
        """Return the stored part of a finding."""
        return cls(f.id, f.code, f.severity, f.impact, f.cost_ns, f.cost_bytes, f.subject)


@dataclass(frozen=True, eq=False)
class Recording:
    """One recording: its samples by rank and step, those of its units, its typical work, and its findings.

    `samples` has the columns SAMPLE_COLUMNS, `units` UNIT_COLUMNS, `work` those of `places.work`, over ranks the mean.
    """

    name: str
    created_ns: int | None
    samples: pl.DataFrame
    units: pl.DataFrame
    work: pl.DataFrame
    findings: tuple[KnownFinding, ...]
    shares: pl.DataFrame = field(default_factory=partial(pl.DataFrame, schema=WORK_COLUMNS))
    """What its steps compute, as `work_shares` has it."""
    numbers: pl.DataFrame = field(default_factory=partial(pl.DataFrame, schema=numbers.NUMBER_COLUMNS))
    """What it logged, as `numbers.run_numbers` has it."""

    @classmethod
    def of(cls, run: Run, report: Report | None = None) -> "Recording":
        """Return a run as a recording, with the findings of its report."""
        findings = tuple(KnownFinding.of(finding) for finding in report.findings) if report else ()
        # Typical work of a rank, the mean over ranks, as much of each kind as has any weight.
        both = pl.concat([run.table(step_charges.work), run.table(step_charges.save_work)])
        place = ["kind", "phase", "name"]
        by_rank = both.group_by("rank", *place).agg(pl.col("amount").mean())
        mean = by_rank.group_by(place).agg(pl.col("amount").sum() / max(1, len(run.ranks)))
        ordered = mean.sort("kind", "amount", *place[1:], descending=[False, True, False, False])
        return cls(
            run.name,
            Manifest.of(run.manifest).created_ns,
            run_samples(run),
            run.table(step_charges.unit_samples).select(*UNIT_COLUMNS),
            ordered.group_by("kind", maintain_order=True).head(_MOST_WORK).select(*step_charges.WORK_COLUMNS),
            findings,
            work_shares(run),
            numbers.run_numbers(run).sort("rank", "step", "order").head(_MOST_NUMBERS),
        )

    def is_same(self, other: "Recording") -> bool:
        """Return whether both are of one training at one time; without times, whether they measured the same."""
        if self.created_ns is None or other.created_ns is None:
            # Whether two tables of samples hold the same, as a saved baseline keeps it; two that are empty do not.
            key = ["metric", "window", "rank", "step"]
            a, b = (table.filter(pl.col("value").is_finite()).sort(key) for table in (self.samples, other.samples))
            if a.is_empty() or not a.select(key).equals(b.select(key)):
                return False
            differs = (a["value"] - b["value"]).abs() > _SAVED_RATIO * a["value"].abs()
            return not differs.any()
        return self.created_ns == other.created_ns


@dataclass(frozen=True, eq=False)
class Baseline:
    """Recordings of one training, and what ran: its fingerprint by dotted name, such as ``model.layers``."""

    name: str
    fingerprint: Mapping[str, Plain]
    recordings: tuple[Recording, ...]
    tool_version: str = ""

    @property
    def known_findings(self) -> dict[str, tuple[KnownFinding, ...]]:
        """Return the findings of all recordings by id, each recording's own where it has it."""
        by_id: dict[str, list[KnownFinding]] = {}
        for recording in self.recordings:
            for finding in recording.findings:
                by_id.setdefault(finding.id, []).append(finding)
        return {name: tuple(findings) for name, findings in by_id.items()}


def of_reports(reports: Sequence[tuple[Report, Run]], *, allow_different: bool = False) -> Baseline:
    """Return the baseline of recordings of one training.

    Raises NotComparableError where they differ in what ran, and InputError where one is named twice: the same recording
    again shows nothing of how much recordings differ.
    """
    first_report, first = reports[0]
    merged = Baseline(first.name, fingerprint(first), (Recording.of(first, first_report),), first_report.tool_version)
    for report, run in reports[1:]:
        differences(merged, run, allow_different=allow_different)
        recording = Recording.of(run, report)
        if any(recording.is_same(other) for other in merged.recordings):
            raise InputError(f"{run.path}: is the same recording as another; record the training again")
        merged = replace(merged, recordings=(*merged.recordings, recording))
    return merged


def fingerprint(run: Run) -> dict[str, Plain]:
    """Return the fields of a run's manifest that must agree for its numbers to be comparable, by dotted name.

    Role, device, world size, strategy, mesh, model; of versions those of torch and of what it computes and sends with;
    of the arguments those that say how much a step computes, and in what precision. What is not known is left out.
    """
    manifest = dict(run.manifest)
    fields: dict[str, object] = {name: manifest.get(name) for name in _WHOLE}
    fields["versions"] = _pick(manifest.get("versions"), _VERSIONS)
    fields["arguments"] = _pick(manifest.get("arguments"), _ARGUMENTS)
    fields["simulated"] = bool(manifest.get("simulated", False))
    return flat(fields)


def differences(baseline: Baseline, run: Run, *, allow_different: bool = False) -> list[str]:
    """Return notes on where a run's fingerprint differs from the baseline's.

    Raises NotComparableError, naming the fields, where one does, unless that is allowed. What one of the two does not
    know is a note only.
    """
    a, b = baseline.fingerprint, fingerprint(run)
    fields = sorted(field for field in a.keys() | b.keys() if a.get(field) != b.get(field))
    notes = {
        field: f"{field} differs: {shown(a, field)} in the baseline {baseline.name}, {shown(b, field)} in {run.name}"
        for field in fields
    }
    refused = [notes[field] for field in fields if field in a and field in b]
    if refused and not allow_different:
        advice = "compare it with a baseline of its own, or pass --allow-different"
        if "world_size" in fields:
            advice += "; tracekit compare with the folders of both runs states throughput and efficiency"
        raise NotComparableError(f"{'; '.join(refused)}; {advice}")
    return list(notes.values())


def flat(value: Mapping[str, object], prefix: str = "") -> dict[str, Plain]:
    """Return nested mappings by dotted name, without what is not known.

    >>> flat({"model": {"layers": 2, "tied": None}})
    {'model.layers': 2}
    """
    fields: dict[str, Plain] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            fields |= flat(item, f"{name}.")
        elif isinstance(item, (list, tuple)):
            fields[name] = list(item)
        elif item is not None:
            fields[name] = item if isinstance(item, (bool, int, float, str)) else str(item)
    return fields


def shown(fields: Mapping[str, Plain], field: str) -> str:
    """Return the value of a field as short text."""
    if field not in fields:
        return "not known"
    text = str(fields[field])
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def environment(run: Run) -> dict[str, str]:
    """Return device, software and size of the job as the headers of most ranks' traces state them, by name.

    The device comes first.
    """
    counts = run.table(versions).group_by("name", "value").len()
    common = counts.sort("len", "value", descending=[True, False]).unique("name", keep="first", maintain_order=True)
    values: dict[str, str] = dict(common.select("name", "value").iter_rows())
    return {name: values[name] for name in sorted(values, key=lambda name: (name not in _LABELS, name))}


def environment_differences(
    reference: Mapping[str, str], candidate: Mapping[str, str], names: tuple[str, str]
) -> list[str]:
    """Return in words where both runs state a device or version and these differ, the device first."""
    shared = [name for name in reference if name in candidate and reference[name] != candidate[name]]
    return [
        f"{_LABELS.get(name, name)} differs: {reference[name]} in {names[0]}, {candidate[name]} in {names[1]}"
        for name in shared
    ]


def work_shares(run: Run) -> pl.DataFrame:
    """Return the work of a run's steps: shares of floating-point operations by product, of calls by operator.

    Columns WORK_COLUMNS; shapes are null for calls. One row per product of the same op and shapes, and per operator, of
    each kind the largest.
    """
    products = run.table(flops.products).group_by("name", "shapes").agg(pl.col("flops").sum().alias("amount"))
    calls = run.table(flops.operator_calls).group_by("name").agg(pl.col("calls").sum().alias("amount"))
    parts = [_largest(products, FLOPS), _largest(calls.with_columns(shapes=pl.lit(None, pl.String)), CALLS)]
    return pl.concat(parts)


def differing_model_fields(reference: Mapping[str, Plain], candidate: Mapping[str, Plain]) -> list[str]:
    """Fields of the model, such as "model.layers", that both of two flat manifests state, and state differently."""
    shared = sorted(reference.keys() & candidate.keys())
    return [name for name in shared if name.partition(".")[0] == "model" and reference[name] != candidate[name]]


def work_difference(reference: pl.DataFrame, candidate: pl.DataFrame) -> str | None:
    """Return in words that the work of two runs differs, by their `work_shares`; None if not, or if it is not known.

    Products of the same op and shapes decide, where both runs recorded shapes: fewer of the same ones, such as without
    recomputation, are the same work, and those of another model or batch size are not. Otherwise operators decide: runs
    of one model have 81% of their calls in common under different strategies, those of different models 14% to 63%.
    """
    for kind, least_ratio, what in _KINDS:
        both = [side.filter(pl.col("kind") == kind) for side in (reference, candidate)]
        if any(side.is_empty() for side in both):
            continue
        shared = both[0].join(both[1], on=["name", "shapes"], nulls_equal=True)
        ratio = float(shared.select(pl.min_horizontal("share", "share_right").sum()).item())
        return None if ratio >= least_ratio else what.format(ratio=f"{ratio:.0%}")
    return None


def _pick(table: object, names: Sequence[str]) -> dict[str, object]:
    return {name: table[name] for name in names if name in table} if isinstance(table, Mapping) else {}


def _largest(sums: pl.DataFrame, kind: str) -> pl.DataFrame:
    some = sums.filter(pl.col("amount") > 0).with_columns((pl.col("amount") / pl.col("amount").sum()).alias("share"))
    ordered = some.sort("share", "name", "shapes", descending=[True, False, False]).head(_MOST_WORK)
    return schema.select(ordered.with_columns(pl.lit(kind).alias("kind")), WORK_COLUMNS)
