"""The dumps of a job -> whether it hangs, in which collective, and which ranks are the cause."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tracekit.analysis.hangs import causes, collectives
from tracekit.analysis.hangs.causes import ADVICE, Culprit, Kind
from tracekit.analysis.hangs.collectives import CallTable, Groups, Mismatch, sizes
from tracekit.analysis.hangs.waits import (
    Root,
    Wait,
    WaitGraph,
    creates_communicator,
    describe_groups,
    graph,
    is_blocked,
    with_inferred_calls,
)
from tracekit.model import units
from tracekit.model.hang_dump import Call, CallState, HangDumps, RankDump

DEFAULT_MIN_WAIT_NS = 10 * 10**9
"""A training that runs may have shorter waits when its dumps are written."""
_MAX_PAIRS = 2000


@dataclass(frozen=True)
class RankState:
    """What one rank does: one row of the table of ranks."""

    rank: int
    last_call: str
    last_completed: str
    waits_in: str
    on_host: str


@dataclass(frozen=True)
class Diagnosis:
    """Whether a job hangs, where, and why."""

    kind: Kind
    verdict: str
    advice: str
    wait: Wait | None
    """The call that is not complete and that the cause keeps from it."""
    culprits: tuple[Culprit, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    cycle: tuple[str, ...] = ()
    """Lines that draw a deadlock: each rank, what it waits in, and for whom."""
    completed_ranks: tuple[int, ...] = ()
    """Ranks for which the collective is complete, while it is not for others."""
    waited_ns: int | None = None
    ranks: tuple[RankState, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_hang(self) -> bool:
        """Return whether the job hangs."""
        return self.kind is not Kind.NONE


def diagnose(dumps: HangDumps, *, min_wait_ns: int = DEFAULT_MIN_WAIT_NS) -> Diagnosis:
    """Return why a job hangs. A wait of less than `min_wait_ns` when the dumps were written is no hang."""
    dumps = with_inferred_calls(dumps)
    groups = Groups(dumps)
    table = CallTable(dumps, groups)
    waiting = graph(dumps, groups, table)
    written_ns = max((dump.written_ns or 0 for dump in dumps.ranks.values()), default=0)
    case = _Case(dumps, table, waiting, _longest_ns(waiting.waits, written_ns), groups.world_size)
    diagnosis = case.diagnosis(min_wait_ns)
    return _with_ranks(diagnosis, dumps, groups, waiting)


@dataclass(frozen=True)
class _Case:
    """All that a verdict rests on."""

    dumps: HangDumps
    table: CallTable
    graph: WaitGraph
    waited_ns: int | None
    world_size: int

    def diagnosis(self, min_wait_ns: int) -> Diagnosis:
        if not self.graph.waits:
            return self._without_waits()
        timed_out = any(dump.reason in ("timeout", "error") for dump in self.dumps.ranks.values())
        most_ns = _most_waited_ns(self.dumps, self.graph.waits)
        if not timed_out and most_ns is not None and most_ns < min_wait_ns:
            return _no_hang(
                f"No hang: the longest wait for a collective is {units.duration(most_ns)}, as in a running training."
            )
        mismatches = self._mismatches()
        if mismatches:
            return self._mismatch(mismatches)
        roots = [root for root in self.graph.roots() if root.led_ranks or not root.ranks]
        if not roots:
            return self._incomplete_call(self.graph.waits[0])
        root = roots[0]
        if len(root.ranks) > 1:
            return self._deadlock(root)
        return self._late([root for root in roots if len(root.ranks) == 1]) if root.ranks else self._stuck(root)

    # Cases --------------------------------------------------------------------------------------------------------

    def _without_waits(self) -> Diagnosis:
        stalled = [dump for dump in self.dumps.ranks.values() if dump.reason == "timeout" or not dump.has_recorder]
        away = {dump.rank: causes.state(dump) for dump in stalled if dump.threads}
        if not any(dump.reason == "timeout" for dump in stalled) or not away:
            failed = [dump for dump in self.dumps.ranks.values() if dump.reason == "error"]
            return self._failure(failed) if failed else self._complete()
        blocked = [dump for dump in stalled if is_blocked(dump)]
        if blocked:
            return self._without_communicator(blocked)
        culprits = tuple(causes.of_rank(rank, self.dumps) for rank in sorted(away))
        text = (
            f"No collective is pending, but {_ranks(away)} made no call for {units.duration(_stalled_ns(stalled))}: "
            f"{_reasons(culprits)}."
        )
        return Diagnosis(Kind.HOST, text, culprits[0].advice, None, culprits)

    def _without_communicator(self, blocked: Sequence[RankDump]) -> Diagnosis:
        """Return the verdict where ranks are in calls that no flight recorder has; the other ranks are the cause."""
        absent = sorted(set(range(self.world_size)) - {dump.rank for dump in blocked})
        names = describe_groups(blocked)
        text = f"{_sentence(_calls_on_host(blocked))}, and no flight recorder has "
        text += "that call" if len(blocked) == 1 else "these calls"
        text += ": the host waits there for all ranks of the group, as NCCL creates a communicator in the first call"
        text += f"; without a call yet: group {' and group '.join(names)}" if names else ""
        if absent:
            late = tuple(causes.of_rank(rank, self.dumps) for rank in absent)
            kind = min(late, key=lambda culprit: _ORDER.index(culprit.kind))
            return Diagnosis(kind.kind, f"{text}; {_reasons(late)}.", kind.advice, None, late)
        culprits = tuple(
            Culprit(dump.rank, Kind.COMMUNICATOR, f"is in {causes.state(dump).operation}", self._evidence(dump.rank))
            for dump in blocked
        )
        return Diagnosis(Kind.COMMUNICATOR, f"{text}.", ADVICE[Kind.COMMUNICATOR], None, culprits)

    def _complete(self) -> Diagnosis:
        count = sum(len(dump.calls) for dump in self.dumps.ranks.values())
        return _no_hang(f"No hang: all {count:,} calls of {_ranks(self.dumps.ranks)} are complete.")

    def _failure(self, failed: Sequence[RankDump]) -> Diagnosis:
        culprits = tuple(causes.of_rank(dump.rank, self.dumps) for dump in failed)
        text = f"No collective is pending: {_reasons(culprits)}."
        return Diagnosis(Kind.ERROR, text, ADVICE[Kind.ERROR], None, culprits)

    def _mismatches(self) -> list[tuple[Wait, Mismatch]]:
        mismatches: dict[object, tuple[Wait, Mismatch]] = {}
        for wait in self.graph.waits:
            mismatch = collectives.first_mismatch(self.table, wait.collective) if wait.collective else None
            if mismatch is not None:
                mismatches.setdefault((mismatch.group, mismatch.seq), (wait, mismatch))
        return sorted(mismatches.values(), key=lambda pair: (pair[0].first_call.created_ns or 0, pair[1].seq))

    def _mismatch(self, mismatches: Sequence[tuple[Wait, Mismatch]]) -> Diagnosis:
        wait, mismatch = mismatches[0]
        kind = Kind.ORDER if mismatch.is_reordered else Kind.MISMATCH
        deviating = dict(mismatch.deviating)
        if mismatch.is_tied:
            deviating = dict(self.table.calls(mismatch.group, mismatch.seq))
        texts = {rank: mismatch.explanations.get(rank, _calls(mismatch)) for rank in deviating}
        culprits = tuple(Culprit(rank, kind, texts[rank], self._record(rank)) for rank in sorted(deviating))
        text = f"{_mismatch_clause(mismatch)} at seq {mismatch.seq} of {mismatch.group}, so that {wait.op} is not "
        text += f"complete on {_ranks(wait.waiting_ranks)}."
        every_mismatch = tuple(mismatch for _, mismatch in mismatches)
        return Diagnosis(kind, text, ADVICE[kind], wait, culprits, every_mismatch, waited_ns=self.waited_ns)

    def _deadlock(self, root: Root) -> Diagnosis:
        waits = [self.graph.waits[number] for number in root.waits]
        deviating = _fewest(root, waits)
        kind = Kind.DEADLOCK if any(wait.collective for wait in waits) else Kind.MESSAGES
        culprits = tuple(
            Culprit(rank, kind, f"waits in {_name(self._wait_of(rank, root))}", self._record(rank))
            for rank in deviating
        )
        detail = (
            f"only {_ranks(deviating)} {_plural(deviating, 'takes', 'take')} another order than the others"
            if len(deviating) < len(root.ranks)
            else "each waits for a rank that waits in another call"
        )
        text = f"Deadlock: {_cycle_text(waits)}; {detail}{self._on_communicators(waits)}."
        wait = max(waits, key=lambda wait: len(wait.waiting_ranks))
        cycle = self._cycle_lines(root)
        return Diagnosis(kind, text, ADVICE[kind], wait, culprits, cycle=cycle, waited_ns=self.waited_ns)

    def _late(self, roots: Sequence[Root]) -> Diagnosis:
        """Return the verdict where chains end at ranks that wait for nobody."""
        needed = {rank for root in roots[:1] for rank in root.ranks}
        waits = [wait for wait in self.graph.waits if needed & set(wait.missing_ranks)]
        wait = max(waits, key=lambda wait: (len(wait.waiting_ranks), -(wait.first_call.created_ns or 0)))
        late = sorted(needed | {rank for root in roots for rank in root.ranks if rank in wait.missing_ranks})
        culprits = tuple(causes.of_rank(rank, self.dumps) for rank in late)
        if sum(culprit.kind is Kind.NO_DUMP for culprit in culprits) > max(1, len(self.dumps.ranks)):
            return self._unknown_cause(wait, late)
        leading = min(culprits, key=lambda culprit: (_ORDER.index(culprit.kind), culprit.rank))
        kind = leading.kind
        waiters = wait.waiting_ranks
        verb = _plural(waiters, "waits", "wait")
        text = f"{_sentence(_ranks(waiters))} {verb} in {_name(wait)} for {_because(culprits)}"
        text += f"{self._on_communicators([wait])}."
        return Diagnosis(
            kind, text, leading.advice, wait, culprits, waited_ns=self.waited_ns,
            completed_ranks=_partly(wait),
        )  # fmt: skip

    def _stuck(self, root: Root) -> Diagnosis:
        """Return the verdict on a collective that all ranks came to and that does not complete."""
        waits = [wait for wait in self.graph.waits if not wait.missing_ranks]
        conflict = self._order_conflict(waits)
        if conflict is not None:
            return conflict
        wait = self.graph.waits[root.waits[0]]
        calls = wait.collective.calls if wait.collective else {}
        states = {rank: call.state for rank, call in calls.items()}
        has_started = {CallState.STARTED, CallState.COMPLETED} & set(states.values())
        behind = [rank for rank, state in states.items() if has_started and state is CallState.SCHEDULED]
        behind = behind or [rank for rank in states if _partly(wait) and states[rank] is not CallState.COMPLETED]
        how = "has not started it" if has_started and behind else "has not completed it"
        culprits = tuple(Culprit(rank, Kind.COMMUNICATION, how, self._evidence(rank)) for rank in sorted(behind))
        text = f"All ranks have called {_name(wait)}, their calls match, and it does not complete"
        if culprits:
            text += f": {_each_of([culprit.rank for culprit in culprits])} {how}, other ranks have"
        return Diagnosis(
            Kind.COMMUNICATION, f"{text}.", ADVICE[Kind.COMMUNICATION], wait, culprits, waited_ns=self.waited_ns,
            completed_ranks=_partly(wait),
        )  # fmt: skip

    def _order_conflict(self, waits: Sequence[Wait]) -> Diagnosis | None:
        """Return the verdict where ranks enqueued two pending collectives in different orders."""
        collectives = [wait for wait in waits if wait.collective]
        for pending, other in list(combinations(collectives, 2))[:_MAX_PAIRS]:
            assert pending.collective
            assert other.collective
            first, second = pending.collective.calls, other.collective.calls
            common = sorted(first.keys() & second.keys())
            forward = [rank for rank in common if first[rank].order < second[rank].order]
            reverse = [rank for rank in common if rank not in forward]
            if forward and reverse:
                fewer = min(forward, reverse, key=len)
                deviating = common if len(forward) == len(reverse) else fewer
                culprits = tuple(
                    Culprit(rank, Kind.DEADLOCK, "enqueued them in another order", self._record(rank))
                    for rank in deviating
                )
                text = (
                    f"Deadlock: {_ranks(forward)} enqueued {_name(pending)} before {_name(other)}, {_ranks(reverse)} "
                    f"{_name(other)} first."
                )
                lines = (f"{_ranks(forward)}: {_name(pending)}, then {_name(other)}",
                         f"{_ranks(reverse)}: {_name(other)}, then {_name(pending)}")  # fmt: skip
                advice = ADVICE[Kind.DEADLOCK]
                return Diagnosis(Kind.DEADLOCK, text, advice, pending, culprits, cycle=lines, waited_ns=self.waited_ns)
        return None

    def _unknown_cause(self, wait: Wait, late: Sequence[int]) -> Diagnosis:
        text = (
            f"{_sentence(_ranks(wait.waiting_ranks))} {_plural(wait.waiting_ranks, 'waits', 'wait')} in {_name(wait)}; "
            f"the cause is not known, as {_ranks(late)} left no dumps."
        )
        return Diagnosis(Kind.UNKNOWN, text, ADVICE[Kind.UNKNOWN], wait, waited_ns=self.waited_ns)

    def _incomplete_call(self, wait: Wait) -> Diagnosis:
        ranks = wait.waiting_ranks
        culprits = tuple(causes.of_rank(rank, self.dumps) for rank in ranks)
        text = f"{_name(wait)} is not complete on {_because(culprits, link='and on')}."
        return Diagnosis(Kind.HOST, _sentence(text), ADVICE[Kind.HOST], wait, culprits, waited_ns=self.waited_ns)

    # Parts of verdicts ------------------------------------------------------------------------------------------------

    def _on_communicators(self, waits: Iterable[Wait]) -> str:
        """Return a clause on the communicators that NCCL creates in these calls."""
        calls = [wait.first_call for wait in waits]
        if not calls or not all(creates_communicator(x, self.dumps.ranks[x.rank]) for x in calls):
            return ""
        return (
            "; in these calls NCCL creates the communicators of the groups"
            if len(calls) > 1
            else ("; in this call NCCL creates the communicator of the group")
        )

    def _evidence(self, rank: int) -> tuple[str, ...]:
        dump = self.dumps.ranks.get(rank)
        return causes.evidence(dump) if dump else ()

    def _record(self, rank: int) -> tuple[str, ...]:
        dump = self.dumps.ranks.get(rank)
        return causes.record(dump) if dump else ()

    def _wait_of(self, rank: int, root: Root) -> Wait:
        return next(self.graph.waits[n] for n in self.graph.of_rank[rank] if n in root.waits)

    def _cycle_lines(self, root: Root) -> tuple[str, ...]:
        """Return one cycle as lines: rank, the call that it waits in, the next rank."""
        lines: list[str] = []
        rank, seen = root.ranks[0], set[int]()
        while rank not in seen:
            seen.add(rank)
            wait = self._wait_of(rank, root)
            following = next(other for other in wait.missing_ranks if other in root.ranks)
            lines.append(f"rank {rank} waits in {_name(wait)} for rank {following}")
            rank = following
        return tuple(lines)


_ORDER = (Kind.ERROR, Kind.DIED, Kind.EXITED, Kind.HOST, Kind.NO_DUMP, Kind.UNKNOWN)


def _no_hang(text: str) -> Diagnosis:
    return Diagnosis(Kind.NONE, text, "", None)


def _most_waited_ns(dumps: HangDumps, waits: Iterable[Wait]) -> int | None:
    """Return an upper bound of the longest wait: a file's time of modification is that of the dump, or of a copy."""
    return _longest_ns(waits, max((dump.latest_ns for dump in dumps.ranks.values()), default=0))


def _longest_ns(waits: Iterable[Wait], moment_ns: int) -> int | None:
    created = [wait.first_call.created_ns for wait in waits if wait.first_call.created_ns]
    return max(0, moment_ns - min(created)) if created and moment_ns else None


def _stalled_ns(dumps: Iterable[RankDump]) -> int:
    return max((dump.stalled_ns or 0 for dump in dumps), default=0)


def _partly(wait: Wait) -> tuple[int, ...]:
    return wait.collective.completed_ranks if wait.collective else ()


def _fewest(root: Root, waits: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks of a cycle that wait in the collective with fewest of them; all, if there is no fewest."""
    members = sorted((tuple(sorted(set(wait.waiting_ranks) & set(root.ranks))) for wait in waits), key=len)
    smallest = [ranks for ranks in members if ranks and len(ranks) == len(members[0])]
    return smallest[0] if len(smallest) == 1 and len(smallest[0]) * 2 < len(root.ranks) else root.ranks


def _name(wait: Wait) -> str:
    return f"{wait.op} (seq {wait.seq} of {wait.group})" if wait.collective else f"{wait.op} ({wait.group})"


def _cycle_text(waits: Sequence[Wait]) -> str:
    return ", ".join(
        f"{_ranks(wait.waiting_ranks)} {_plural(wait.waiting_ranks, 'waits', 'wait')} in {_name(wait)}"
        for wait in waits[:3]
    )


def _calls(mismatch: Mismatch) -> str:
    return f"calls {mismatch.expected.op} {sizes(mismatch.expected)}".rstrip()


def _mismatch_clause(mismatch: Mismatch) -> str:
    """Return who calls what, as a clause."""
    expected = mismatch.expected_ranks
    if set(expected) & set(mismatch.deviating):
        rank, other = next(iter(mismatch.deviating.items()))
        return f"The ranks exchange unequal amounts in {other.op}: {mismatch.explanations[rank]}"
    ranks_of_call: dict[str, list[int]] = defaultdict(list)
    for rank, call in mismatch.deviating.items():
        ranks_of_call[_what(call, mismatch.kind)].append(rank)
    (deviating_call, deviating), *rest = ranks_of_call.items()
    others = [rank for _, ranks in rest for rank in ranks]
    what = "another operation" if mismatch.kind == collectives.OP else "other sizes"
    other_calls = f", and {_ranks(others)} {what}," if others else ""
    return (
        f"{_sentence(_ranks(deviating))} {_plural(deviating, 'calls', 'call')} {deviating_call}{other_calls} where "
        f"{_ranks(expected)} {_plural(expected, 'calls', 'call')} {_what(mismatch.expected, mismatch.kind)}"
    )


def _what(call: Call, kind: str) -> str:
    return call.op if kind == collectives.OP else f"{call.op} {sizes(call)}"


def _ranks(ranks: Iterable[int]) -> str:
    return units.numbers("rank", ranks)


def _because(culprits: Sequence[Culprit], *, link: str = "and for") -> str:
    """Return the ranks of culprits and the reason of each, as objects of a sentence."""
    by_reason = _by_reason(culprits)
    clauses = [
        f"{_ranks(ranks)}, {_plural(ranks, 'which', 'each of which')} {reason}"
        for reason, ranks in list(by_reason.items())[:3]
    ]
    return f"; {link} ".join(clauses) + (f"; and {len(by_reason) - 3} more" if len(by_reason) > 3 else "")


def _reasons(culprits: Sequence[Culprit]) -> str:
    """Return the ranks of culprits and the reason of each, as clauses."""
    by_reason = _by_reason(culprits)
    clauses = [f"{_each_of(ranks)} {reason}" for reason, ranks in list(by_reason.items())[:3]]
    return "; ".join(clauses) + (f"; and {len(by_reason) - 3} more" if len(by_reason) > 3 else "")


def _by_reason(culprits: Sequence[Culprit]) -> dict[str, list[int]]:
    by_reason: dict[str, list[int]] = {}
    for culprit in culprits:
        by_reason.setdefault(culprit.reason, []).append(culprit.rank)
    return by_reason


def _each_of(ranks: Sequence[int]) -> str:
    return _ranks(ranks) if len(ranks) == 1 else f"each of {_ranks(ranks)}"


def _calls_on_host(dumps: Sequence[RankDump]) -> str:
    """Functions of torch.distributed that ranks are in, as clauses."""
    places: dict[str, list[int]] = {}
    for dump in dumps:
        state = causes.state(dump)
        where = f" in {state.frame.brief}" if state.frame else ""
        places.setdefault(state.operation + where, []).append(dump.rank)
    clauses = [f"{_ranks(ranks)} {_plural(ranks, 'is', 'are')} in {place}" for place, ranks in list(places.items())[:3]]
    return ", ".join(clauses) + (f" and {len(places) - 3} more calls" if len(places) > 3 else "")


def _plural(ranks: Sequence[int], singular: str, plural: str) -> str:
    return singular if len(ranks) == 1 else plural


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _with_ranks(diagnosis: Diagnosis, dumps: HangDumps, groups: Groups, waiting: WaitGraph) -> Diagnosis:
    """Return the diagnosis with a row for each rank, and notes on what the dumps lack."""
    absent = sorted(set(range(groups.world_size)) - set(dumps.ranks))
    notes = list(dumps.notes)
    if absent:
        notes.append(f"no dump of {_ranks(absent)} of {groups.world_size}")
    without_recorder = [rank for rank, dump in dumps.ranks.items() if not dump.has_recorder]
    if without_recorder:
        notes.append(f"only stacks, no flight recorder dump, of {_ranks(without_recorder)}")
    without_stacks = [rank for rank, dump in dumps.ranks.items() if not dump.threads]
    if diagnosis.kind is Kind.HOST and without_stacks:
        notes.append(f"no stacks of {_ranks(without_stacks)}: put stacks by py-spy or faulthandler into the folder")
    if missing := _missing_facts([dump for dump in dumps.ranks.values() if dump.has_recorder]):
        notes.append(f"the flight recorder dumps do not state {', '.join(missing)}")
    rows = tuple(_row(dump, waiting) for dump in dumps.ranks.values())
    return replace(diagnosis, ranks=rows, notes=tuple(notes))


def _row(dump: RankDump, waiting: WaitGraph) -> RankState:
    done = [call for call in dump.calls if call.state is CallState.COMPLETED]
    waits = [waiting.waits[number] for number in waiting.of_rank.get(dump.rank, ())]
    state = causes.state(dump)
    sentence = "" if state.activity is causes.Activity.UNKNOWN else state.sentence
    ending = {"exit": "ended its program", "error": f"raised {causes.error_line(dump.error)}"}.get(dump.reason, "")
    return RankState(
        dump.rank,
        causes.brief(dump.calls[-1]) if dump.calls else "",
        causes.brief(done[-1]) if done else "",
        ", ".join(causes.brief(_own_call(wait, dump.rank)) for wait in waits[:2]),
        ending or sentence,
    )


def _own_call(wait: Wait, rank: int) -> Call:
    return wait.collective.calls[rank] if wait.collective else wait.first_call


def _missing_facts(dumps: Sequence[RankDump]) -> list[str]:
    """What no dump states, and without which a cause may not be recognized or have no place in the code."""
    calls = [call for dump in dumps for call in dump.calls]
    threads = [thread for dump in dumps for thread in dump.threads]
    groups = {name: group for dump in dumps for name, group in dump.groups.items()}
    stated = {
        "any call": bool(calls),
        "the operations of calls": any(call.op for call in calls),
        "when calls began": any(call.created_ns for call in calls),
        "sizes of inputs": any(call.input_sizes for call in calls),
        "sizes of outputs": any(call.output_sizes for call in calls),
        "element types of inputs": any(call.input_dtypes for call in calls),
        "element types of outputs": any(call.output_dtypes for call in calls),
        "the ranks of each group": all(ranks is not None for _, ranks in groups.values())
        and all(call.group in groups for call in calls),
        "descriptions of each group": all(description for description, _ in groups.values()),
        "how much threads ran": not threads or any(thread.cpu_ratio is not None for thread in threads),
        "how long nothing progressed": any(dump.stalled_ns is not None for dump in dumps),
        "when they were written": any(dump.written_ns for dump in dumps),
        "why they were written": any(dump.reason for dump in dumps),
    }
    for owner, stacks in (("calls", calls), ("threads", threads)):
        frames = [frame for stack in stacks for frame in stack.frames]
        stated |= {
            f"stacks of {owner}": bool(frames),
            f"files in stacks of {owner}": not frames or any(frame.file for frame in frames),
            f"functions in stacks of {owner}": not frames or any(frame.function for frame in frames),
            f"lines in stacks of {owner}": not frames or any(frame.line for frame in frames),
        }
    return [what for what, is_stated in stated.items() if not is_stated]
