"""One subject on one path, in a separate process: ``python -m benchmarks.measure SUBJECT PATH``.

Prints a line of JSON: wall and CPU seconds of the work, without imports, including all threads and child processes.
"""

import gzip
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Work = Callable[[str], object]


def tracekit(*, cache: bool = False) -> Work:
    from tracekit.analysis.time import breakdown
    from tracekit.ingest import loader

    def load_and_summarize(path: str) -> object:
        run = loader.load(path, cache=cache)
        run.measure((breakdown.by_rank, breakdown.by_step))
        return breakdown.slowest_device_by_rank(run)

    return load_and_summarize


def tracekit_cached() -> Work:
    return tracekit(cache=True)


def hta() -> Work:
    import logging

    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.CRITICAL)

    def load_and_summarize(path: str) -> object:
        analysis = TraceAnalysis(trace_dir=path)
        return [analysis.get_comm_comp_overlap(visualize=False), analysis.get_temporal_breakdown(visualize=False)]

    return load_and_summarize


def hta_load() -> Work:
    """HTA has no summary for a run without a device."""
    import logging

    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.CRITICAL)
    return lambda path: TraceAnalysis(trace_dir=path)


def json_floor() -> Work:
    return _floor(lambda raw: json.loads(raw.decode("utf-8", "replace")))


def orjson_floor() -> Work:
    import orjson

    return _floor(orjson.loads)


def msgspec_floor() -> Work:
    import msgspec

    return _floor(msgspec.json.Decoder().decode)


def simdjson_floor() -> Work:
    import simdjson

    parser = simdjson.Parser()
    return _floor(lambda raw: bool(parser.parse(raw)))  # the bool releases the document, so the parser is reused


def _floor(parse: Callable[[bytes], object]) -> Work:
    from isal import igzip

    def gunzip_and_parse(path: str) -> object:
        for file in trace_files(Path(path)):
            raw = file.read_bytes()
            parse(igzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        return None

    return gunzip_and_parse


SUBJECTS: dict[str, Callable[[], Work]] = {
    "tracekit": tracekit,
    "tracekit cached": tracekit_cached,
    "hta": hta,
    "hta load": hta_load,
    "json": json_floor,
    "orjson": orjson_floor,
    "msgspec": msgspec_floor,
    "simdjson": simdjson_floor,
}


def trace_files(folder: Path) -> Iterator[Path]:
    """Yield the trace files of a folder, in order."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".json", ".json.gz")) and path.name != "run.json":
            yield path


def size_bytes(folder: Path) -> int:
    """Return the uncompressed size of the trace files of a folder."""
    total = 0
    for path in trace_files(folder):
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                while chunk := file.read(1 << 24):
                    total += len(chunk)
        else:
            total += path.stat().st_size
    return total


def _cpu_s() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(resources.ru_utime + resources.ru_stime for resources in usage)


def main() -> None:
    name, path = sys.argv[1:]
    work = SUBJECTS[name]()
    sys.stdout.flush()
    own_stdout = os.dup(1)
    os.dup2(2, 1)  # libraries may print; only the result goes to stdout
    wall_s, cpu_s = time.perf_counter(), _cpu_s()
    work(path)
    times = {"wall_s": time.perf_counter() - wall_s, "cpu_s": _cpu_s() - cpu_s}
    os.write(own_stdout, (json.dumps(times) + "\n").encode())


if __name__ == "__main__":
    main()
