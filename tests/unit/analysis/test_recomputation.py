"""Forward work that runs again in backward, drawn and recorded, and the rule that compares it with free memory."""

import polars as pl
import pytest

import tracekit
from tests.support import rule_examples
from tests.support.rule_examples import GIB
from tracekit.analysis.time import backward_passes
from tracekit.replay.graph import savings, strategies
from tracekit.replay.graph.causes.device_time import RECOMPUTATION
from tracekit.rules.engine import check
from tracekit.rules.memory_reuse import NeedlessRecomputation


def judge(run, **thresholds):
    return check(run, [NeedlessRecomputation(**thresholds)])


def test_a_region_has_its_kernels_their_time_and_its_allocations():
    (found,) = rule_examples.recomputation_run(10 * GIB).table(backward_passes.regions).iter_rows(named=True)
    assert (found["evidence"], found["kernels"], found["backward"]) == ("checkpoint_node", 1, 0)
    assert (found["compute_ns"], found["activation_bytes"]) == (4 * 50_000, GIB)


def test_the_finding_states_memory_saved_and_memory_needed(wording):
    (found,) = judge(rule_examples.recomputation_run(10 * GIB)).findings
    assert (found.impact, found.cost_ns) == (0.2, 4 * 50_000)
    wording(found.message)
    wording(found.fix)


@pytest.mark.parametrize(("free_gib", "fires"), [(6, True), (5.9, False)])
def test_recomputation_is_reported_only_if_the_activations_fit_into_free_memory(free_gib, fires):
    assert bool(judge(rule_examples.recomputation_run(int(free_gib * GIB))).findings) == fires
    assert judge(rule_examples.recomputation_run(int(free_gib * GIB)), keep_free_ratio=0.0).findings


def test_missing_memory_events_are_reported():
    run = rule_examples.recomputation_run(10 * GIB)
    (trace,) = run.traces()
    trace.header["deviceProperties"] = []
    report = judge(run)
    assert report.findings == ()
    assert "profile_memory=True" in report.notes[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a folder for each variant of checkpointing: four layers, of which three are checkpointed, in two steps."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = torch.nn.RMSNorm(16), torch.nn.Linear(16, 32)
            self.down = torch.nn.Linear(32, 16)

        def forward(self, stream):
            return stream + self.down(torch.nn.functional.silu(self.up(self.norm(stream))))

    layers = [Layer() for _ in range(4)]
    inputs = torch.randn(8, 16, requires_grad=True)

    def step(checkpointed, reentrant):
        stream = inputs
        for number, layer in enumerate(layers):
            again = number < checkpointed
            stream = checkpoint(layer, stream, use_reentrant=reentrant) if again else layer(stream)
        stream.sum().backward()

    folders = {}
    for name, checkpointed, reentrant in (("reentrant", 3, True), ("other", 3, False), ("none", 0, False)):
        step(checkpointed, reentrant)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for number in range(2):
                with torch.profiler.record_function(f"ProfilerStep#{number}"):
                    step(checkpointed, reentrant)
        folders[name] = tmp_path_factory.mktemp(name)
        profiler.export_chrome_trace(str(folders[name] / "rank0.pt.trace.json"))
    return folders


@pytest.mark.parametrize(("name", "evidence"), [("reentrant", "checkpoint_node"), ("other", "forward_ops")])
def test_both_variants_of_checkpointing_are_recognized_in_recordings_by_layer(recorded, name, evidence):
    again = backward_passes.recomputed_activities(tracekit.load(recorded[name], cache=False).trace(0))
    by_step = again.group_by("step").agg(pl.col("region").n_unique(), (pl.col("name") == "aten::linear").sum())
    assert by_step.sort("step").rows() == [(0, 3, 6), (1, 3, 6)]
    assert set(again["evidence"]) == {evidence}
    assert not again["name"].str.contains("backward").any()


def test_without_checkpointing_nothing_runs_again(recorded):
    assert backward_passes.recomputed_activities(tracekit.load(recorded["none"], cache=False).trace(0)).is_empty()


@pytest.mark.parametrize("name", ["reentrant", "other"])
def test_replays_of_a_cpu_run_leave_out_what_runs_again_and_the_pauses_before_it(recorded, name):
    run = tracekit.load(recorded[name], cache=False)
    trace = run.trace(0)
    again = backward_passes.recomputed_activities(trace)
    calls = trace.activities.filter(pl.col("step").is_not_null()).sort("start_ns")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    since_ns = (end_ns - end_ns.shift(1)).alias("since_ns")  # no op of this run contains another one
    repeated = calls.with_columns(since_ns).filter(pl.col("id").is_in(again["id"].implode()))
    saving = savings.saving(run, RECOMPUTATION.name)
    assert saving.saved_ns == pytest.approx(repeated["since_ns"].sum() / 2, rel=0.02)
    # In backward the last checkpointed layer runs again first.
    regions = again.group_by("step", "region").agg(pl.col("start_ns").min(), pl.col("id")).sort("start_ns")
    firsts = regions.group_by("step").agg(pl.col("id").first()).explode("id")
    fewer = strategies.predict_less_recomputation(run, 1)
    first_ns = repeated.filter(pl.col("id").is_in(firsts["id"].implode()))["since_ns"].sum() / 2
    assert fewer.step_ns - fewer.predicted_ns == pytest.approx(first_ns, rel=0.05)
    assert 0 < first_ns < repeated["since_ns"].sum() / 2


def test_a_run_that_recomputes_nothing_has_no_such_saving(recorded):
    saving = savings.saving(tracekit.load(recorded["none"], cache=False), RECOMPUTATION.name)
    assert saving.saved_ns == 0
    assert saving.unavailable_reason
