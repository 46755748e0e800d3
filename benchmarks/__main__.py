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
    """Measure the selected cases; return 0, or 1 if none was available."""
    options = _parser().parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    selected = [case for case in CASES if not options.cases or case.name in options.cases]
    measured = [result for case in selected if (result := _measure(case, options)) is not None]
    if not measured:
        _say("nothing was measured")
        return 1
    text = results.markdown(measured)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def _measure(case: Case, options: argparse.Namespace) -> Result | None:
    try:
        _say(f"{case.name}: preparing")
        folder = case.find(options.traces, options.work)
    except SkippedError as error:
        _say(f"{case.name}: skipped: {error}")
        return None
    only, size = tuple(options.subjects or ()), size_bytes(folder)
    return runner.measure(case, folder, size_bytes=size, rounds=options.rounds, work=options.work, only=only, say=_say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Load and summarize traces with tracekit and with HTA, interleaved, each in a separate process, "
        "and parse the same bytes with plain JSON parsers. Subjects that are not installed are skipped.",
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, metavar="NAME", help=f"only these of {', '.join(names)}")
    parser.add_argument("--subjects", nargs="+", metavar="NAME", help="only these, such as tracekit and hta")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times to measure each (default: 5)")
    parser.add_argument(
        "--traces",
        type=Path,
        default=cases.default_traces_folder(),
        metavar="FOLDER",
        help=f"folder of public traces, one folder per run (default: {cases.TRACES}, or next to the checkout)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir(), "tracekit-benchmarks"),
        metavar="FOLDER",
        help="folder for generated traces, reused by the next run (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to FILE instead of stdout")
    return parser


def _say(message: str) -> None:
    sys.stderr.write(f"benchmarks: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
