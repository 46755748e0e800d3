"""Annotations of kernels in CUDA graphs: a recording on an H200, annotated by torch's own program.

To capture annotations needs a driver of CUDA 13.1. Here the replayed kernels get node ids, which torch's profiler of
2.12 writes, and annotations in the form in which torch.cuda.graph(…, enable_annotations=True) collects them.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tracekit
from tests.support.cli_runner import ROOT
from tracekit.analysis.compute import call_paths, kernels
from tracekit.model.run import Run

SAMPLE = ROOT / "sample_traces" / "gpu" / "cuda-graphs" / "rank00000.pt.trace.json.gz"


def with_node_ids() -> dict[str, Any]:
    """The sample; each replayed kernel has the number of its place in the graph."""
    document: dict[str, Any] = json.loads(gzip.decompress(SAMPLE.read_bytes()))
    events = document["traceEvents"]
    launches = {e["args"]["correlation"] for e in events if "GraphLaunch" in str(e.get("name"))}
    place: Counter[int] = Counter()
    for event in events:
        if event.get("cat") == "kernel" and event["args"].get("correlation") in launches:
            place[event["args"]["correlation"]] += 1
            event["args"]["graph node id"] = place[event["args"]["correlation"]]
    return document


def annotated(folder: Path, annotations: dict[int, list[Any]]) -> tuple[dict[str, Any], Run]:
    joiner = pytest.importorskip("torch.cuda._annotate_cuda_graph_trace", reason="newer torch annotates as it exports")
    document = with_node_ids()
    assert joiner.annotate_trace(document, annotations) > 0
    path = folder / "rank00000.pt.trace.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return document, tracekit.load(str(folder), cache=False)


def test_kernels_of_a_graph_have_the_modules_that_its_annotations_state(tmp_path: Path) -> None:
    annotations = {
        1: [{"module_fqn": "tok_embeddings"}],
        2: [{"module_fqn": "layers.0.attention"}, {"module_fqn": "layers.0.attention.wq"}],  # the inner one is last
        3: ["residual"],
        4: [{"name": "loss", "layer": "1"}],
    }
    document, run = annotated(tmp_path, annotations)
    expected: Counter[str] = Counter()
    names = {1: "tok_embeddings", 2: "layers.0.attention.wq", 3: "residual", 4: "loss"}
    for event in document["traceEvents"]:
        number = event.get("args", {}).get("graph node id")
        if number in names:
            expected[names[number]] += 1
    modules = call_paths.activity_modules(run.trace(0)).drop_nulls()
    assert Counter(modules.to_list()) == expected
    assert kernels.missing_modules(run) is None
    table = kernels.kernels(run, by=["module"])
    assert dict(table.filter(kind="compute").drop_nulls("module").select("module", "count").rows()) == expected


def test_a_collective_of_a_graph_is_what_its_annotation_states(tmp_path: Path) -> None:
    stated = {
        "Collective name": "_allgather_base", "In msg nelems": 2, "Out msg nelems": 8, "Group size": 4, "Seq": 7,
        "Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1, 2, 3]",
        "Rank": 0, "dtype": "BFloat16", "Is asynchronized op": False,
    }  # fmt: skip
    document, run = annotated(tmp_path, {5: [stated]})
    calls = run.trace(0).collectives
    assert len(calls) == sum(event.get("args", {}).get("graph node id") == 5 for event in document["traceEvents"])
    row = calls.select("op", "group", "seq", "dtype", "sent_bytes", "received_bytes", "group_size").unique().rows()
    assert row == [("all_gather", "0", 7, "BFloat16", 4, 16, 4)]


def test_node_ids_alone_name_no_module(tmp_path: Path) -> None:
    document = with_node_ids()
    (tmp_path / "rank00000.pt.trace.json").write_text(json.dumps(document), encoding="utf-8")
    run = tracekit.load(str(tmp_path), cache=False)
    assert run.trace(0).activities["graph_annotation"].null_count() == len(run.trace(0).activities)
    assert kernels.missing_modules(run) is not None


@pytest.mark.parametrize("value", [7, None, True, [1], {"a": 1}, "", "x" * 5000])
def test_annotations_of_any_type_are_read_or_left_out(tmp_path: Path, value: object) -> None:
    document = with_node_ids()
    for event in document["traceEvents"]:
        if "graph node id" in event.get("args", {}):
            event["args"]["module_fqn"] = value
    (tmp_path / "rank00000.pt.trace.json").write_text(json.dumps(document), encoding="utf-8")
    stated = tracekit.load(str(tmp_path), cache=False).trace(0).activities["graph_annotation"].drop_nulls().unique()
    assert stated.to_list() == (["x" * 1000] if value == "x" * 5000 else [])
