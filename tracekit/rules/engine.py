"""Run the rules on a run, as far as the recording lets them judge, and rank their findings."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from tracekit.analysis.parallelism import workload
from tracekit.analysis.quality import contents, trace_quality
from tracekit.analysis.time import breakdown
from tracekit.conventions import VERSION, regular_files
from tracekit.errors import RuleError
from tracekit.model import schema
from tracekit.model.run import OnTrace, Run, require_run
from tracekit.model.source import Source
from tracekit.model.trace import TraceFact
from tracekit.replay.graph import dependency_graph, representative_ranks
from tracekit.replay.graph.causes.cause import Pricing
from tracekit.rules import (
    advice,
    cost_attribution,
    device_commands,
    roles,
    straggler_consequences,
    unreported_causes,
)
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import (
    TIMED_FAMILIES,
    Finding,
    Input,
    Report,
    Rule,
    Severity,
    distinct,
    family,
    name_iterations,
    sort_findings,
    warnings,
)

_MANY_TRACES = 32
"""Of more traces, some are no longer in memory after the first pass, nor is what their facts have in common."""
_WITHOUT_DEVICE = "no device activity was recorded, so times are of the host and were not judged (see DATA001)."
_WITHOUT_DEVICE_TIMES = (
    "the device's activities have no usable times, so times are of the host and were not judged (see DATA001)."
)
_WITHOUT_HOST = "CPU activity was not recorded, so the host was not judged (see DATA001)."
_WITHOUT_LAUNCH_CALLS = "no launch calls were recorded, so the host was not judged (see DATA001)."
_WITHOUT_WORK = "no work was recorded, so nothing was judged (see DATA001)."
_WITHOUT_OPERATORS = "no operator was recorded, so compute is not known and was not judged (see DATA001)."
_WITHOUT_LAUNCHES = "the device runs whole programs, so launches by the host were not judged (see DATA001)."
_WITHOUT_COMPUTE = "the log has collectives only, so compute, memory and the host were not judged (see DATA001)."
_WITHOUT_SPANS = (
    "the log has spans of the training loop only, so operators and the device were not judged (see DATA001)."
)
_ON_OPERATORS = (
    *(name for name in TIMED_FAMILIES if name != "HOST"), "MEM",
    "HOST001", "HOST002", "HOST004", "HOST005", "HOST006", "HOST007", "HOST008",
)  # fmt: skip
"""All that needs operators or device work: HOST003 compares the wait for data with the step."""
_TIMED_IN_ONE_RANK = tuple(name for name in TIMED_FAMILIES if name != "RANK")
_REASONS = (
    ("no_work", TIMED_FAMILIES, _WITHOUT_WORK),
    ("no_device_activity", TIMED_FAMILIES, _WITHOUT_DEVICE),
    ("device_times", TIMED_FAMILIES, _WITHOUT_DEVICE_TIMES),
    ("no_host_activity", ("HOST",), _WITHOUT_HOST),
    ("no_launch_calls", ("HOST",), _WITHOUT_LAUNCH_CALLS),
    ("no_operators", _TIMED_IN_ONE_RANK, _WITHOUT_OPERATORS),
    (schema.COMPILED_PROGRAM, ("HOST",), _WITHOUT_LAUNCHES),
    (schema.SPANS_ONLY, _ON_OPERATORS, _WITHOUT_SPANS),
    (schema.COLLECTIVES_ONLY, (*_TIMED_IN_ONE_RANK, "MEM"), _WITHOUT_COMPUTE),
)
"""Issue of a trace, and the rules or families of rules that cannot judge a run all of whose traces have it."""

_LOST = (
    ("truncated", "The file is truncated, so idle time may be work that was lost."),
    ("sampled", "Most ops are missing, so idle time may be work that was not recorded."),
)
"""Issue of a trace in which idle time is no evidence, and what to say of findings that rest on it."""
_CUT = "Only a part of the step was recorded, so its share of a whole step is not known."
_IDLE_FAMILIES = (*TIMED_FAMILIES, "STEP", "ROLE")
_IDLE_CODES = ("MEM001", "MEM002")
_UNCERTAIN = 0.3

FACTS: tuple[TraceFact, ...] = (
    trace_quality.data_quality, trace_quality.cut_steps, contents.contents, breakdown.by_step, workload.marks,
)  # fmt: skip
OnRule = Callable[[int, int, Sequence[Finding]], None]
"""Receives how many rules have judged, how many will, and the findings of the last one, before they are priced."""


def check(
    run: Run,
    rules: Iterable[Rule] | None = None,
    *,
    facts: Iterable[TraceFact] = (),
    on_progress: OnTrace | None = None,
    on_rule: OnRule | None = None,
    on_crash: Callable[[str, RuleError], None] | None = None,
) -> Report:
    """Judge a run by rules.

    All rules share one pass over the traces. The cost of findings comes from a replay of the steps without their
    cause, where possible. That takes a second pass, only if there is such a finding, and over representative ranks if
    there are more than 128. If there are more than 32 traces, the first pass also measures what replays need.

    Args:
        run: The run, from `load`.
        rules: The rules, with their thresholds; by default all rules with their default thresholds.
        facts: Facts that are needed later, to be measured in the same pass.
        on_progress: Called after each trace.
        on_rule: Called after each rule.
        on_crash: Called with the rule's code and the error if a rule crashes. The report then names the rule among
            those that could not judge.

    Returns:
        The report: findings by severity and impact, notes, and the input files.

    Raises:
        RuleError: A rule crashed, and there is no `on_crash`.
        TypeError: `run` is not a run (such as a path, which `load` reads), or `rules` are not instances of rules.
    """
    require_run(run)
    selected = tuple(rule() for rule in all_rules()) if rules is None else tuple(rules)
    for rule in selected:
        if isinstance(rule, type) or not isinstance(rule, Rule):
            raise TypeError(
                f"rules must be instances of Rule, as [rule() for rule in tracekit.RULES], not {rule!r:.80}"
            )
    are_many = len(run.sources) > _MANY_TRACES
    of_replays = representative_ranks.FACTS if representative_ranks.are_needed(run) else dependency_graph.FACTS
    replayed = of_replays if are_many else ()
    run.measure([*(fact for rule in selected for fact in rule.facts), *FACTS, *facts, *replayed], on_progress)
    findings: list[Finding] = []
    unrecorded = _blind_reasons(run, selected)
    blind_spots = dict(unrecorded)
    judging = [rule for rule in selected if rule.code not in unrecorded]
    for number, rule in enumerate(judging, start=1):
        try:
            blind, rule_findings = _judge(rule, run)
        except RuleError as error:
            if on_crash is None:
                raise
            on_crash(rule.code, error)
            blind, rule_findings = f"the rule crashed, which is a bug of the rule: {error.__cause__!r}", ()
        findings += rule_findings
        if on_rule is not None:
            on_rule(number, len(judging), rule_findings)
        blind_spots |= {rule.code: blind} if blind else {}
    files = {source.path: source for source in run.sources}  # a file may have the traces of several ranks
    inputs = tuple(_input(source) for source in files.values())
    codes: dict[str, list[str]] = {}
    for code, blind in blind_spots.items():
        codes.setdefault(blind, []).append(code)
    notes = tuple(f"{', '.join(blind_codes)}: {blind}" for blind, blind_codes in codes.items())
    report = Report(run, sort_findings(limit_findings(run, findings)), notes, inputs, VERSION)
    report = replace(report, rules=tuple(rule.code for rule in selected), blind_spots=blind_spots)
    graded = _graded(report)
    unreported = tuple(limit_findings(run, unreported_causes.findings(graded, selected)))
    spread_warnings = warnings(unreported)
    spread_sources = [
        finding for finding in spread_warnings if straggler_consequences.pricing_of(finding) is Pricing.SOURCE
    ]
    if spread_sources:  # launches that are late for these are priced without them
        graded = _graded(replace(report, findings=sort_findings([*report.findings, *spread_sources])))
        unreported = tuple(limit_findings(run, unreported_causes.findings(graded, selected)))
    graded = replace(graded, findings=sort_findings([*graded.findings, *unreported]))
    wholes = {rule.code: rule.part_of for rule in selected if rule.part_of}
    parts = _parts(graded.findings, wholes)
    complete = replace(graded, findings=tuple(roles.with_consequences(run, parts)))
    return device_commands.name_commands(advice.suit_to_program(name_iterations(complete), selected))


def _graded(report: Report) -> Report:
    """The report with the costs of findings by replay, and severities that follow from them."""
    priced = cost_attribution.over_mean_step(cost_attribution.attribute_costs(report))
    return cost_attribution.grade_by_cost(priced)


def _parts(findings: Sequence[Finding], wholes: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings; a part is a consequence of a finding on its whole that is no less severe."""
    for finding in findings:
        alike = (other for other in findings if other.code == wholes.get(finding.code))
        whole = next((other.id for other in alike if other.severity >= finding.severity), "")
        yield replace(finding, consequence_of=whole) if whole and not finding.consequence_of else finding


def _blind_reasons(run: Run, rules: Iterable[Rule]) -> dict[str, str]:
    """Why rules cannot judge a run whose traces all lack something, by code; rules that can are left out."""
    issues = run.table(trace_quality.data_quality)
    reasons = []
    for kind, names, reason in _REASONS:
        affected = issues.filter(pl.col("kind") == kind).select("window", "rank").unique().height
        if run.sources and affected == len(run.sources):
            reasons.append((names, reason))
    return {
        rule.code: reason for rule in rules for names, reason in reasons if {rule.code, family(rule.code)} & {*names}
    }


def limit_findings(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; those on time that rest on lost events, or on cut steps alone, as information that says so.

    A finding on some ranks rests on lost events if one of these ranks has lost some, others if any rank has.
    """
    issues = run.table(trace_quality.data_quality)
    lost: dict[int, str] = {}
    for kind, reason in _LOST:
        lost |= dict.fromkeys(distinct(issues.filter(pl.col("kind") == kind), "rank"), reason)
    cut = set(run.table(trace_quality.cut_steps).select("rank", "step").iter_rows())
    uncut = set(run.table(breakdown.by_step).select("rank", "step").iter_rows()) - cut
    for finding in findings:
        is_on_time = family(finding.code) in _IDLE_FAMILIES or finding.code in _IDLE_CODES
        if finding.severity == Severity.INFO or not is_on_time:
            yield finding
            continue
        ranks = lost if family(finding.code) == "RANK" or not finding.ranks else finding.ranks  # RANK rules compare all
        cause = next((lost[rank] for rank in ranks if rank in lost), None)
        of_steps = {(rank, step) for rank in finding.ranks or run.ranks for step in finding.steps or (None,)}
        if cause is None and of_steps & cut and not of_steps & uncut:
            cause = _CUT
        if cause is not None:
            message, confidence = f"{finding.message} {cause}", min(finding.confidence, _UNCERTAIN)
            finding = replace(finding, severity=Severity.INFO, confidence=confidence, message=message, what_if=None)
        yield finding


def _judge(rule: Rule, run: Run) -> tuple[str, Sequence[Finding]]:
    """Why a rule cannot judge all of a run, or '', and its findings."""
    try:
        return rule.blind_spot(run) or "", tuple(rule.check(run))
    except Exception as error:
        raise RuleError(f"{rule.code} crashed on {run.path}: {type(error).__name__}: {error}") from error


def _input(source: Source) -> Input:
    if source.origin is not None:
        return Input(source.path, source.size_bytes, source.origin.sha256())
    file = Path(source.path)
    if not file.is_file():
        return Input(source.path, 0, "")
    with regular_files.open_to_read(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Input(source.path, file.stat().st_size, digest)
