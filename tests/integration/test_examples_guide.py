"""The guide to public runs quotes tracekit's findings and numbers from the raw files."""

import re
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.integration import raw
from tests.support import shared_findings
from tests.support.selection import others_in_accuracy
from tracekit.analysis.parallelism import rank_timelines

ROOT = Path(__file__).parents[2]
OTHERS = ROOT.parent / "shared" / "traces"
GUIDE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def words(text: str) -> str:
    return " ".join(text.split())


def kernels(run: tracekit.Run, rank: int, name: str) -> list[raw.Slice]:
    trace = raw.RawTrace(next(source.path for source in run.sources if source.rank == rank))
    return sorted((k for k in trace.of("kernel") if name in k.name), key=lambda k: k.start)


@pytest.mark.parametrize(
    ("folder", "title"),
    others_in_accuracy(
        [
            ("nanogpt_h100_8ranks", "NanoGPT"),
            ("megatron_tp8_a100_8ranks", "Megatron"),
            ("torchrec_v100_4ranks", "TorchRec"),
        ],
        [("torchrec_v100_4ranks", "TorchRec")],
    ),
)
def test_quoted_findings_are_those_of_the_run(folder: str, title: str) -> None:
    section = next(part for part in GUIDE.split("\n## ") if part.startswith(title))
    quoted = re.findall(r"(?:ERROR|WARNING|INFO)  (.*?\))\.\n  (.*?)\n(?=\n|```|  consequence)", section, re.S)
    assert len(quoted) == 2
    reported = {(found.sentence, words(found.message)) for found in shared_findings.findings(folder_of(folder))}
    assert {(words(sentence), words(message)) for sentence, message in quoted} <= reported


def folder_of(name: str) -> Path:
    if not (OTHERS / name).is_dir():
        pytest.skip("the traces of others are not beside this checkout")
    return OTHERS / name


def others(name: str) -> tracekit.Run:
    return tracekit.load(str(folder_of(name)))


@pytest.mark.accuracy
def test_gathers_of_nanogpt_last_as_long_as_the_table_says() -> None:
    run = others("nanogpt_h100_8ranks")
    rows = {
        int(rank): [float(cell.strip("*")) for cell in re.findall(r"\*{0,2}\d+\.\d+\*{0,2}", rest)]
        for rank, rest in re.findall(r"^\| (\d) \|(.*)$", GUIDE, re.M)
    }
    assert set(rows) == {0, 1, 2}
    for rank, expected in rows.items():
        found = [k for k in kernels(run, rank, "AllGather") if k.args.get("Out msg nelems") == 37_748_736]
        assert [round((k.end - k.start) / 1e6, 2) for k in found] == expected


@pytest.mark.accuracy
def test_the_shortest_of_each_all_reduce_of_megatron_sum_to_the_transfer_on_every_rank() -> None:
    run = others("megatron_tp8_a100_8ranks")
    calls = [kernels(run, rank, "AllReduce") for rank in range(8)]
    assert {len(each) for each in calls} == {84}
    shortest = sum(min(k.end - k.start for k in at) for at in zip(*calls, strict=True))
    assert f"they sum to {shortest / 1e6:.1f} ms" in words(GUIDE)
    states = run.table(rank_timelines.states)
    moved = states.filter(pl.col("state") == rank_timelines.TRANSFER).group_by("rank").agg(pl.col("dur_ns").sum())
    assert moved["dur_ns"].to_list() == pytest.approx([shortest] * 8, rel=0.005)
