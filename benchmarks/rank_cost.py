"""What one rank costs a check: CPU time to read and to measure, and the bytes that its facts take and that are sent.

    python -m benchmarks.rank_cost TRACE…

Each trace is read and measured twice in this process, without the cache; the second time counts. With these rates,
docs/lab/scale_measurements.md estimates runs that no machine here can hold.
"""

import argparse
import gzip
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import polars as pl

from tracekit.executors import worker_pool
from tracekit.ingest import loader
from tracekit.model.trace import Trace, TraceFact
from tracekit.replay.graph import dependency_graph
from tracekit.rules.registry import all_rules

T = TypeVar("T")
_MB = 1e6
_HEADER = (
    "| trace | JSON MB | file MB | events | read, CPU s | facts, CPU s | tables MB | sent MB "
    "| replay nodes, CPU s | nodes MB | nodes sent MB |"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each trace and print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_cost", description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    lines = [_HEADER, "|---" * (_HEADER.count("|") - 1) + "|"]
    lines += [row(path) for path in parser.parse_args(arguments).traces]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def row(path: str) -> str:
    """Return the row of the first trace of a run."""
    facts = tuple(dict.fromkeys(fact for rule in all_rules() for fact in rule.facts))
    graph = tuple(fact for fact in dependency_graph.FACTS if fact not in facts)
    source = loader.load(path, cache=False).sources[0]
    for _ in range(2):
        trace, read_s = _time_call(source.read)
        tables, facts_s = _time_call(lambda trace=trace: _measure(trace, facts))
        nodes, nodes_s = _time_call(lambda trace=trace: _measure(trace, graph))
    stored = Path(source.path).read_bytes()
    raw_bytes = len(gzip.decompress(stored)) if stored[:2] == b"\x1f\x8b" else len(stored)
    numbers = [
        f"{raw_bytes / _MB:.1f}",
        f"{len(stored) / _MB:.1f}",
        f"{trace.activities.height + trace.ops.height:,}",
        f"{read_s:.2f}",
        f"{facts_s:.2f}",
        *_sizes(tables),
        f"{nodes_s:.2f}",
        *_sizes(nodes),
    ]
    return f"| {Path(path).name} | {' | '.join(numbers)} |"


def _measure(trace: Trace, facts: Sequence[TraceFact]) -> list[pl.DataFrame]:
    return [fact(trace) for fact in facts]


def _sizes(tables: Sequence[pl.DataFrame]) -> tuple[str, str]:
    """Return the size of tables in memory, and as a worker sends them, in MB."""
    sent_bytes = sum(len(packed) for packed in worker_pool.pack(tables))
    return f"{sum(table.estimated_size() for table in tables) / _MB:.2f}", f"{sent_bytes / _MB:.2f}"


def _time_call(work: Callable[[], T]) -> tuple[T, float]:
    began_s = time.process_time()
    result = work()
    return result, time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(main())
