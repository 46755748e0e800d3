"""The verdict on two runs in one sentence, the same everywhere: what changed, by how much, because of what."""

from tracekit.analysis.host import step_parts
from tracekit.model import escaping, units
from tracekit.regression import contributions
from tracekit.regression.comparison import Comparison
from tracekit.regression.contributions import Contribution
from tracekit.regression.metrics import COMMUNICATION_TIME
from tracekit.regression.thresholds import Change, Verdict
from tracekit.report.document import Cells, Emphasis

CANNOT_TELL = "cannot tell"
VERDICTS = {verdict: verdict.value for verdict in Verdict} | {Verdict.INCONCLUSIVE: CANNOT_TELL}
EMPHASES = {
    Verdict.BETTER: Emphasis.BETTER,
    Verdict.WORSE: Emphasis.WORSE,
    Verdict.SAME: Emphasis.FAINT,
    Verdict.INCONCLUSIVE: Emphasis.DOUBTFUL,
}
_MAX_NAME, _MAX_OPERATOR, _MAX_CELL = 60, 50, 28
_TIMES_FROM = 1.5
"""From this factor on, a run is "2.0 times slower"; below it "12% slower"."""
_MIN_FACTOR = 1e-3
_MAX_REASONS = 2
_MIN_SHARE_OF_FIRST = 0.25
"""A further reason is named where it contributes at least this share of the first one."""
_MOST_RATIO = 0.6
"""An operator stands for its kind where it contributes at least this share of it."""
_MIN_SHOWN_RATIO = 0.001
"""Contributions of less of the step are summed up in one row."""
_MIN_KNOWN_RATIO = 0.01
_VAGUE_RATIO = 0.5
_LONGER_RATIO = 0.5
"""Exposed communication grew by itself where all communication grew by this share of it."""


def headline(compared: Comparison) -> str:
    """Return the verdict on the step time in one sentence, with the reasons; '' where no step time is compared."""
    step = compared.step
    if step is None:
        return ""
    sentence = _step_sentence(compared, step)
    if compared.is_same_work:
        return sentence
    end = "." if step.verdict is Verdict.INCONCLUSIVE else ":"
    return f"The runs do different work{end} {sentence}"


def colour_verdict(compared: Comparison, verdict: Verdict) -> Verdict:
    """Verdict whose colour this one is shown in: that other work takes less, or as much, is no good sign."""
    is_doubtful = not compared.is_same_work and verdict in (Verdict.BETTER, Verdict.SAME)
    return Verdict.INCONCLUSIVE if is_doubtful else verdict


def _step_sentence(compared: Comparison, step: Change) -> str:
    a, b = (escaping.inert(name, _MAX_NAME) for name in (compared.reference, compared.candidate))
    times = f"{_times(step.reference, step.candidate)} a step"
    if step.verdict is Verdict.SAME:
        return f"{b} is as fast as {a} ({times}, {_bounds(step)})"
    if step.verdict is Verdict.INCONCLUSIVE:
        return f"It cannot be told whether {b} is slower or faster than {a} ({times}): {_known(compared, step)}"
    because = _because(compared, step)
    if compared.fastest_ns is not None:
        calls, measured = _times(*compared.fastest_ns), _times(step.reference, step.candidate)
        worse = "slower" if step.is_slower else "faster"
        sentence = f"{b} is {worse} without other programs, by {_bounds(step)} ({calls} a step; {measured} with them)"
        return f"{sentence}: {because}" if because else sentence
    if compared.is_mostly_explained:
        worse = "slower" if step.is_slower else "faster"
        explained = f"{b} is {worse}, by {_bounds(step)} ({times}, most of which other programs can explain)"
        return f"{explained}: {because}" if because else explained
    # A doubt says it on a line of its own.
    certainty = "" if doubt(compared) or (because and not _is_vague(step)) else f", {_bounds(step)}"
    return f"{b} is {_factor(step)} ({times}{certainty}){f': {because}' if because else ''}"


def advice(compared: Comparison) -> str:
    """Return the one thing to do where the step time cannot be told; '' where it can."""
    step = compared.step
    if step is None or step.verdict is not Verdict.INCONCLUSIVE:
        return ""
    if step.low is None:
        return f"record {units.count(step.more_samples, 'more step')} of each run"
    if compared.disturbance.is_disturbed:
        return "record both runs again while no other program uses the processors, or three times each"
    if step.more_recordings:
        return f"record each run {step.more_recordings:,} more {'time' if step.more_recordings == 1 else 'times'}"
    return f"record about {units.count(step.more_samples, 'more step')} of each run"


def doubt(compared: Comparison) -> str:
    """Return how much of the change other programs on the processors can explain; '' where they explain nothing."""
    step = compared.step
    if step is None or not compared.disturbance.is_disturbed:
        return ""
    if compared.fastest_ns is not None:
        names = (compared.reference, compared.candidate)
        shares = [
            f"{units.duration(explained_ns)} of the {units.duration(step_ns)} of {escaping.inert(name, _MAX_NAME)}"
            for explained_ns, step_ns, name in zip(
                compared.explained_ns, (step.reference, step.candidate), names, strict=True
            )
        ]
        return f"other programs, and waits for ranks, can explain {' and '.join(shares)}: the verdict concerns the rest"
    is_slower = step.is_slower
    ratio = compared.disturbance.candidate_ratio if is_slower else compared.disturbance.reference_ratio
    if not ratio:
        return ""
    side = escaping.inert(compared.candidate if is_slower else compared.reference, _MAX_NAME)
    explained_ns = compared.explained_ns[1 if is_slower else 0]
    rest = f": {_bounds(step)} is something else" if step.verdict in (Verdict.WORSE, Verdict.BETTER) else ""
    return (
        f"other programs took up to {units.share(ratio)} of the time in which {side} computes, and can explain "
        f"{units.duration(explained_ns)} of its step, waiting for ranks and communication included{rest}"
    )


def contribution_cells(compared: Comparison) -> Cells:
    """A row per contribution to the change of the step, the largest first: they add up to it."""
    step = compared.step
    assert step is not None
    *named, rest = compared.contributions
    min_ns = _MIN_SHOWN_RATIO * max(compared.fastest_ns or (step.reference, step.candidate))
    shown = [part for part in named if abs(part.change_ns) >= min_ns]
    small_ns = rest.change_ns + sum(part.change_ns for part in named if part not in shown)
    rows = [_row(part) for part in shown]
    if round(small_ns) or not rows:
        rows.append((rest.label, signed_duration(small_ns), "", "", "", ""))
    total = step_total(step)
    rows.append(("together", signed_duration(total), "", VERDICTS[step.verdict], "", ""))
    emphases = [EMPHASES[colour_verdict(compared, part.verdict)] for part in shown]
    emphases += [Emphasis.FAINT] * (len(rows) - len(shown) - 1) + [EMPHASES[colour_verdict(compared, step.verdict)]]
    header = ("", "change", f"{compared.confidence:.0%} interval", "verdict", "most of it", "")
    return Cells(header, tuple(rows), (1, 2, 5), tuple(emphases), early_drop=(2, 5, 4), cuts_first=False, emphasized=3)


def step_total(step: Change) -> int:
    """Return the change of the step in whole ns, to which the contributions add up."""
    return round(step.candidate) - round(step.reference)


def signed_duration(change_ns: float) -> str:
    """Return a change of time with its sign.

    >>> signed_duration(-24_000_000)
    '-24 ms'
    """
    rounded = round(change_ns)
    return f"{'+' if rounded >= 0 else '-'}{units.duration(abs(rounded))}"


def reason(part: Contribution, *, with_steps: bool) -> str:
    """Return a contribution in words: "waiting for data +141 ms at data.py:20 in all 5 steps"."""
    main = _main_part(part)
    place = escaping.inert(main.place, _MAX_NAME)
    if part.kind == step_parts.WAIT:
        waiting = f"waiting for {place}" if place else part.label
        text = f"{waiting} {signed_duration(part.change_ns)}"
    else:
        text = f"{_label(main)} {signed_duration(main.change_ns)}{f' at {place}' if place else ''}"
    text += f" on rank {part.rank}" if part.rank is not None else ""
    if main is part and part.parts and part.parts[0].name and len(part.parts) > 1:
        text += (
            f", {escaping.inert(part.parts[0].name, _MAX_OPERATOR)} {signed_duration(part.parts[0].change_ns)} of it"
        )
    if with_steps and part.all_steps > 1 and part.step_count:
        count = (
            f"all {part.all_steps}" if part.step_count == part.all_steps else f"{part.step_count} of {part.all_steps}"
        )
        text += f" in {count} steps"
    return text


def reasons(compared: Comparison) -> list[Contribution]:
    """Return the contributions that make the change: the certain ones in its direction first, at most two."""
    step = compared.step
    if step is None:
        return []
    sign = 1 if step.is_slower else -1
    towards = [p for p in compared.contributions if not p.is_rest and sign * p.change_ns > 0]
    towards.sort(key=lambda part: -sign * part.change_ns)
    certain = [part for part in towards if part.has_certain_part]
    if certain and compared.disturbance.is_disturbed:
        # Other programs can explain the others, but nothing of the fastest calls.
        least_ns = 0.0 if compared.fastest_ns is None else _MIN_SHARE_OF_FIRST * abs(certain[0].change_ns)
        return [part for part in certain if abs(part.change_ns) >= least_ns][:_MAX_REASONS]
    largest = [p for p in towards if sign * p.change_ns >= _MIN_SHARE_OF_FIRST * sign * towards[0].change_ns]
    ranked = sorted(largest, key=lambda part: (_is_consequence(part, compared), not part.has_certain_part))
    return ranked[:_MAX_REASONS]


def _is_consequence(part: Contribution, compared: Comparison) -> bool:
    """Return whether communication is more exposed, or less, although it does not take longer: what hid it changed.

    Compute and launches that change hide or expose no more of it than they change by.
    """
    if part.kind != step_parts.COMMUNICATION:
        return False
    others = [p for p in compared.contributions if p.kind not in (step_parts.COMMUNICATION, step_parts.WAIT)]
    if sum(abs(p.change_ns) for p in others if not p.is_rest) < abs(part.change_ns):
        return False
    of_all = [c.difference for c in compared.changes if c.metric == COMMUNICATION_TIME]
    sign = 1 if part.change_ns >= 0 else -1
    return bool(of_all) and sign * of_all[0] < _LONGER_RATIO * sign * part.change_ns


def _times(before_ns: float, after_ns: float) -> str:
    before, after = units.duration(before_ns), units.duration(after_ns)
    number, _, unit = before.partition(" ")
    return f"{number if after.endswith(f' {unit}') else before} → {after}"


def _because(compared: Comparison, step: Change) -> str:
    named = reasons(compared)
    if not named:
        return ""
    parts = [reason(part, with_steps=number == 0) for number, part in enumerate(named)]
    fastest_ns = compared.fastest_ns
    total_ns = step_total(step) if fastest_ns is None else fastest_ns[1] - fastest_ns[0]
    rest_ns = total_ns - sum(_main_part(part).change_ns for part in named)
    if abs(rest_ns) >= _MIN_SHOWN_RATIO * max(step.reference, step.candidate):
        parts.append(f"the rest {signed_duration(rest_ns)}")
    return "; ".join([", ".join(parts[: len(named)]), *parts[len(named) :]])


def _main_part(part: Contribution) -> Contribution:
    """Return the operator that most of a contribution is, or the contribution itself."""
    first = part.parts[0] if part.parts else part
    is_most = first.name and abs(first.change_ns) >= _MOST_RATIO * abs(part.change_ns) and len(part.parts) > 1
    is_only = first.name and len(part.parts) == 1
    if part.kind != step_parts.WAIT and (is_most or is_only) and first.change_ns * part.change_ns > 0:
        return first
    return part


def _known(compared: Comparison, step: Change) -> str:
    """Return what is certain although the verdict is not."""
    certain = [
        operator
        for part in compared.contributions
        if not part.is_rest
        for operator in ([part] if part.is_certain else [p for p in part.parts if p.is_certain])
    ]
    certain.sort(key=lambda part: -abs(part.certain_ns))
    if certain and abs(certain[0].certain_ns) >= _MIN_KNOWN_RATIO * step.reference:
        first = certain[0]
        more = "more" if first.certain_ns > 0 else "less"
        return f"there is at least {units.duration(abs(first.certain_ns))} {more} of {_label(first)}"
    if compared.fastest_ns is not None and compared.fastest_ns[0] > 0:
        low, high = (
            sum(bounds) / compared.fastest_ns[0]
            for bounds in zip(*((part.low_ns or 0, part.high_ns or 0) for part in compared.contributions), strict=True)
        )
        return f"without other programs {escaping.inert(compared.candidate, _MAX_NAME)} is {_speed_range(low, high)}"
    if step.low is None or step.high is None:
        return f"with {step.reference_samples} and {step.candidate_samples} steps no interval is known"
    return f"{escaping.inert(compared.candidate, _MAX_NAME)} is {_speed_range(step.low, step.high)}"


def _row(part: Contribution) -> tuple[str, ...]:
    interval = "—" if part.low_ns is None or part.high_ns is None else _interval(part.low_ns, part.high_ns)
    operator = next((piece for piece in part.parts if piece.name and piece.change_ns * part.change_ns > 0), None)
    main = escaping.inert(operator.name, _MAX_CELL) if operator else ""
    main_change = signed_duration(operator.change_ns) if operator else ""
    preposition = "for" if part.kind == step_parts.WAIT else "at"
    place = f"{preposition} {escaping.inert(part.place, _MAX_NAME)}" if part.place else ""
    return part.label, signed_duration(part.change_ns), interval, VERDICTS[part.verdict], main or place, main_change


def _interval(low_ns: int, high_ns: int) -> str:
    return f"{signed_duration(low_ns)} to {signed_duration(high_ns)}"


def _label(part: Contribution) -> str:
    return contributions.noun(part.kind, escaping.inert(part.name, _MAX_OPERATOR))


def _factor(step: Change) -> str:
    ratio = step.difference / step.reference if step.reference else 1.0
    return f"{_speed(ratio)} {'slower' if step.is_slower else 'faster'}"


def _is_vague(step: Change) -> bool:
    """Return whether much less of a change is certain than it seems to be."""
    if step.low is None or step.high is None or step.change is None:
        return False
    return min(abs(step.low), abs(step.high)) < _VAGUE_RATIO * abs(step.change)


def _bounds(step: Change) -> str:
    """Return what is certain of a change: "at least 25%", "certain within 5%"."""
    if step.low is None or step.high is None:
        return "without an interval"
    if step.verdict is Verdict.SAME:
        return f"certain within {100 * step.same_within:.3g}%"
    return f"at least {_speed(step.low if step.low > 0 else step.high)}"


def _speed_range(low: float, high: float) -> str:
    """Return what is known of a change that is not decided: "between 1.4% faster and 12% slower"."""
    return f"between {_speed(low)} {_comparative(low)} and {_speed(high)} {_comparative(high)}"


def _comparative(ratio: float) -> str:
    return "slower" if ratio > 0 else "faster"


def _speed(ratio: float) -> str:
    """Return how much slower or faster a step is whose time changed by this ratio: "12%", "2.0 times"."""
    factor = max(1 + ratio, _MIN_FACTOR)
    if max(factor, 1 / factor) >= _TIMES_FROM:
        return f"{max(factor, 1 / factor):,.1f} times"
    return f"{100 * abs(ratio):.0f}%" if abs(ratio) >= 0.1 else f"{100 * abs(ratio):.1f}%"
