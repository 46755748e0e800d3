"""How often the class of a stall is named rightly, for stalls manufactured on 2 real ranks.

    python -m benchmarks.stalls --repetitions 20 --folder /dev/shm/stalls

Each repetition is a training of a few steps with a save in it, recorded and judged like any other. A class is named
rightly where its rule speaks and none of its rivals does: of what a save that blocks is made of there is one answer,
and so of what a save in the background takes from training. Busy neighbours make a machine that lacks processors.
"""

import argparse
import collections
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import stall_scenarios
from benchmarks.results import machine_description
from benchmarks.stall_scenarios import SCENARIOS, WORLD_SIZE
from tracekit.analysis.checkpoint import saves
from tracekit.ingest import loader
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace
from tracekit.rules.engine import check
from tracekit.rules.registry import RULES

_RIVALS = (
    (*(f"CKPT00{number}" for number in range(2, 9)), "CKPT016"),
    ("CKPT009", "CKPT010"),
    ("CKPT011",),
    ("CKPT012",),
)
CLASSES = tuple(rule for rule in RULES if rule.code in {code for group in _RIVALS for code in group})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table as Markdown; 1 where a class was named rightly in under 95%."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20, help="of each scenario (default: 20)")
    parser.add_argument(
        "--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS), help="scenarios (default: all)"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to save (default: a temporary folder)")
    options = parser.parse_args(arguments)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="stalls-") as folder:
        perform(Path(folder), options.only, options.repetitions)
        print(machine_description())
        print(
            "| scenario | made by | rule | correctly named | also reported | explained share of blocked time |\n"
            "|---|---|---|---|---|---|"
        )
        shares = [_row(name, Path(folder), options.repetitions) for name in options.only]
    return int(min(shares) < 0.95)


def perform(folder: Path, names: Sequence[str], repetitions: int) -> None:
    """Run scenarios on real ranks; each repetition leaves its logs in `log_of`."""
    torch.multiprocessing.spawn(_serve, (str(folder), list(names), repetitions), WORLD_SIZE)


def _serve(rank: int, folder: str, names: Sequence[str], repetitions: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD_SIZE)
    stall_scenarios.record()
    for number in range(repetitions):
        for name in names:
            stall_scenarios.perform(name, Path(folder) / f"{name}-{number}")
    dist.destroy_process_group()


def log_of(folder: Path, name: str, number: int) -> Path:
    """Return the folder of one repetition's logs."""
    return folder / f"{name}-{number}" / "log"


def judge_log(log: Path) -> tuple[set[str], float]:
    """Return the codes of the classes that are named, and how far the stages sum to the time blocked, at the least."""
    run = _load(log)
    codes = {finding.code for finding in check(run, [rule() for rule in CLASSES]).findings}
    blocked = run.table(saves.by_rank).filter(pl.col("blocked_ns") > 0)
    explained = (blocked["stages_ns"] / blocked["blocked_ns"]).to_list()
    return codes, min(explained, default=1.0)


def _load(log: Path) -> Run:
    # No trace was recorded: the logs are all that is judged.
    traces = []
    for rank in range(WORLD_SIZE):
        path = str(log / "no.trace")
        traces.append(loader.with_companions(Trace(rank, 0, path), path))
    sources = [Source(trace.rank, 0, trace.path, 0, lambda trace=trace: trace) for trace in traces]  # type: ignore[misc]
    return Run(str(log), sources)


def _row(name: str, folder: Path, repetitions: int) -> float:
    scenario = SCENARIOS[name]
    results = [judge_log(log_of(folder, name, number)) for number in range(repetitions)]
    expected = {scenario.code} - {""}
    rivals = {code for group in _RIVALS for code in group if scenario.code in group or not expected} - expected
    right = sum(expected <= codes and not codes & rivals for codes, _ in results)
    extra_codes = collections.Counter(code for codes, _ in results for code in codes - expected)
    also_reported = ", ".join(f"{code} × {count}" for code, count in sorted(extra_codes.items())) or "—"
    explained = min(share for _, share in results)
    code = scenario.code or "none"
    print(
        f"| {name} | {scenario.how} | {code} | {right} of {repetitions} | {also_reported} | {explained:.1%} |",
        flush=True,
    )
    return right / repetitions


if __name__ == "__main__":
    sys.exit(main())
