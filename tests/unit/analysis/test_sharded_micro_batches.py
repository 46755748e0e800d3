import warnings
from pathlib import Path

from tracekit.analysis.parallelism import pipeline_communication
from tracekit.ingest import loader

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"


def test_collectives_of_saves_have_no_spans_and_the_others_lie_in_the_recording():
    run = loader.load(SAMPLE)
    calls = run.table(pipeline_communication.data_parallel_calls)
    assert calls["dur_ns"].null_count()  # calls of the save are not part of the transfers of steps
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy warns where it casts a missing time
        spans = pipeline_communication.exposed_spans(run)
    for (_, rank), exposed in spans.items():
        own = calls.filter(rank=rank)
        assert exposed.size
        assert own["start_ns"].min() <= exposed.min() < exposed.max() <= own["end_ns"].max()
