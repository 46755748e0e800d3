"""Run the rules on a run and rank their findings."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tracekit.conventions import VERSION
from tracekit.errors import RuleError
from tracekit.model.run import OnTrace, Run, require_run
from tracekit.model.source import Source
from tracekit.model.trace import TraceFact
from tracekit.replay.graph import dependency_graph, representative_ranks
from tracekit.rules import cost_attribution, found_iterations, judgeability
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import Finding, Input, Report, Rule, sort_findings

_MANY_TRACES = 32
"""Of more traces, some are no longer in memory after the first pass, nor is what their facts have in common."""


def check(
    run: Run,
    rules: Iterable[Rule] | None = None,
    *,
    facts: Iterable[TraceFact] = (),
    on_progress: OnTrace | None = None,
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
    run.measure(
        [*(fact for rule in selected for fact in rule.facts), *judgeability.FACTS, *facts, *replayed], on_progress
    )
    findings: list[Finding] = []
    unrecorded = judgeability.blind_spots(run, selected)
    blind_spots = dict(unrecorded)
    for rule in selected:
        if rule.code in unrecorded:
            continue
        try:
            blind, rule_findings = _judge(rule, run)
        except RuleError as error:
            if on_crash is None:
                raise
            on_crash(rule.code, error)
            blind, rule_findings = f"the rule crashed, which is a bug of the rule: {error.__cause__!r}", ()
        findings += rule_findings
        blind_spots |= {rule.code: blind} if blind else {}
    files = {source.path: source for source in run.sources}  # a file may have the traces of several ranks
    inputs = tuple(_input(source) for source in files.values())
    notes = tuple(f"{codes}: {blind}" for blind, codes in _by_reason(blind_spots).items())
    report = Report(run, sort_findings(judgeability.limit_findings(run, findings)), notes, inputs, VERSION)
    report = replace(report, rules=tuple(rule.code for rule in selected), blind_spots=blind_spots)
    return found_iterations.name_iterations(cost_attribution.attribute_costs(report))


def _judge(rule: Rule, run: Run) -> tuple[str, Sequence[Finding]]:
    """Return why a rule cannot judge all of a run, or '', and its findings."""
    try:
        return rule.blind_spot(run) or "", tuple(rule.check(run))
    except Exception as error:
        raise RuleError(f"{rule.code} crashed on {run.path}: {type(error).__name__}: {error}") from error


def _by_reason(blind_spots: Mapping[str, str]) -> dict[str, str]:
    """Return the codes of the rules that each reason stops from judging, as text."""
    codes: dict[str, list[str]] = {}
    for code, blind in blind_spots.items():
        codes.setdefault(blind, []).append(code)
    return {blind: ", ".join(rule_codes) for blind, rule_codes in codes.items()}


def _input(source: Source) -> Input:
    if source.origin is not None:
        return Input(source.path, source.size_bytes, source.origin.sha256())
    file = Path(source.path)
    if not file.is_file():
        return Input(source.path, 0, "")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Input(source.path, file.stat().st_size, digest)
