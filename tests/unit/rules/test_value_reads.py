"""Reads of tensor values by Python in each step of a CPU run, recorded and drawn."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_cpu_ops
from tests.support.drawn_cpu_ops import Op
from tracekit.analysis.compute import value_reads
from tracekit.rules.engine import check
from tracekit.rules.host import BlockingSync
from tracekit.rules.rule import Severity

torch = pytest.importorskip("torch", reason="needs torch")

from tracekit.capture.recorder import Recorder  # noqa: E402

US = drawn_cpu_ops.US
NEEDED = Op("aten::mm", 500, is_needed=True)
NORM, ITEM = Op("aten::linalg_vector_norm", 40), Op("aten::item", 5, ())
COPY = [Op("aten::detach", 1), Op("aten::clone", 30), Op("aten::resolve_conj", 1), Op("aten::resolve_neg", 1)]


def test_reads_of_each_step_cost_their_time_and_that_of_what_only_they_need(wording) -> None:
    (finding,) = check(drawn_cpu_ops.run([NEEDED, *[NORM, ITEM] * 3]), [BlockingSync()]).findings
    assert finding.severity is Severity.WARNING
    assert finding.cost_ns == 3 * (40 + 5 + 2) * US  # with the pauses before them
    wording(finding.message, finding.sentence)


@pytest.mark.parametrize(
    ("ops", "read_us"),
    [
        ([NEEDED, NORM, Op("aten::sqrt", 2, ()), ITEM], 47),  # arithmetic on the number
        ([NEEDED, Op("aten::abs", 20), Op("aten::max", 30), ITEM], 55),
        ([NEEDED, *COPY], 33),
        ([NEEDED, *COPY * 2], 66),
        ([NEEDED, NORM], 0),  # a norm that stays a tensor, as in clipping
        ([NEEDED, NORM, Op("aten::mul_", 9), ITEM], 5),  # what is read was used before
        ([NEEDED, NORM._replace(is_needed=True), ITEM], 5),  # backward needs it: a loss
        ([NORM, ITEM], 5),  # nothing says what backward needs
        ([NEEDED, Op("aten::abs", 20, (7, 7)), NORM, ITEM], 45),  # of another tensor
        ([NEEDED, NORM, NORM, ITEM], 45),
        ([NEEDED, Op("aten::detach", 1), Op("aten::clone", 30), NORM], 0),  # copies that the program uses
    ],
)
def test_ops_lead_to_a_read_if_only_it_needs_them(ops: list[Op], read_us: int) -> None:
    reads = value_reads.value_reads(drawn_cpu_ops.trace(ops, steps=1))
    assert reads["dur_ns"].sum() == read_us * US


@pytest.mark.parametrize(("pause_us", "counted_us"), [(20, 20), (150, 103), (90, 90)])
def test_python_between_reads_of_a_loop_counts_for_as_long_as_their_copies_at_most(
    pause_us: int, counted_us: int
) -> None:
    trace = drawn_cpu_ops.trace([NEEDED, COPY[0], Op("aten::clone", 100), *COPY[2:], *COPY], steps=1, pause_us=0)
    later = trace.activities["start_ns"] > trace.activities["start_ns"][4]
    moved = trace.activities.with_columns(start_ns=trace.activities["start_ns"] + later.cast(int) * pause_us * US)
    reads = value_reads.value_reads(replace(trace, activities=moved))
    assert reads["saved_ns"].sum() - reads["dur_ns"].sum() == counted_us * US


def clone_kept(model: "torch.nn.Module", output: "torch.Tensor") -> None:
    output.detach().cpu().clone()


def norms(model: "torch.nn.Module", output: "torch.Tensor") -> None:
    for parameter in model.parameters():
        parameter.grad.norm().item()


def array(model: "torch.nn.Module", output: "torch.Tensor") -> None:
    output.detach().cpu().double().numpy()


def clipping(model: "torch.nn.Module", output: "torch.Tensor") -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def stop_gradient(model: "torch.nn.Module", output: "torch.Tensor") -> None:
    (output + output.detach().clone()).sum()


READS: dict[Callable[..., None], dict[str, int]] = {
    norms: {"aten::linalg_vector_norm": 2, "aten::item": 2},
    array: {"aten::to": 3, "aten::resolve_neg": 1},
    clone_kept: {"aten::clone": 1},
    clipping: {},
    stop_gradient: {},
}


def test_recorded_reads_are_those_of_the_program(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(tmp_path, steps=f"1:{len(READS) + 1}", warmup=1, device="cpu", memory=False) as recorder:
        for read in (clipping, *READS, clipping):
            output = model(torch.ones(64, 64))
            loss = torch.nn.functional.mse_loss(output, torch.zeros(64, 64))
            loss.backward()
            read(model, output)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            recorder.step()
    reads = value_reads.value_reads(tracekit.load(tmp_path, cache=False).trace(0))
    for step, expected in enumerate(READS.values(), 1):
        counts = dict(reads.filter(step=step).group_by("name").len().iter_rows())
        counts["aten::item"] -= 1  # the loss, which backward needs
        assert {name: counts.get(name, 0) for name in expected} == expected
        assert bool(counts["aten::item"]) == ("aten::item" in expected)
        assert expected or set(counts) == {"aten::item"}


def test_a_read_during_which_the_thread_is_not_scheduled_costs_no_more_than_another() -> None:
    reads = value_reads.value_reads(drawn_cpu_ops.trace([NEEDED, ITEM._replace(us=7000)], steps=1))
    assert reads["saved_ns"].to_list() == [(20 + 1) * US]
