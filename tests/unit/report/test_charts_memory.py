"""Pictures of memory: what is drawn of simulated programs, and nothing of names but text."""

import json

import numpy as np
import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.sample_snapshots import MIB, Simulation, frame, write
from tests.unit.report.test_charts import HOSTILE
from tracekit.analysis.memory import snapshot_files, usage
from tracekit.ingest.readers import memory_snapshots
from tracekit.model import schema
from tracekit.replay.allocator import memory_usage, playback, run_snapshots, snapshot_facts
from tracekit.report import charts

# time      0    1    2    3    4
# forward   +4             -4
# backward       +6   -6        (a block of 2 stays)
EVENTS = [(0, 1, 4, "forward"), (1, 2, 6, "backward"), (2, 2, -6, None), (3, 1, -4, None), (4, 3, 2, "backward")]


def trace(events=EVENTS, base=10, reserved=30):
    at, address, delta, phase = (list(column) for column in zip(*events, strict=True))
    columns = {
        "at_ns": np.array(at) * 1_000_000,
        "address": address,
        "delta_bytes": np.array(delta) * MIB,
        "phase": phase,
    }
    table = pl.DataFrame(columns, strict=False).with_columns(device=0, reserved_bytes=reserved * MIB)
    table = table.with_columns(allocated_bytes=pl.col("delta_bytes").cum_sum() + base * MIB)
    return drawn_traces.trace("compute aa", allocations=table)


def simulated():
    """Return a simulated program with two stacks, a block that waits for another stream, and times."""
    program = Simulation()
    live_block = program.malloc(30 * MIB)
    program.events[-1]["frames"] = [frame("forward", 12)]
    program.free(program.malloc(50 * MIB))
    program.free(program.malloc(8 * MIB, stream=7), later=True)
    for number, event in enumerate(program.events):
        event["time_us"] = 1_000_000 + 100 * number
    assert live_block.allocated
    return program


@pytest.fixture
def snapshot(tmp_path):
    return memory_snapshots.read(write(tmp_path / "rank00003.memory.pickle", simulated().document()))


def test_a_figure_has_room_for_a_legend_of_long_names():
    table = usage.over_time(trace()).filter(pl.col("owner_kind") == "phase")
    usual = charts.memory_over_time(table).layout.height
    many = pl.concat(
        table.with_columns(owner=pl.lit(f"aten::empty_strided in <module> (train.py:{line})")) for line in range(10)
    )
    # A narrow window has a line of the legend for each; Plotly gives the legend at most half of the figure.
    assert charts.memory_over_time(many).layout.height >= usual + 6 * 19


def test_owners_add_up_to_allocated_memory_at_all_times():
    table = usage.over_time(trace()).filter(pl.col("owner_kind") == "phase")
    by_owner = {owner: rows["bytes"].to_list() for (owner,), rows in table.group_by("owner", maintain_order=True)}
    assert by_owner == {
        "from before": [10 * MIB] * 5,
        "backward": [0, 6 * MIB, 0, 0, 2 * MIB],
        "forward": [4 * MIB, 4 * MIB, 4 * MIB, 0, 0],
    }
    sums = table.group_by("at_ns", maintain_order=True).agg(pl.col("bytes").sum(), pl.col("live_bytes").first())
    assert (sums["bytes"] == sums["live_bytes"]).all()


def test_many_events_are_thinned_and_the_peak_remains():
    rng = np.random.default_rng(3)
    events = []
    for number in range(5000):
        size = 9 if number == 3210 else int(rng.integers(1, 5))
        events += [(2 * number, 1, size, "forward"), (2 * number + 1, 1, -size, None)]
    table = usage.over_time(trace(events)).filter(pl.col("owner_kind") == "phase")
    assert table["at_ns"].n_unique() <= 602
    assert table["live_bytes"].max() == 19 * MIB
    assert table["live_bytes"].min() == 10 * MIB


def test_allocated_memory_is_stacked_with_its_peak_marked_and_reserved_above():
    figure = charts.memory_over_time(usage.over_time(trace()).filter(pl.col("owner_kind") == "phase"))
    areas = {line.name: line for line in figure.data if line.stackgroup}
    assert list(areas) == ["from before", "backward", "forward"]
    assert list(areas["backward"].y) == [0, 6, 0, 0, 2]
    assert list(areas["backward"].x) == [0, 1, 2, 3, 4]
    reserved = next(line for line in figure.data if line.name == "reserved")
    assert (reserved.stackgroup, set(reserved.y)) == (None, {30})
    (mark,) = figure.layout.annotations
    assert (mark.text, mark.x, mark.y) == ("peak 20 MiB", 1, 20)


def test_lifetimes_are_grouped_by_size_and_time_and_blocks_that_outlive_the_window_are_separate():
    table = usage.lifetimes(trace())
    cells = table.select("low_bytes", "high_bytes", "low_ns", "high_ns", "count", "bytes").rows()
    assert cells == [
        (2 * MIB, 4 * MIB, None, None, 1, 2 * MIB),
        (4 * MIB, 8 * MIB, 1_000_000, 3_000_000, 1, 6 * MIB),
        (4 * MIB, 8 * MIB, 3_000_000, 10_000_000, 1, 4 * MIB),
    ]
    figure = charts.block_lifetimes(table)
    assert figure.layout.xaxis.ticktext == ("1 ms", "3 ms", "longer")
    assert figure.layout.yaxis.ticktext == ("2 MiB", "4 MiB")
    assert [[cell is not None for cell in row] for row in figure.data[0].z] == [
        [False, False, True],
        [True, True, False],
    ]


def test_the_map_of_a_snapshot_draws_every_byte_of_every_state_once(snapshot):
    table = snapshot_facts.segment_map(snapshot, 0)
    assert table["bytes"].sum() == snapshot.segments["total_bytes"].sum()
    figure = charts.segment_map(table)
    drawn_bytes = {bar.name.split(":")[0]: sum(bar.x) * MIB for bar in figure.data if bar.type == "bar"}
    assert drawn_bytes == pytest.approx(
        {"allocated": 30 * MIB, "free": 62 * MIB, "waiting for another stream": 8 * MIB}
    )
    assert figure.layout.yaxis.ticktext == ("large", "large, stream 7")
    ends = [(bar.base[i] + bar.x[i], bar.y[i]) for bar in figure.data if bar.type == "bar" for i in range(len(bar.x))]
    assert all(end <= figure.layout.xaxis.range[1] for end, _ in ends)


def test_a_map_of_many_small_blocks_keeps_their_bytes(tmp_path):
    program = Simulation()
    blocks = [program.malloc(1000 * (1 + i % 40)) for i in range(4000)]
    for block in blocks[::3]:
        program.free(block)
    read = memory_snapshots.read(write(tmp_path / "rank00000.memory.pickle", program.document()))
    table = snapshot_facts.segment_map(read, 0)
    figure = charts.segment_map(table)
    bars = [bar for bar in figure.data if bar.type == "bar"]
    assert sum(len(bar.x) for bar in bars) < 2 * table.height
    assert sum(sum(bar.x) for bar in bars) * MIB == pytest.approx(table["bytes"].sum(), rel=1e-3)


def test_a_snapshots_history_is_drawn_by_the_place_in_code(snapshot):
    history, played = memory_usage.play_history(playback.from_snapshot(snapshot, 0))
    table = snapshot_facts.over_time(snapshot, history, played)
    assert set(table["owner"]) == {"forward (simulated.py:12)", "outside ops"}
    assert table["live_bytes"].max() == 80 * MIB
    assert table["reserved_bytes"].to_list()[-1] == snapshot.segments["total_bytes"].sum()
    # One of 30 MiB stays, one of 50 was freed, and so was the one that waits, as far as the program is concerned.
    lived = snapshot_facts.lifetimes(snapshot, history, played)
    assert lived.filter(pl.col("low_ns").is_null())["bytes"].to_list() == [30 * MIB]


def test_nothing_recorded_is_an_empty_figure_each():
    empty = trace([(0, 1, 4, "forward")]).allocations.clear()
    bare = drawn_traces.trace("compute aa", allocations=empty)
    for figure in (charts.memory_over_time(usage.over_time(bare)), charts.block_lifetimes(usage.lifetimes(bare))):
        assert not figure.data
    assert not charts.segment_map(pl.DataFrame(schema=snapshot_facts.MAP_COLUMNS)).data


def test_names_reach_pictures_of_memory_as_text_only(tmp_path):
    events = trace([(0, 1, 4, HOSTILE), (1, 1, -4, None)])
    program = simulated()
    for event in program.events:
        event["frames"] = [frame(HOSTILE)]
    document = program.document()
    document["segments"][0]["blocks"][0]["frames"] = [frame(HOSTILE)]
    read = memory_snapshots.read(write(tmp_path / "rank00000.memory.pickle", document))
    history, played = memory_usage.play_history(playback.from_snapshot(read, 0))
    figures = [
        charts.memory_over_time(usage.over_time(events).filter(pl.col("owner_kind") == "phase")),
        charts.memory_over_time(snapshot_facts.over_time(read, history, played)),
        charts.block_lifetimes(snapshot_facts.lifetimes(read, history, played)),
        charts.segment_map(snapshot_facts.segment_map(read, 0)),
    ]
    for figure in figures:
        text = json.dumps(figure.to_dict(), ensure_ascii=False, default=str)
        assert "&lt;" in text
        assert "<script" not in text
        assert "<img" not in text


def test_snapshots_in_a_run_folder_are_known_by_rank_and_window(tmp_path):
    (tmp_path / "window001").mkdir()
    for name in ("rank00001.memory.pickle", "window001/rank00000.memory.pickle", "rank00000.memory.pickle"):
        write(tmp_path / name, simulated().document())
    run = drawn_traces.run(drawn_traces.trace("compute aa"), path=str(tmp_path))
    assert [(each.window, each.rank) for each in snapshot_files.files(run)] == [(0, 0), (0, 1), (1, 0)]
    tables = {fact.name: run.table(fact) for fact in run_snapshots.TABLES}
    for name, expected in schema.SNAPSHOT_TABLES.items():
        assert tables[f"snapshot_{name}"].columns == ["window", "rank", *expected.schema]
    assert tables["snapshot_blocks"].select("window", "rank").unique().height == 3
    assert snapshot_files.files(drawn_traces.run(drawn_traces.trace("compute aa"))) == ()


def test_categories_are_bars_with_their_bytes_and_shares_the_largest_on_top():
    table = pl.DataFrame(
        {
            "category": ["gradients", "parameters", "activations"], "bytes": [MIB, 2 * MIB, 5 * MIB],
            "count": [3, 4, 1000], "peak_ratio": [0.125, 0.25, 0.625], "evidence": ["<b>", None, "why"],
        }
    )  # fmt: skip
    figure = charts.memory_categories(table)
    (bars,) = figure.data
    assert list(figure.layout.yaxis.ticktext) == ["activations", "parameters", "gradients"]
    assert list(bars.x) == [5, 2, 1]
    assert list(bars.text) == ["5 MiB (62.5%)", "2 MiB (25.0%)", "1 MiB (12.5%)"]
    assert [row[0] for row in bars.customdata] == ["1,000", "4", "3"]
    assert charts.memory_categories(table.clear()).data[0].x.size == 0
