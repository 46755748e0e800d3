"""Simulated traces are ordinary Kineto files: HTA, which knows nothing of us, reads them and measures the same."""

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.unit.simulate.jobs import job, written
from tracekit.model import intervals


@pytest.mark.filterwarnings("ignore::Warning")
def test_hta_measures_the_overlap_that_was_simulated(tmp_path: Path) -> None:
    trace_analysis = pytest.importorskip("hta.trace_analysis", reason="needs the extra [hta]")
    simulated = written(job("yafsdp", steps=2), tmp_path / "run")
    files = {rank: str(path) for rank, path in enumerate(sorted((tmp_path / "run").glob("*.json.gz")))}
    logging.disable(logging.CRITICAL)
    try:
        found = trace_analysis.TraceAnalysis(trace_files=files, trace_dir="").get_comm_comp_overlap(visualize=False)
    finally:
        logging.disable(logging.NOTSET)
    for rank, record in simulated.recording.ranks.items():
        spans = np.array([(a.start_ns, a.end_ns) for a in record.activities])
        is_collective = np.array([a.kernel.collective is not None for a in record.activities])
        computes = np.array([a.kernel.kind == "compute" for a in record.activities])
        both = intervals.intersect(spans[is_collective], spans[computes])
        expected = 100 * intervals.length(both) / intervals.length(spans[is_collective])
        # HTA cuts times to whole µs.
        assert found.set_index("rank")["comp_comm_overlap_pctg"][rank] == pytest.approx(expected, abs=0.2)
