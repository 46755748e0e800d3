"""Exposed copies between host and device: how much they cost, which op asked for them, and what is not such a copy."""

from pathlib import Path

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.rule_examples import copying_run
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.rules.stragglers import Straggler
from tracekit.rules.streams import ExposedCopy

OTHERS = Path(__file__).parents[3].parent / "shared" / "traces"


def judged(run, **thresholds):
    return check(run, [ExposedCopy(**thresholds)]).findings


def test_an_exposed_copy_costs_its_time_without_compute(wording):
    # Of 20 characters of 50 µs, 8 are a copy without compute.
    (found,) = judged(copying_run())
    assert (found.severity, found.impact, found.cost_ns) == (Severity.WARNING, 0.4, 8 * drawn_hosts.UNIT_NS)
    wording(found.message)
    assert "pin_memory=True" in found.fix
    assert found.evidence["direction"].to_list() == ["host to device"] * 2


def test_a_slow_link_is_called_slow(wording):
    (found,) = judged(copying_run(), slow_bytes_per_ns=3.0)
    wording(found.message)


def test_a_copy_to_the_host_gets_a_fix_for_that(wording):
    (found,) = judged(copying_run(name="Memcpy DtoH (Device -> Pinned)"))
    wording(found.fix)
    assert "Pageable" not in found.fix


def test_both_directions_are_named_with_their_own_time():
    picture = """
        step     0000000000000000000011111111111111111111
        compute  aaaaaaaa........bbbbcccccccc........dddd
        copy     ........hhhhhddd............hhhhhddd....
    """
    names = {"h": "Memcpy HtoD (Pageable -> Device)", "d": "Memcpy DtoH (Device -> Pageable)"}
    columns = {letter: {"name": name, "bytes": 1 << 20} for letter, name in names.items()}
    (found,) = judged(drawn_traces.run(drawn_hosts.trace(picture, columns=columns)))
    assert found.cost_ns == 8 * drawn_hosts.UNIT_NS
    assert "host to device, 250 µs; device to host, 150 µs" in found.claim
    assert "pin_memory=True" in found.fix
    assert "every N steps" in found.fix


def test_a_direction_that_costs_little_is_not_named():
    picture = f"""
        step     {"0" * 100}
        compute  {"a" * 40}{"." * 41}{"b" * 19}
        copy     {"." * 40}{"h" * 40}d{"." * 19}
    """
    columns = {"h": {"name": "Memcpy HtoD (Pinned -> Device)"}, "d": {"name": "Memcpy DtoH (Device -> Pinned)"}}
    (found,) = judged(drawn_traces.run(drawn_hosts.trace(picture, columns=columns)))
    assert "device to host" not in found.claim


@pytest.mark.parametrize(
    "columns",
    [
        {"phase": "checkpoint"},
        {"kind": "compute"},
        {"phase": "checkpoint", "kind": "memset", "name": "Memset (Device)"},
    ],
)
def test_what_is_no_copy_of_training_is_left_out(columns):
    assert judged(copying_run(**columns)) == ()


@pytest.mark.parametrize(
    ("columns", "direction", "advice"),
    [
        ({"name": "Memcpy PtoP (Device -> Device)"}, "peer to peer", "other device"),
        ({"name": "CopyDeviceToDevice"}, "within a device", "views"),
        ({"name": "Memcpy DtoD (Device -> Device)"}, "within a device", "views"),
        ({"name": "Memcpy AtoA (Array -> Array)"}, "within a device", "views"),
        ({"name": "Memcpy HtoH (Managed -> Managed)"}, "managed memory", "cudaMemPrefetchAsync"),
        ({"name": "zeCommandListAppendMemoryCopy(S2D)"}, "managed memory", "cudaMemPrefetchAsync"),
        ({"name": "Memset (Device)", "kind": "memset"}, "memory set", "torch.empty"),
        ({"name": ""}, "unknown direction", "stream of its own"),
    ],
)
def test_any_other_copy_and_memory_set_costs_its_exposed_time(columns, direction, advice):
    (finding,) = judged(copying_run(**columns))
    assert (finding.severity, finding.impact, finding.cost_ns) == (Severity.WARNING, 0.4, 8 * drawn_hosts.UNIT_NS)
    assert finding.evidence["direction"].unique().to_list() == [direction]
    assert advice in finding.fix


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("zeCommandListAppendMemoryCopy(M2D)", "host to device"),
        ("Memcpy D2M", "device to host"),
        ("zeMemoryCopy(Host to Device)", "host to device"),
        ("Memcpy HtoA (Pinned -> Array)", "host to device"),
        ("Memcpy AtoH (Array -> Pinned)", "device to host"),
        ("MemcpyD2H", "device to host"),
    ],
)
def test_copies_between_host_and_device_are_known_by_the_names_of_every_vendor(name, direction):
    (finding,) = judged(copying_run(name=name))
    assert finding.evidence["direction"].unique().to_list() == [direction]


def test_copies_of_the_host_and_others_are_separate_findings():
    picture = """
        step     00000000000000000000
        compute  aaaaaaaa........bbbb
        copy     ........hhhhdddd....
    """
    names = {"h": {"name": "Memcpy HtoD (Pinned -> Device)"}, "d": {"name": "Memcpy DtoD (Device -> Device)"}}
    findings = judged(drawn_traces.run(drawn_hosts.trace(picture, columns=names)))
    assert [finding.impact for finding in findings] == [0.2, 0.2]
    assert len({finding.id for finding in findings}) == 2


def test_other_copies_of_a_small_share_are_silent():
    assert judged(copying_run(name="Memcpy DtoD (Device -> Device)"), min_device_ratio=0.41) == ()


def test_a_copy_that_compute_hides_costs_nothing():
    picture = """
        step     00000000000000000000
        compute  aaaaaaaaaaaaaaaabbbb
        copy     ........hhhhhhhh....
    """
    name = {"name": "Memcpy HtoD (Pinned -> Device)"}
    assert judged(drawn_traces.run(drawn_hosts.trace(picture, columns={"h": name}))) == ()


def test_a_window_without_marked_steps_is_judged():
    picture = "compute  aaaaaaaa........bbbb\ncopy     ........hhhhhhhh...."
    whole = pl.DataFrame({"step": [None], "start_ns": [0], "end_ns": [20 * drawn_hosts.UNIT_NS], "device": [0]})
    trace = drawn_hosts.trace(picture, columns={"h": {"name": "Memcpy DtoH (Device -> Pageable)"}}, steps=whole)
    (found,) = judged(drawn_traces.run(trace))
    assert (found.impact, found.is_of_window) == (0.4, True)


def test_a_run_on_the_cpu_has_no_copies():
    assert judged(load(Path(__file__).parents[3] / "sample_traces" / "faults" / "healthy-ddp")) == ()


def test_recorded_stacks_name_the_line_that_copies(wording):
    folder = OTHERS / "tracelens_h100_memory_stacks"
    if not folder.is_dir():
        pytest.skip("needs ../shared/traces/tracelens_h100_memory_stacks, which is not part of the project")
    (found,) = judged(load(folder), min_exposed_ratio=0.01)
    assert found.severity == Severity.INFO
    wording(found.message)


def copying_ranks(*ranks, steps=10):
    """Return ranks that compute for so long in each step, copy for so long, and then average their gradients."""
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(len(ranks)))]})
    longest, traces = max(computed + copied for computed, copied in ranks), []
    for rank, (computed, copied) in enumerate(ranks):
        rows, columns, calls, ops = {"step": "", "compute": "", "comm": ""}, {}, {}, {}
        for step in range(steps):
            # compute  aabbccddeekkkkkkffgghhiijj....
            # comm     ..........................xxxx   (ranks that are done earlier wait in it)
            letters = [chr(0x4E00 + 16 * step + number) for number in range(12)]
            blocks = [letter * (computed // 10) for letter in letters[:10]]
            waiting = longest - computed - copied + 2
            rows["compute"] += "".join((*blocks[:5], letters[10] * copied, *blocks[5:])) + "." * waiting
            rows["comm"] += "." * (computed + copied) + letters[11] * waiting
            rows["step"] += str(step) * (longest + 2)
            copy = f"Memcpy HtoD (Pinned -> Device) {step}"
            columns[letters[10]], ops[letters[11]] = {"kind": "memcpy", "name": copy}, "all_reduce"
            launched = [*letters[:5], copy, *letters[5:10], letters[11]]
            calls |= {name: 12 * step + number for number, name in enumerate(launched)}
        picture = "\n".join(f"{lane} {cells}" for lane, cells in rows.items())
        traces.append(drawn_hosts.trace(picture, calls, rank=rank, groups=groups, ops=ops, columns=columns))
    return drawn_traces.run(*traces)


@pytest.mark.parametrize(
    ("ranks", "saved", "severity"),
    [
        (((20, 6), (20, 6)), 6, Severity.WARNING),
        (((20, 6), (20, 0)), 6, Severity.WARNING),
        (((20, 6), (30, 0)), 0, Severity.INFO),
        (((20, 14), (30, 0)), 4, Severity.WARNING),
    ],
    ids=["all copy", "one copies more", "a rank that computes longer hides it", "the rest of it counts"],
)
def test_copies_cost_what_a_replay_without_them_saves(ranks, saved, severity):
    (finding,) = judged(copying_ranks(*ranks))
    assert (finding.severity, finding.is_priced) == (severity, True)
    assert finding.cost_ns == pytest.approx(saved * drawn_hosts.UNIT_NS, rel=0.05)


def test_a_rank_that_is_late_by_its_copies_is_no_straggler_of_its_own():
    report = check(copying_ranks((20, 10), (20, 0), (20, 0)), [ExposedCopy(), Straggler()])
    (copies, *others) = report.findings
    assert (copies.code, copies.ranks, copies.severity) == ("HOST004", (0,), Severity.WARNING)
    assert copies.cost_ns == pytest.approx(10 * drawn_hosts.UNIT_NS, rel=0.05)
    assert all(other.severity is Severity.INFO and other.consequence_of == copies.id for other in others)
