"""From a finding to its moment: the timeline opens at the rank, step and time that the finding quotes."""

import re
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("streamlit")

from dashboard import findings, run_catalog, run_store
from dashboard.components.timeline import timeline_store
from dashboard.pages import timeline
from dashboard.run_store import tables
from tests.support.selection import others_in_accuracy
from tracekit.report import phrases, quoted_moment
from tracekit.sync import alignment

QUOTED = r'<i class="quoted" style="left:[\d.]+%;width:([\d.]+)%">'
ROOT = Path(__file__).parents[3]
SAMPLES, SHARED = ROOT / "sample_traces", ROOT.parent / "shared" / "traces"
FOLDERS = sorted({str(file.parent.relative_to(SAMPLES)) for file in SAMPLES.rglob("rank00000.pt.trace.json.gz")})
SHARED_FOLDERS = (
    "hta_cpu_gloo",
    "hta_ddp_v100_memory",
    "hta_dlrm_a100",
    "hta_event_sync",
    "hta_nccl_args_a100",
    "hta_pair_of_128",
    "kineto_resnet_v100_memory",
    "megatron_tp8_a100_8ranks",
    "merged_ddp_mi300_4ranks",
    "nanogpt_h100_8ranks",
    "torchrec_v100_4ranks",
    "tracelens_h100_memory_stacks",
    "tracelens_mi300_resnet_ddp",
)
EVERYDAY = [SAMPLES / "faults" / "slow-rank", SAMPLES / "faults" / "late-launch"]


@pytest.mark.parametrize(
    "folder",
    others_in_accuracy([*map(SAMPLES.joinpath, FOLDERS), *map(SHARED.joinpath, SHARED_FOLDERS)], EVERYDAY),
    ids=lambda folder: folder.name,
)
def test_each_finding_opens_the_moment_that_it_quotes(folder):
    if not folder.is_dir():
        pytest.skip(f"needs ../shared/traces/{folder.name}, which is not part of the project")
    (entry,) = run_catalog.Catalog((str(folder),)).listing().entries
    run = run_store.open_run(entry)
    by_key = findings.by_key(run.report.findings)
    quoting = {key: finding for key, finding in by_key.items() if phrases.has_moment(finding)}
    assert quoting or not [finding for finding in by_key.values() if finding.impact]
    for key, finding in quoting.items():
        row = quoted_moment.quoted_row(finding)
        window = row.get("window") or 0
        opened = timeline_store.open_timeline(entry, window, lambda *_: None, open_run=run)
        jump = timeline._moment(opened, {key: finding}, key)
        place = phrases.place(finding)
        late = next((row[column] for column in phrases.LATE_RANK_COLUMNS if row.get(column) is not None), None)
        assert jump.ranks[0] == (row["rank"] if late is None else late), place
        assert row.get("step") is None or f"{row['step']}" in place, place
        at = pl.DataFrame([{"window": window, "rank": row["rank"], "start_ns": row["start_ns"]}])
        begin_ns = alignment.on_run_clock(at, opened.scene.offsets, ("start_ns",))["start_ns"][0]
        origin_ns = opened.scene.span[0]
        assert jump.start_ns <= begin_ns - origin_ns, place
        assert begin_ns + row["dur_ns"] - origin_ns <= jump.end_ns or jump.end_ns == opened.scene.span[1] - origin_ns
        assert jump.end_ns - jump.start_ns <= 4 * row["dur_ns"] + 4_001, place
        if jump.track is not None:
            track = opened.scene.tracks.filter(track=jump.track).row(0, named=True)
            assert track["rank"] == row["rank"], place
            has_host = opened.scene.tracks.filter(rank=row["rank"], role="host").height
            assert track["role"] == "host" or not (findings.is_of_host(finding) and has_host), place
        else:
            assert jump.ranks[1:], place
        if jump.selected is not None:
            track = opened.scene.tracks.filter(track=jump.selected["track"]).row(0, named=True)
            assert track["rank"] == row["rank"], place
            begin_in_run_ns = begin_ns - origin_ns
            shared_ns = min(jump.selected["start"] + jump.selected["dur"], begin_in_run_ns + row["dur_ns"])
            shared_ns -= max(jump.selected["start"], begin_in_run_ns)
            assert 2 * shared_ns >= row["dur_ns"], place
        picture = quoted_moment.picture(finding, run.table(tables.BREAKDOWN_BY_STEP), run.table(tables.RUN_CLOCK))
        assert re.findall(r"<b>rank (\d+)</b>", picture) == [str(rank) for rank in jump.ranks], place
        shown_ns = row["dur_ns"] + 2 * quoted_moment.context_ns(row["dur_ns"])
        (width,) = re.findall(QUOTED, picture)
        assert float(width) == pytest.approx(100 * row["dur_ns"] / shown_ns, abs=0.001), place
    if folder.name == "slow-rank" and folder.parent.name == "faults":
        straggler = next(key for key, finding in quoting.items() if finding.code == "RANK001")
        assert timeline._moment(opened, quoting, straggler).selected["name"] == "gloo:all_gather"
