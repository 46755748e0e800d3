"""Ranks of CPU runs whose times of equal work vary: nobody is slow, or one rank is; and the place of what is named."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.support import shared_findings
from tests.support.kineto_files import slice_
from tracekit.analysis.host import cpu_contention
from tracekit.ingest.loader import load
from tracekit.report import phrases
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.rules.stragglers import OccasionalStraggler, Straggler, UnevenRanks

SAMPLES = Path(__file__).parents[3] / "sample_traces"
RULES = [Straggler(), UnevenRanks(), OccasionalStraggler()]
COUNT, STEPS, OPS = 4, 6, 40
TRANSFER_US, OPTIMIZER_US = 2000, 900
ON_DEVICE = ("GPU", "nvidia-smi", "--device-metrics")
SHAPES = {"aten::addmm": [[1024], [64, 512], [512, 1024], [], []], "aten::relu": [[64, 1024]]}


def gloo_run(folder, factor):
    """Return four ranks of a CPU run: 40 layers of two ops that take `factor(rank)` times their usual time a step."""
    events = [list[dict[str, object]]() for _ in range(COUNT)]
    clocks = [0.0] * COUNT
    for step in range(STEPS):
        began = list(clocks)
        for rank in range(COUNT):
            for op, usual_us in (("aten::addmm", 800), ("aten::relu", 150)) * OPS:
                took = usual_us * factor(rank)
                shapes = {"Input Dims": SHAPES[op], "External id": len(events[rank]) + 1}
                events[rank].append(slice_("cpu_op", op, clocks[rank], took, tid=1, **shapes))
                clocks[rank] += took + 1
        end = max(clocks) + TRANSFER_US
        for rank, at in enumerate(clocks):
            sizes = {"Collective name": "allreduce", "In msg nelems": 1_000_000, "dtype": "Float"}
            number = {"External id": len(events[rank]) + 1}
            events[rank].append(slice_("cpu_op", "c10d::allreduce_", at, end - at, tid=1, **sizes, **number))
            events[rank].append(slice_("user_annotation", "gloo:all_reduce", at + 1, end - at - 2, tid=1))
            number = {"External id": len(events[rank]) + 1}
            events[rank].append(slice_("cpu_op", "aten::_foreach_add_", end + 5, OPTIMIZER_US, tid=1, **number))
            clocks[rank] = end + OPTIMIZER_US + 10
            marked = slice_("user_annotation", f"ProfilerStep#{step}", began[rank], clocks[rank] - began[rank], tid=1)
            events[rank].append(marked)
            clocks[rank] += 5
    for rank, rank_events in enumerate(events):
        info = {"backend": "gloo", "rank": rank, "world_size": COUNT, "pg_count": 1}
        document = {"schemaVersion": 1, "deviceProperties": [], "distributedInfo": info, "traceEvents": rank_events}
        (folder / f"rank{rank}.pt.trace.json").write_text(json.dumps(document))
    return load(folder, cache=False)


def judge(run):
    return check(run, RULES).findings


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_rank_is_slow_where_equal_work_varies_on_all(seed, tmp_path):
    draw = random.Random(seed)
    run = gloo_run(tmp_path, lambda _: draw.choice([1, 1, 1, 6, 11]))
    findings = judge(run)
    assert findings
    assert all(finding.claim.startswith("Times of equal work vary by a factor of 11.0") for finding in findings)
    assert {finding.ranks for finding in findings if finding.code == "RANK003"} <= {tuple(range(COUNT))}
    assert not [word for finding in findings for word in ON_DEVICE if word in finding.fix]


def test_a_rank_whose_ops_are_all_slow_is_slow_also_where_times_vary(tmp_path):
    draw = random.Random(1)
    run = gloo_run(tmp_path, lambda rank: draw.choice([1, 1, 1, 6, 11]) + 8 * (rank == 2))
    first = judge(run)[0]
    assert first.severity >= Severity.WARNING
    assert first.ranks == (2,)
    assert phrases.place(first).startswith("rank 2")


def test_chance_explains_no_difference_between_ranks_whose_times_are_steady(tmp_path):
    run = gloo_run(tmp_path, lambda rank: 1.3 if rank == 2 else 1)
    steps = run.table(cpu_contention.op_excess).select("window", "step").unique()
    assert cpu_contention.varying_factor(run, (2,), steps) is None
    (found,) = judge(run)
    assert found.ranks == (2,)
    assert "cores" in found.fix
    assert not [word for word in ON_DEVICE if word in found.fix]


def test_a_rank_that_is_named_is_the_place_also_where_the_others_wait_for_another_one(tmp_path):
    # Ranks 0 and 1 are last in two steps each by much, rank 3 in two by more, and it computes longest in all of them.
    step = iter(range(STEPS * COUNT * 2 * OPS))
    late = {0: 0, 1: 3, 2: 1, 3: 3, 4: 0, 5: 3}

    def factor(rank):
        number = next(step) // (COUNT * 2 * OPS)
        return 1 + 0.6 * (late[number] == rank) + 0.3 * (rank == 3)

    for finding in judge(gloo_run(tmp_path, factor)):
        named = [int(rank) for rank in re.findall(r"\brank (\d+)", finding.claim, flags=re.IGNORECASE)]
        if len(finding.ranks) == 1 and named:
            assert phrases.place(finding).startswith(f"rank {named[0]}")


def run_folders():
    """Folders of sample_traces that are runs of several ranks."""
    return sorted({file.parent for file in SAMPLES.rglob("rank00001.pt.trace.json.gz")})


@pytest.mark.parametrize("folder", run_folders(), ids=lambda folder: "/".join(folder.parts[-2:]))
def test_a_finding_is_placed_on_the_rank_that_its_sentence_names(folder):
    for finding in shared_findings.findings(folder):
        named = {int(rank) for rank in re.findall(r"\brank (\d+)", finding.claim, flags=re.IGNORECASE)}
        placed = re.match(r"rank (\d+)", phrases.place(finding))
        if len(finding.ranks) == 1 and named and placed:
            assert int(placed[1]) in named, finding.claim
