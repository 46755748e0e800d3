"""Files that state the same run in another way: every command must answer the same, whatever the file looks like."""

import gzip
import json
import random
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.support import cli_runner

Trace = dict[str, Any]
COMMANDS = (
    ("check", "--fail-on", "never"), ("summary", "--by", "step"), ("summary", "--by", "collective"),
    ("summary", "--by", "stream"), ("kernels",),
    ("kernels", "--of", "host", "--kind", "cpu_op,annotation,runtime,python"), ("memory",), ("whatif",),
    ("whatif", "--critical-path"),
)  # fmt: skip
_OF_THE_FILE = ("sha256", "size_bytes", "path", "lane")


def shuffled(trace: Trace, random_: random.Random) -> Trace:
    return trace | {"traceEvents": random_.sample(trace["traceEvents"], len(trace["traceEvents"]))}


def backwards(trace: Trace, _: random.Random) -> Trace:
    return trace | {"traceEvents": trace["traceEvents"][::-1]}


def with_events_of_others(trace: Trace, random_: random.Random) -> Trace:
    events = list(trace["traceEvents"])
    at = next(event["ts"] for event in events if event.get("ph") == "X")
    for phase in "iCM" * 20:
        other = {"ph": phase, "cat": "other_tool", "name": "other", "pid": 1, "tid": 1, "ts": at, "args": {"v": 1}}
        events.insert(random_.randrange(len(events)), other)
    return trace | {"traceEvents": events}


def with_keys_in_another_order(trace: Trace, random_: random.Random) -> Trace:
    def mixed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mixed(value[key]) for key in random_.sample(list(value), len(value))}
        return [mixed(each) for each in value] if isinstance(value, list) else value

    return trace | {"traceEvents": mixed(trace["traceEvents"])}


def with_other_processes(trace: Trace, _: random.Random) -> Trace:
    """Renumber processes and threads; numbers below 100 are devices and streams."""

    def renumbered(value: Any) -> Any:
        return value + 5_000_000 if isinstance(value, int) and value >= 100 else value

    return _changed(
        trace, lambda event: event | {key: renumbered(event[key]) for key in ("pid", "tid") if key in event}
    )


def with_other_calls(trace: Trace, _: random.Random) -> Trace:
    """Renumber correlations and the profiler's own numbers."""
    names = ("correlation", "External id", "wait_on_cuda_event_record_corr_id")

    def renumbered(event: Trace) -> Trace:
        args = event.get("args")
        if isinstance(args, dict):
            event = event | {"args": {k: v + 64_000 if k in names and v > 0 else v for k, v in args.items()}}
        return event | {"id": event["id"] + 64_000} if event.get("cat") == "ac2g" else event

    return _changed(trace, renumbered)


def written_by_another_program(trace: Trace, _: random.Random) -> bytes:
    """Return other blanks and escapes, in members of gzip, one of them empty."""
    text = _json(trace, indent=1).replace("/", "\\/").replace("\n", "\r\n").replace(': "a', ': "\\u0061').encode()
    half = len(text) // 2
    return b"".join(map(gzip.compress, (text[:half], b"", text[half:])))


CHANGES: tuple[Callable[[Trace, random.Random], Trace | bytes], ...] = (
    shuffled, backwards, with_events_of_others, with_keys_in_another_order, with_other_processes, with_other_calls,
    written_by_another_program,
)  # fmt: skip


def read(path: Path) -> Trace:
    """Return a trace with exact numbers."""
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text, parse_float=Decimal)  # type: ignore[no-any-return]


def answers(files: Mapping[str, Trace | bytes], folder: Path) -> dict[str, Any]:
    """Return what each command says of a run of these files, without what only describes the files."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else _json(content).encode())
    said = {}
    for command, *options in COMMANDS:
        done = cli_runner.tracekit(command, folder, *options, "--format", "json", XDG_CACHE_HOME=str(folder) + ".cache")
        shown = _plain(json.loads(done.stdout)) if done.returncode == 0 else done.stderr
        rows = isinstance(shown, list) and all(isinstance(row, dict) for row in shown)
        said[" ".join((command, *options))] = sorted(shown, key=json.dumps) if rows else shown
    return said


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in sorted(value.items()) if key not in _OF_THE_FILE}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _changed(trace: Trace, change: Callable[[Trace], Trace]) -> Trace:
    return trace | {"traceEvents": [change(event) for event in trace["traceEvents"]]}


def _json(trace: Trace, indent: int | None = None) -> str:
    """Return JSON with exact numbers."""
    marked = json.dumps(trace, indent=indent, default=lambda number: f"@{number}@")
    return re.sub(r'"@([-0-9.E+]+)@"', r"\1", marked)
