"""A simulated run on disk, all marked as simulated: traces, metrics, run.json, and truth.json with costs of faults."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tracekit import conventions
from tracekit.conventions import device_metrics as names
from tracekit.conventions.strategies import PP
from tracekit.errors import InputError
from tracekit.plan.checkpoint import ADAM_BYTES_PER_PARAM
from tracekit.simulate import engine, faults, kineto_writer, memory
from tracekit.simulate.fault_registry import FaultRequest
from tracekit.simulate.job import FSDP1, YAFSDP, YAFSDP_V1, Job, manifest
from tracekit.simulate.kineto_writer import BASE_NS
from tracekit.simulate.recording import Recording

_LEAST_RATIO = 0.01  # inherent costs are listed from this share of the run on


@dataclass(frozen=True)
class KnownFault:
    """One fault of a run: the ranks and steps in which it acts, and the time it costs in each of these steps."""

    fault: str
    code: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    start_ns: int
    end_ns: int
    cost_ns: int


_OURS = (
    f"rank*{kineto_writer.TRACE_SUFFIX}",
    f"rank*{conventions.METRICS_SUFFIX}",
    f"rank*{conventions.CHECKPOINT_LOG_SUFFIX}",
)
_CLOCKS_MHZ = MappingProxyType({"a100-80": (1410, 1593), "h100-80": (1755, 2619), "v100-32": (1530, 877)})
_LIMITS_W = MappingProxyType({"a100-80": 400, "h100-80": 700, "v100-32": 300})
_OTHERS_MHZ, _OTHERS_W = (1500, 1500), 400
_CLOCK_SPREAD = 0.01
_COOL_C, _SPREAD_C, _HOT_C = 60.0, 8.0, 91.0
_SAMPLE_NS = 1_000_000_000


@dataclass(frozen=True)
class Simulated:
    """A written run: the job with its faults, the simulated recording, and the known faults."""

    job: Job
    recording: Recording
    known_faults: list[KnownFault]


def simulate(
    healthy: Job,
    requests: Sequence[FaultRequest],
    out: Path,
    *,
    arguments: Mapping[str, Any],
    force: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Simulated:
    """Simulate a job with the requested faults, and write its run to the folder `out`.

    `arguments` are copied to run.json and truth.json. Raises InputError where a fault is impossible, the job does not
    fit into memory, or the folder is not empty; with `force`, an earlier simulated run there is replaced.
    """
    job = faults.inject(healthy, requests)
    memory.require_fit(job)
    if job.hybrid is not None and job.hybrid.rank_order:
        raise InputError("a job with another order of ranks is simulated, but not written")
    _make_room(out, force=force)
    recording = engine.simulate(job)
    fault_costs = known_faults(healthy, requests, job, recording)
    written = [rank for rank in job.written_ranks if rank in recording.ranks]
    for done, rank in enumerate(written, 1):
        record = recording.ranks[rank]
        kineto_writer.write(out / conventions.rank_file(rank, kineto_writer.TRACE_SUFFIX), job, record)
        _write_lines(out / conventions.rank_file(rank, conventions.METRICS_SUFFIX), _metrics(job, recording, rank))
        if job.impairments.save_ns:
            log = out / conventions.rank_file(rank, conventions.CHECKPOINT_LOG_SUFFIX)
            _write_lines(log, _saves(job, recording, rank))
        if on_progress:
            on_progress(done, len(written))
    ground_truth: dict[str, Any] = {"simulated": True, "arguments": dict(arguments)}
    ground_truth["faults"] = [document(fault, job, requests) for fault in fault_costs]
    if job.hybrid is not None:
        ground_truth["bubbles"] = [asdict(bubble) for bubble in bubbles(job, recording)]
    for name, content in (
        (conventions.MANIFEST_FILE, _manifest(job, arguments)),
        (conventions.TRUTH_FILE, ground_truth),
    ):
        kineto_writer.replace_file(out / name, f"{json.dumps(content, indent=2)}\n".encode())
    return Simulated(job, recording, fault_costs)


def counters(job: Job, rank: int, step: int, *, start_ns: int, end_ns: int) -> dict[str, float]:
    """Return the counters of a rank's GPU in a step: of a hot GPU if it is throttled, else of a cool one."""
    draw = zlib.crc32(f"{job.seed}/{rank}/{step}".encode()) / 2**32
    sm_mhz, memory_mhz = _CLOCKS_MHZ.get(job.hardware.name, _OTHERS_MHZ)
    limit_w = _LIMITS_W.get(job.hardware.name, _OTHERS_W)
    is_throttled = rank in job.impairments.throttled_ranks
    slower = job.impairments.slow_ranks[rank][0] if is_throttled else 1.0
    averaged = {
        names.SM_CLOCK: sm_mhz / slower * (1 - _CLOCK_SPREAD * draw),
        names.MEMORY_CLOCK: float(memory_mhz),
        names.POWER: limit_w * (0.85 + 0.05 * draw) / slower,
        names.TEMPERATURE: _HOT_C if is_throttled else round(_COOL_C + _SPREAD_C * draw),
        names.UTILIZATION: 0.99,
        names.MEMORY_UTILIZATION: 0.4,
    }
    throttled_by = names.HW_SLOWDOWN | names.HW_THERMAL if is_throttled else 0
    values = {
        form: round(value, 3)
        for name, value in averaged.items()
        for form in (name, names.least(name), names.most(name))
    }
    return values | {
        names.POWER_LIMIT: limit_w,
        names.ECC_CORRECTED: 0,
        names.ECC_UNCORRECTED: 0,
        names.REMAPPED_ROWS: 0,
        names.PENDING_ROW_REMAP: 0,
        names.THROTTLE_REASONS: throttled_by,
        names.SAMPLES: end_ns // _SAMPLE_NS - start_ns // _SAMPLE_NS,
    }


def known_faults(healthy: Job, requests: Sequence[FaultRequest], job: Job, recording: Recording) -> list[KnownFault]:
    """Return the faults of `job`, which is `healthy` with the requested faults; `recording` is its simulation.

    Without a layout, inherent costs of the setting follow: give-way under fsdp1, communication that no compute hides
    (`slow-network`: found by links that take no time) and a host that is too slow (`late-launch`: by one that takes
    none), where that is at least 1% of the run. The cost is the time the run takes longer, over the fault's steps.
    """
    result = [_known(request, job, recording, faults.without(healthy, requests, request)) for request in requests]
    codes = {request.fault.code for request in requests}
    if job.hybrid is not None:  # its layout decides what communication costs
        return result
    for name, without in _inherent_faults(job):
        fault = faults.FAULTS[name]
        if fault.code not in codes:
            inherent = _known(FaultRequest(replace(fault, steps=_every_step), ()), job, recording, without(job))
            if inherent.cost_ns * job.steps >= _LEAST_RATIO * recording.total_ns:
                result.append(inherent)
    return result


def document(entry: KnownFault, job: Job, requests: Sequence[FaultRequest]) -> dict[str, object]:
    """Return the fields of truth.json about a fault: in a job with a layout its axis and stages, too."""
    stated = dict(vars(entry))
    if job.hybrid is not None:
        fault = next(request.fault for request in requests if request.fault.name == entry.fault)
        stated |= {"axis": fault.axis, "stages": fault.stages(job)}
    return stated


@dataclass(frozen=True)
class Bubble:
    """The time of one step in which a rank runs no action of its stages.

    The step lasts from the first to the last action of the rank's pipeline (the ranks of its group on the pp axis); an
    action from its first kernel to its last, tensor-parallel collectives included, sends, receives, gathers of
    weights and the reduction of gradients left out.
    """

    rank: int
    stages: tuple[int, ...]
    step: int
    bubble_ns: int
    bubble_ratio: float
    """Share of the step's pipeline duration."""


def bubbles(job: Job, recording: Recording) -> list[Bubble]:
    """Return the bubbles of all ranks and steps; none without a pipeline."""
    if job.hybrid is None or job.hybrid.layout.pp == 1:
        return []
    return list(_rank_bubbles(job, recording))


def _make_room(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder for the run")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise InputError(f"{out} is not empty; name another folder, or replace the simulated run there by --force")
        for pattern in _OURS:
            for file in out.glob(pattern):
                file.unlink()
    out.mkdir(parents=True, exist_ok=True)


def _manifest(job: Job, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": conventions.RUN_SCHEMA,
        "simulated": True,
        "created_ns": kineto_writer.BASE_NS,
        "strategy": YAFSDP if job.strategy == YAFSDP_V1 else job.strategy,
        "world_size": job.gpus,
        "model": {**asdict(job.model), "parameters": job.model.parameters},
        "arguments": dict(arguments),
        "device": "cuda",
        "device_name": f"{job.hardware.device_name} (simulated)",
        "hardware": asdict(job.hardware),
        **(manifest(job.hybrid, job.micro_batches) if job.hybrid is not None else {}),
    }


def _metrics(job: Job, recording: Recording, rank: int) -> list[dict[str, Any]]:
    return [
        {
            "simulated": True,
            "step": step,
            conventions.STEP_TIME_METRIC: end_ns - start_ns,
            **conventions.throughput(job.step_tokens, max(1, end_ns - start_ns), ranks=job.gpus),
            conventions.RESERVED_METRIC: memory.round_up(memory.peak_bytes(job, rank)),
            conventions.ALLOC_RETRIES_METRIC: sum(retry <= step for retry in job.impairments.retry_steps),
            **(counters(job, rank, step, start_ns=start_ns, end_ns=end_ns) if job.device_metrics else {}),
        }
        for step, (start_ns, end_ns) in sorted(recording.ranks[rank].account.windows.items())
    ]


def _saves(job: Job, recording: Recording, rank: int) -> list[dict[str, Any]]:
    step = job.impairments.save_step
    end_ns = kineto_writer.BASE_NS + recording.ranks[rank].host_steps[step][1]
    common = {
        "simulated": True,
        "checkpoint": f"step-{step + 1}",
        "operation": "save",
        "step": step + 1,
        "start_ns": end_ns - job.impairments.save_ns,
        "blocking": True,
        "rank": rank,
        # Weights, master weights and Adam's moments, each part written by one rank, as distributed checkpoint does.
        "bytes": int(ADAM_BYTES_PER_PARAM * job.model.parameters) // job.gpus,
    }
    stages = ((conventions.WRITE, job.impairments.save_ns), (conventions.TOTAL, job.impairments.save_ns))
    return [{**common, "stage": stage, "dur_ns": dur_ns} for stage, dur_ns in stages]


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    kineto_writer.replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _known(request: FaultRequest, job: Job, recording: Recording, without: Job) -> KnownFault:
    fault = request.fault
    steps = fault.steps(job)
    saved_ns = recording.total_ns - engine.total_ns(without)
    first = min(record.host_steps[steps[0]][0] for record in recording.ranks.values())
    return KnownFault(
        fault.name,
        fault.code,
        fault.ranks(job),
        steps,
        BASE_NS + min(first, recording.start_ns(steps[0])),
        BASE_NS + recording.end_ns(steps[-1]),
        saved_ns // len(steps),
    )


def _inherent_faults(job: Job) -> Iterator[tuple[str, Callable[[Job], Job]]]:
    if job.strategy == FSDP1:
        yield "give-way", faults.without_give_way
    yield "slow-network", lambda j: replace(j, impairments=replace(j.impairments, ideal_links=True))
    yield "late-launch", lambda j: replace(j, impairments=replace(j.impairments, ideal_host=True))


def _every_step(job: Job) -> tuple[int, ...]:
    return tuple(range(job.steps))


def _rank_bubbles(job: Job, recording: Recording) -> Iterator[Bubble]:
    pipelines = job.mesh.layout.groups(PP)
    for step, ranks in product(range(job.steps), pipelines):
        spans = {
            rank: sorted(span for (acted, _), span in recording.ranks[rank].actions.items() if acted == step)
            for rank in ranks
        }
        first = min(start for rank_spans in spans.values() for start, _ in rank_spans)
        last = max(end for rank_spans in spans.values() for _, end in rank_spans)
        for rank, rank_spans in spans.items():
            covered, reached = 0, 0
            for start, end in rank_spans:
                covered += max(0, end - max(start, reached))
                reached = max(reached, end)
            bubble_ns = last - first - covered
            yield Bubble(rank, job.mesh.stages_of(rank), step, bubble_ns, bubble_ns / (last - first))
