"""``python -m benchmarks``: measure every case and print the results as Markdown."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cases, results, runner
from benchmarks.cases import CASES, Case, SkippedError
from benchmarks.measure import size_bytes
from benchmarks.runner import Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; return 0, or 1 where no case could be had."""
    options = _parser().parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    found = [result for case in chosen if (result := _measured(case, options)) is not None]
    if not found:
        _say("nothing was measured")
        return 1
    text = results.markdown(found)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def _measured(case: Case, options: argparse.Namespace) -> Result | None:
    try:
        _say(f"{case.name}: getting it ready")
        folder = case.find(options.traces, options.work)
    except SkippedError as error:
        _say(f"{case.name}: skipped: {error}")
        return None
    only, size = tuple(options.subjects or ()), size_bytes(folder)
    return runner.measure(case, folder, size_bytes=size, rounds=options.rounds, work=options.work, only=only, say=_say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Load and summarize traces with tracekit and with HTA, side by side, each in a process of its own, "
        "beside bare JSON parsers that get the same bytes. What is not installed is left out.",
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--subjects", nargs="+", metavar="NAME", help="only these, such as tracekit and hta")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times to measure each (default: 5)")
    parser.add_argument(
        "--traces",
        type=Path,
        default=cases.usual_traces(),
        metavar="FOLDER",
        help=f"where the traces of others lie, a folder each (default: {cases.TRACES}, or beside the checkout)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir(), "tracekit-benchmarks"),
        metavar="FOLDER",
        help="where traces are made, and found again the next time (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there instead of to stdout")
    return parser


def _say(message: str) -> None:
    sys.stderr.write(f"benchmarks: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
