"""Accuracy of the rules on hybrid layouts: simulated pipelines, tensor and expert parallelism, with a fault or none.

    python -m benchmarks.hybrid_runs --runs 100 --jobs 2 --out docs/lab/hybrid_runs.md

The seed is random unless --seed is given. Layouts have up to three axes and 64 ranks; a quarter of the runs is healthy.
A rule must report a fault with its code if it costs 3% of the run or more, and must not report a code that the truth
does not contain. The cost of a layout itself is in the truth, too, since the user can change it: PIPE001 is right
where the run would be 2% shorter without transfers between stages, TP002 where it would be 20% shorter without
tensor-parallel collectives. Only the rules on pipelines, tensor parallelism, experts and late ranks run, which takes
less than half the time of all rules. Measured bubbles are compared with those of the simulator's own timeline. What-if
answers on other schedules, micro-batches, layers of stages, faster links, ranks on other nodes and equally loaded
experts are computed for each run whose layout has them, and compared with a simulation of the changed job.

A slow link between stages is drawn in pipelines of four places or more. Between two, all transfers take the same link:
nothing in the traces shows that it should be faster, as PIPE005 states. PIPE001 then reports what the transfers cost.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import tracekit
from benchmarks import hybrid_answers
from benchmarks.hybrid_answers import Answer
from tracekit.analysis.parallelism import pipeline_bubbles
from tracekit.conventions import pipeline_schedules
from tracekit.conventions.strategies import TP
from tracekit.errors import InputError
from tracekit.plan import hardware, models
from tracekit.rules.engine import check
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import Severity
from tracekit.simulate import engine, faults, memory, run
from tracekit.simulate.fault_registry import impair
from tracekit.simulate.job import Job, laid_out

PREFIXES = ("PIPE", "TP", "EP", "RANK004")
FAMILIES = ("PIPE", "TP", "EP", "RANK")
FAULTS = tuple(name for name, fault in faults.FAULTS.items() if fault.hybrid and not fault.plain)
_HEALTHY = 0.25  # share of the runs without a fault
_MATTERS = 0.03  # share of the run from which a fault must be found
_MOST_DRAWS = 6  # draws of a run whose fault costs too little
_MOST_RANKS = 64
_Drawn: TypeAlias = tuple[int, str, int, Sequence[str]]
_NODE = 8
_NO_TIME = 1e-6  # times what a transfer takes
_INHERENT: dict[str, tuple[str, Mapping[Any, float], float]] = {
    "PIPE001": ("slow_boundaries", dict.fromkeys(range(_MOST_RANKS), _NO_TIME), 0.02),
    "TP002": ("slow_axes", {TP: _NO_TIME}, 0.2),
}
"""By code: the impairment by which such communication takes no time, and the share of the run that it must cost."""
_FULL = 0.9  # share of the device's memory that a run may need
# A bubble above the schedule's own has these causes; communication across nodes is exposed.
_EXPLAINED_BY = {"PIPE001": ("PIPE002", "PIPE005", "RANK004", "EP001", "PIPE003"), "TP002": ("TP001",)}


@dataclass(frozen=True)
class Judged:
    """One run: its layout, the code of its fault and its share of the run, the codes that rules reported.

    `inherent` are the codes of what its communication costs by itself: see `_INHERENT`. `errors` are the differences of
    measured bubbles from the true ones, in points; `answers` what whatif
    predicts of changes, compared with the truth.
    """

    name: str
    fault: str
    code: str
    share: float
    reported: tuple[str, ...]
    inherent: tuple[str, ...]
    errors: tuple[float, ...]
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def must_be_found(self) -> bool:
        """Whether the fault costs enough."""
        return bool(self.code) and self.share >= _MATTERS

    def is_wrong(self, code: str) -> bool:
        """Whether a rule reported what the run does not have."""
        is_true = code in self.inherent or self.code in (code, *_EXPLAINED_BY.get(code, ()))
        return code in self.reported and not is_true


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and simulate runs, judge them, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the runs (default: 1)")
    parser.add_argument("--fault", action="append", default=[], help="draw only this fault, or healthy; repeatable")
    parser.add_argument("--about", action="append", default=[], help="ask what-if about this only, or none; repeatable")
    parser.add_argument("--ranks", type=int, default=_MOST_RANKS, help=f"at most (default: {_MOST_RANKS})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=None, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    kinds = options.fault or _kinds(random.Random(seed), options.runs)
    runs: list[Judged] = []
    draws = _until(
        options.minutes,
        ((seed + number, kinds[number % len(kinds)], options.ranks, options.about) for number in range(options.runs)),
    )
    for number, result in enumerate(_judge_all(draws, options.jobs)):
        runs.append(result)
        sys.stderr.write(f"{number}: {_line(result)}\n")
    text = document(runs, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def _until(minutes: float, draws: Iterable[_Drawn]) -> Iterator[_Drawn]:
    end_s = time.monotonic() + 60 * minutes
    return itertools.takewhile(lambda _: time.monotonic() < end_s, draws)


def _judge_all(draws: Iterable[_Drawn], jobs: int) -> Iterator[Judged]:
    if jobs == 1:
        yield from (judge_run(*draw) for draw in draws)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        begun: deque[Future[Judged]] = deque()
        for draw in draws:
            begun.append(pool.submit(judge_run, *draw))
            if len(begun) > 2 * jobs:  # a few ahead: runs take seconds or minutes
                yield begun.popleft().result()
        yield from (future.result() for future in begun)


def _kinds(draw: random.Random, count: int) -> list[str]:
    healthy = round(_HEALTHY * count)
    kinds = ["healthy"] * healthy
    while len(kinds) < count:
        kinds += draw.sample(FAULTS, min(len(FAULTS), count - len(kinds)))
    draw.shuffle(kinds)
    return kinds


def judge_run(seed: int, kind: str, ranks: int = _MOST_RANKS, about: Sequence[str] = ()) -> Judged:
    """Draw a run with a fault, simulate it, and let the rules judge it."""
    draw = random.Random(seed)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        job, faulty, code, share = _simulate_run(draw, kind, ranks, Path(folder))
        loaded = tracekit.load(folder, cache=False)
        rules = [rule() for rule in all_rules() if rule.code.startswith(FAMILIES)]
        codes = {finding.code for finding in check(loaded, rules).findings if finding.severity >= Severity.WARNING}
        errors = tuple(_bubble_errors(Path(folder), loaded))
        answers = hybrid_answers.answers(loaded, faulty, job, about)
    reported = tuple(sorted(code for code in codes if code.startswith(PREFIXES)))
    inherent = tuple(code for code in reported if code in _INHERENT and _is_inherent(faulty, code))
    return Judged(_name(job), kind, code, share, reported, inherent, errors, answers, time.perf_counter() - begun)


def _is_inherent(job: Job, code: str) -> bool:
    """Return whether a job is shorter by the code's share where the communication that it is about takes no time."""
    field, free, min_ratio = _INHERENT[code]
    whole_ns = engine.total_ns(job)
    return whole_ns - engine.total_ns(impair(job, **{field: free})) >= min_ratio * whole_ns


def _simulate_run(draw: random.Random, kind: str, ranks: int, out: Path) -> tuple[Job, Job, str, float]:
    """Return a healthy job, the same with a fault as written, the fault's code, and the share of the run it costs."""
    requests = [] if kind == "healthy" else [faults.parse(kind)]
    draws = 0
    while True:
        try:
            job = _draw_job(draw, kind, ranks)
            faulty = faults.inject(job, requests)
        except InputError:
            continue
        if max(map(memory.peak_bytes, (job, faulty))) > _FULL * job.hardware.memory_bytes:
            continue
        draws += 1
        if requests and draws < _MOST_DRAWS and _share(job, faulty) < _MATTERS:
            continue
        done = run.simulate(job, requests, out, arguments={"seed": job.seed, "fault": kind})
        if not requests:
            return job, job, "", 0.0
        fault = done.known_faults[0]
        return job, faulty, fault.code, fault.cost_ns * len(fault.steps) / done.recording.total_ns


def _share(job: Job, faulty: Job) -> float:
    """Return the share of a faulty job's time that it loses to its faults."""
    return 1 - engine.total_ns(job) / engine.total_ns(faulty)


def _draw_job(draw: random.Random, kind: str, ranks: int) -> Job:
    """Return a healthy job: enough micro-batches, a head smaller than a stage, tensor parallelism in a node."""
    has_experts = kind == "hot-expert" or draw.random() < 0.15
    limit = 2 if has_experts else 8
    pp, tp, data = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4))
    pp, tp = min(pp, limit), min(tp, limit)
    gpus, ep = pp * tp * data, min(data, 4) if has_experts else 1
    if not 4 <= gpus <= ranks or max(pp, tp, ep) < 2:
        raise InputError("drawn again")
    if kind == "slow-pipeline-link" and pp < 4:
        raise InputError("a link between two places only has no other to be compared with")
    if kind == "late-node" and (gpus <= _NODE or _NODE % (gpus // pp) == 0):
        raise InputError("a node of one or more whole stages is a slow stage")
    schedule = draw.choice(pipeline_schedules.SCHEDULES) if pp > 1 else pipeline_schedules.ONE_F_ONE_B
    stages = pipeline_schedules.usual_stages_per_rank(schedule)
    shards = pp > 1 and data > 1 and schedule not in pipeline_schedules.SPLIT_BACKWARD
    if kind == "sharded-micro-batches" and not shards:
        raise InputError("it needs a pipeline whose stages are sharded")
    strategy = draw.choice(("ddp", "zero1", *(["fsdp2"] if shards else [])))
    if kind == "sharded-micro-batches":
        strategy = "fsdp2"
    is_large = gpus > 16  # simulated and judged in minutes
    layers = pp * stages * (2 if kind == "unbalanced-stages" else draw.choice((1, 1 if is_large else 2)))
    model = models.find("mixtral-8x7b" if has_experts else "llama2-70b", layers=layers)
    model = replace(model, vocabulary=2048)
    layout = laid_out(
        gpus=gpus,
        model=model,
        pp=pp,
        tp=tp,
        ep=ep,
        shards_data=strategy == "fsdp2",
        schedule=schedule,
        virtual_stages=stages,
        sequence_parallel=tp > 1 and draw.random() < 0.5,
    )
    machine = hardware.find(draw.choice(("a100-80", "h100-80")))
    micro_batches = pp * draw.choice((3, 3 if is_large else 4)) if pp > 1 else draw.choice((1, 2, 4))
    return Job(
        strategy,
        model,
        machine,
        gpus,
        draw.choice((2048, 4096)),
        micro_batches=micro_batches,
        steps=3,
        seed=draw.randrange(1 << 20),
        ranks_written=gpus,
        hybrid=layout,
    )


def _bubble_errors(folder: Path, loaded: "tracekit.Run") -> Iterator[float]:
    """Yield the difference of each measured bubble from the true one, in points; NaN where it was not measured."""
    rows = loaded.table(pipeline_bubbles.pipeline_bubbles)
    measured = {(rank, step): ratio for rank, step, ratio in rows.select("rank", "step", "bubble_ratio").iter_rows()}
    for true in json.loads((folder / "truth.json").read_text())["bubbles"]:
        yield 100 * (measured.get((true["rank"], true["step"]), math.nan) - true["bubble_ratio"])


# Tables --------------------------------------------------------------------------------------------------------------


def document(runs: Sequence[Judged], seed: int) -> str:
    """Return the tables as Markdown."""
    head = f"# Accuracy of the rules on hybrid layouts\n\n{__doc__.split(chr(10), 1)[1].strip()}\n\n"
    head += f"{len(runs)} simulated runs, seeds {seed} to {seed + len(runs) - 1}.\n\n"
    return head + "\n\n".join([_scores(runs), _by_fault(runs), _bubbles(runs), _answers(runs), _mistakes(runs)]) + "\n"


def _scores(runs: Sequence[Judged]) -> str:
    rule_codes = {rule.code for rule in all_rules()}
    judged_codes = {code for code in rule_codes if code.startswith(PREFIXES)}
    codes = sorted(judged_codes | {result.code for result in runs if result.code})
    lines = ["| rule | right | wrong | missed | precision | recall |", "|---|---|---|---|---|---|"]
    for code in codes:
        must = [result for result in runs if result.code == code and result.must_be_found]
        right = sum(code in result.reported for result in must)
        wrong, missed = sum(result.is_wrong(code) for result in runs), len(must) - right
        shares = [f"{right / total:.0%}" if total else "" for total in (right + wrong, right + missed)]
        note = "" if code in rule_codes else " (no such rule)"
        lines.append(f"| {code}{note} | {right} | {wrong} | {missed} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _by_fault(runs: Sequence[Judged]) -> str:
    lines = ["| fault | rule | runs | costly enough | found | with other warnings |", "|---|---|---|---|---|---|"]
    for name in ("healthy", *FAULTS):
        of_fault = [result for result in runs if result.fault == name]
        must = [result for result in of_fault if result.must_be_found]
        found_count = sum(result.code in result.reported for result in must)
        wrong = sum(any(result.is_wrong(code) for code in result.reported) for result in of_fault)
        code = faults.FAULTS[name].code if name in faults.FAULTS else ""
        lines.append(f"| {name} | {code} | {len(of_fault)} | {len(must)} | {found_count} | {wrong} |")
    return "\n".join(lines)


def _bubbles(runs: Sequence[Judged]) -> str:
    lines = ["| layouts | runs | bubbles | not measured | median error | largest | within 1 point |", f"|{'---|' * 7}"]
    groups = {
        "pipeline and data parallelism": [r for r in runs if " tp" not in r.name and " ep" not in r.name],
        "with tensor parallelism": [r for r in runs if " tp" in r.name and " ep" not in r.name],
        "with experts": [r for r in runs if " ep" in r.name],
        "all": list(runs),
    }
    for name, group in groups.items():
        errors = [abs(error) for result in group for error in result.errors if not math.isnan(error)]
        unknown = sum(math.isnan(error) for result in group for error in result.errors)
        count = sum(bool(result.errors) for result in group)
        cells = [f"{statistics.median(errors):.2f}", f"{max(errors):.2f}"] if errors else ["", ""]
        close = f"{sum(error <= 1 for error in errors) / len(errors):.1%}" if errors else ""
        lines.append(f"| {name} | {count} | {len(errors)} | {unknown} | {' | '.join(cells)} | {close} |")
    return "Bubbles of ranks and steps, in points of the pipeline's duration:\n\n" + "\n".join(lines)


def _answers(runs: Iterable[Judged]) -> str:
    table = hybrid_answers.table([answer for result in runs for answer in result.answers])
    introduction = "Steps that `tracekit whatif` predicts, compared with those of the changed job when it is simulated:"
    return f"{introduction}\n\n{table}"


def _mistakes(runs: Iterable[Judged]) -> str:
    wrong = [result for result in runs if any(map(result.is_wrong, result.reported)) or _is_missed(result)]
    return "Mistakes:\n\n" + ("\n".join(f"- {_line(result)}" for result in wrong) or "none.")


def _is_missed(result: Judged) -> bool:
    return result.must_be_found and result.code not in result.reported


def _line(result: Judged) -> str:
    errors = [abs(error) for error in result.errors if not math.isnan(error)]
    bubble = f"; bubbles off by {max(errors):.2f} points at most" if errors else ""
    fault = f"{result.fault} ({result.code}, {result.share:.1%} of the run)" if result.code else result.fault
    return f"{result.name}: {fault}; reported {', '.join(result.reported) or 'nothing'}{bubble}; {result.seconds:.0f} s"


def _name(job: Job) -> str:
    assert job.hybrid is not None
    layout = job.hybrid.layout
    data = f" dp{job.hybrid.data_ranks}"
    axes = "".join(
        f" {axis}{size}" for axis, size in (("pp", layout.pp), ("tp", layout.tp), ("ep", layout.ep)) if size > 1
    )
    scatters = " sp" if job.hybrid.sequence_parallel else ""
    sizes = f"{job.model.layers} layers, {job.micro_batches} micro-batches, {job.hardware.name}"
    return f"{job.hybrid.schedule}{axes}{data}{scatters}, {sizes}, seed {job.seed}"


if __name__ == "__main__":
    sys.exit(main())
