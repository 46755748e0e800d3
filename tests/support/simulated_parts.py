"""Where the steps of a simulated run go, by what its engine did: an account that shares no code with the analysis."""

from collections.abc import Mapping

from tracekit.conventions.strategies import PP
from tracekit.simulate.job import Job
from tracekit.simulate.recording import Activity, RankRecord, Recording


def parts_of_steps(job: Job, recording: Recording) -> Mapping[str, float]:
    """Return the mean time of a step and rank by part, in ns: those of `time_by_part`, idle time as a whole.

    Without the first step, in which the host has not run ahead yet, and the last one, which nothing follows.
    """
    arrivals: dict[tuple[str, int], int] = {}
    for record in recording.ranks.values():
        for activity in record.activities:
            if activity.group is not None:
                key = (activity.group.name, activity.number)
                arrivals[key] = max(arrivals.get(key, 0), activity.start_ns)
    totals: dict[str, float] = {}
    for record in recording.ranks.values():
        for step in range(1, job.steps - 1):
            pipeline = _pipeline_span(job, recording, record.rank, step)
            for part, time_ns in _parts(record, step, record.account.windows[step], arrivals, pipeline).items():
                totals[part] = totals.get(part, 0) + time_ns
    return {part: total / len(recording.ranks) / (job.steps - 2) for part, total in totals.items()}


def _pipeline_span(job: Job, recording: Recording, rank: int, step: int) -> tuple[int, int]:
    if job.hybrid is None or job.hybrid.layout.pp == 1:
        return 0, 0
    ranks = next(group for group in job.hybrid.layout.groups(PP) if rank in group)
    spans = [span for other in ranks for (acted, _), span in recording.ranks[other].actions.items() if acted == step]
    return min(start for start, _ in spans), max(end for _, end in spans)


def _parts(
    record: RankRecord,
    step: int,
    window: tuple[int, int],
    arrivals: Mapping[tuple[str, int], int],
    pipeline: tuple[int, int],
) -> dict[str, int]:
    """Sweep over a window: what runs counts from each change to the next one."""
    spans = [("window", *window), ("pipeline", *pipeline)]
    spans += [("action", *span) for (acted, _), span in record.actions.items() if acted == step]
    for activity in record.activities:
        if activity.end_ns > window[0] and activity.start_ns < window[1]:
            spans += _kinds(activity, arrivals)
    changes = sorted(change for kind, start_ns, end_ns in spans for change in ((start_ns, kind, 1), (end_ns, kind, -1)))
    running: dict[str, int] = {}
    sums: dict[str, int] = {}
    since_ns = changes[0][0]
    for now_ns, kind, count in changes:
        if running.get("window") and now_ns > since_ns:
            part = _part(running)
            sums[part] = sums.get(part, 0) + now_ns - since_ns
        running[kind] = running.get(kind, 0) + count
        since_ns = now_ns
    return sums


def _kinds(activity: Activity, arrivals: Mapping[tuple[str, int], int]) -> list[tuple[str, int, int]]:
    """Spans of an activity by kind: a collective waits for its last rank, then transfers."""
    start_ns, end_ns = activity.start_ns, activity.end_ns
    if activity.group is None:
        return [(activity.kernel.kind, start_ns, end_ns)]
    if activity.kernel.collective is not None and activity.kernel.collective.peer is not None:
        return [("send", start_ns, end_ns)]
    arrived_ns = arrivals[activity.group.name, activity.number]
    return [("wait", start_ns, arrived_ns), ("transfer", arrived_ns, end_ns)]


def _part(running: Mapping[str, int]) -> str:
    is_running = {kind for kind, count in running.items() if count > 0}
    is_bubble = "pipeline" in is_running and "action" not in is_running
    for kinds, part in (({"compute"}, "compute"), ({"transfer"}, "communication"), ({"send"}, "bubble")):
        if is_running & kinds:
            return part
    if "wait" in is_running:
        return "bubble" if is_bubble else "wait"
    if is_running & {"memcpy", "memset"}:
        return "copy"
    return "bubble" if is_bubble else "idle"
