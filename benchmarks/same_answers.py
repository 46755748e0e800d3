"""The JSON of all commands on all recordings: the same before and after a change, but for what the change lists.

    python -m benchmarks.same_answers record OUT [FOLDER…]     in the checkout of before, and in that of after
    python -m benchmarks.same_answers differ BEFORE AFTER [--ignore KEY…]

`record` runs check, summary, whatif and compare on each run below the folders, memory on each snapshot and hang on each
folder of dumps, and writes what each prints, one file a command. `differ` lists the places at which two recordings
differ.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import cli_runner

RUNS = (Path("sample_traces"), Path("tests/recordings"))
_TRACES = ("*.pt.trace.json*", "*trace*.json*", "rank*.json*", "*.sqlite", "*.pftrace*")
_SNAPSHOTS, _DUMPS = ("*memory*.pickle*", "*snapshot*.pickle*"), ("*.hang.json*", "nccl_trace_rank_*")
_COMMANDS = {"check": ("--fail-on", "never"), "summary": (), "whatif": ()}


def main() -> int:
    """Record answers, or list the differences of two recordings; 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_answers", description=(__doc__ or "").split("\n")[0]
    )
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("folders", type=Path, nargs="*", default=RUNS)
    difference = actions.add_parser("differ")
    difference.add_argument("before", type=Path)
    difference.add_argument("after", type=Path)
    difference.add_argument("--ignore", nargs="*", default=[])
    options = parser.parse_args()
    if options.action == "record":
        record(options.out, options.folders)
        return 0
    differences = list(differ(options.before, options.after, frozenset(options.ignore)))
    sys.stdout.write("".join(f"{line}\n" for line in differences) or "no differences\n")
    return bool(differences)


def record(out: Path, folders: Sequence[Path]) -> None:
    """Write what each command prints about each recording, with its exit code."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        for words in commands(folders):
            done = cli_runner.tracekit(*words, "--format", "json", cwd=Path.cwd(), TRACEKIT_CACHE_DIR=cache)
            name = "_".join(words).replace(os.sep, "~")[-200:]
            (out / f"{name}.json").write_text(done.stdout or done.stderr)
            sys.stderr.write(f"{done.returncode} {' '.join(words)}\n")


def commands(folders: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    """Yield the commands on all recordings below some folders."""
    before = None
    for run in places(folders, _TRACES):
        for command, words in _COMMANDS.items():
            yield command, str(run), *words
        if before is not None:
            yield "compare", str(before), str(run)
        before = run
    for snapshot in files(folders, _SNAPSHOTS):
        yield "memory", str(snapshot)
    for dumps in places(folders, _DUMPS):
        yield "hang", str(dumps)


def files(folders: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    """Files of some patterns below some folders, in order."""
    return sorted({path for folder in folders for pattern in patterns for path in folder.rglob(pattern)})


def places(folders: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    """Folders with files of some patterns, in order."""
    return sorted({path.parent for path in files(folders, patterns)})


def differ(before: Path, after: Path, ignored: frozenset[str]) -> Iterator[str]:
    """Yield the places at which two recordings differ: command, path of the value, and both values."""
    for name in sorted({path.name for folder in (before, after) for path in folder.glob("*.json")}):
        texts = [(folder / name).read_text() if (folder / name).is_file() else "" for folder in (before, after)]
        if texts[0] != texts[1]:
            yield from (f"{name}: {line}" for line in _differences(*map(_parse, texts), "", ignored))


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _differences(before: object, after: object, path: str, ignored: frozenset[str]) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after} - ignored):
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}", ignored)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from _differences(*pair, f"{path}[{number}]", ignored)
    elif before != after:
        yield f"{path}: {json.dumps(before):.120} -> {json.dumps(after):.120}"


if __name__ == "__main__":
    sys.exit(main())
