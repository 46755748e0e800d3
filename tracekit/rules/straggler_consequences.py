"""Stragglers and the rest of a report: findings that their price contains, and stragglers behind other ones."""

from collections.abc import Sequence
from dataclasses import replace

from tracekit.analysis.parallelism import late_ranks
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph.causes.cause import Pricing
from tracekit.replay.graph.causes.stalls import SINGLE_STALL, Removal
from tracekit.rules import outlier_steps
from tracekit.rules.mean_saving import MeanStep, mean_saving
from tracekit.rules.rule import Finding, Severity, family, warnings

_STRAGGLERS = ("RANK001", "RANK004")
UNEVEN = "RANK003"
_MIN_OWN_RATIO = 0.5
"""Share of a saving that must remain without a straggler for a fault of its own, as in `cost_attribution`."""


def within_stragglers(run: Run, replayed: Run, finding: Finding, findings: Sequence[Finding]) -> Finding:
    """A finding on time of a straggler alone, as information if the price of the straggler contains most of that time.

    That is so for its smaller single stalls, since a rank that pauses in every step for a varying time pauses longest
    in some; and for time of its host that no replay prices, such as copies, if the straggler is late by about as much.
    """
    if finding.severity <= Severity.INFO or not finding.ranks:
        return finding
    late = (warning for warning in warnings(findings) if warning.code in _STRAGGLERS and warning.is_priced)
    straggler = next((warning for warning in late if set(finding.ranks) <= set(warning.ranks)), None)
    if straggler is None:
        return finding
    ratio = 1.0
    if finding.what_if is not None and finding.what_if.cause is SINGLE_STALL and finding.is_priced:
        if finding.cost_ns <= _MIN_OWN_RATIO * straggler.cost_ns:
            ratio = _remaining_ratio(run, replayed, finding, straggler)
    elif finding.what_if is None and family(finding.code) == "HOST":
        shorter_ns, longer_ns = sorted((finding.cost_ns, straggler.measured_ns))
        ratio = 0.0 if shorter_ns >= _MIN_OWN_RATIO * longer_ns else 1.0
    if ratio >= _MIN_OWN_RATIO:
        return finding
    message = f"{finding.message} {units.share(1 - ratio)} of that ends with {straggler.code}."
    return replace(finding, severity=Severity.INFO, consequence_of=straggler.id, message=message)


def with_pauses_of_each_step(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """A finding on the latest rank as a warning, if its single stall is as long as its pauses in the other steps.

    At the start of a recording little work is queued, so a pause delays the device that queued work hides later. A
    replay without the time that is unusual for the rank then saves little, without the rank all.
    """
    is_doubtful = finding.code == UNEVEN and finding.severity is Severity.INFO and finding.is_priced
    if not is_doubtful or finding.consequence_of or not finding.ranks:
        return finding
    stalls = (other for other in findings if other.what_if is not None and other.what_if.cause is SINGLE_STALL)
    least_ns, most_ns = _MIN_OWN_RATIO * finding.cost_ns, (1 - _MIN_OWN_RATIO) * finding.cost_ns
    is_usual = any(
        stall.ranks == finding.ranks and stall.is_priced and stall.measured_ns >= least_ns and stall.cost_ns < most_ns
        for stall in stalls
    )
    if not is_usual:
        return finding
    message = f"{finding.message} Its host pauses as long in the other steps, where queued work hides that."
    return replace(finding, severity=Severity.WARNING, message=message)


def of_one_cause(run: Run, findings: Sequence[Finding]) -> list[Finding]:
    """Findings of a run that no replay prices, those as information whose time another one on the same ranks states.

    A rank is late because of what its host spends longer on, and its late launches are its lateness: without a replay,
    measured times of at least half of each other show that.
    """
    judged: list[Finding] = []
    for finding in sorted(findings, key=pricing_of):
        cause = next((earlier for earlier in warnings(judged) if _states_time_of(run, earlier, finding)), None)
        if cause is not None and finding.severity > Severity.INFO:
            message = f"{finding.message} Most of that is the time of {cause.code}, too."
            finding = replace(finding, severity=Severity.INFO, consequence_of=cause.id, message=message)
        judged.append(finding)
    return judged


def pricing_of(finding: Finding) -> Pricing:
    """Place of a finding in the order of pricing; findings without a cause for a replay are independent."""
    return finding.what_if.cause.pricing if finding.what_if else Pricing.INDEPENDENT


def _states_time_of(run: Run, earlier: Finding, finding: Finding) -> bool:
    """Whether an earlier finding in the order of pricing is on the same ranks and, as far as is measured, time."""
    pricing = pricing_of(finding)
    if earlier.what_if is None or pricing_of(earlier) in (Pricing.INDEPENDENT, pricing) or pricing < Pricing.LATE_RANKS:
        return False
    shorter_ns, longer_ns = sorted((finding.cost_ns, earlier.cost_ns))
    if not finding.ranks or set(finding.ranks) != set(earlier.ranks) or shorter_ns < _MIN_OWN_RATIO * longer_ns:
        return False
    if pricing is Pricing.CONSEQUENCE:
        return True
    return earlier.what_if.cause.idle_part in late_ranks.extra_time(run, finding.ranks).head(1)["part"].to_list()


def hidden_behind(run: Run, removal: Removal, late: Sequence[Removal], saved: MeanStep) -> tuple[int, ...]:
    """The ranks that are later than those of a removal, if less than half of what it saves after them is saved alone.

    `saved` is what it saves after the removals of these ranks.
    """
    if not late or removal.cause.pricing is not Pricing.LATE_RANKS:
        return ()
    alone = mean_saving(run, removal)
    if alone is None or alone.saved_ns >= _MIN_OWN_RATIO * saved.saved_ns:
        return ()
    return tuple(sorted({rank for earlier in late for rank in earlier.ranks}))


def once_not_late(ranks: tuple[int, ...]) -> str:
    """Clause on ranks behind whose lateness another one is hidden; "" without any."""
    return f" once {units.numbers('rank', ranks)} {'are' if len(ranks) > 1 else 'is'} no longer late" if ranks else ""


def _remaining_ratio(run: Run, replayed: Run, finding: Finding, straggler: Finding) -> float:
    """Share of the saving of single stalls that remains once nobody waits for a straggler; 1 where it is not known."""
    removal = outlier_steps.removal(run, finding)
    rest = mean_saving(replayed, removal, (Removal(straggler.removals[-1].cause, straggler.ranks),))
    return 1.0 if rest is None else max(rest.saved_ns, 0) / max(finding.cost_ns, 1)
