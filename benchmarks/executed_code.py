"""How much of tracekit one command executes: its functions, their files, and the deepest stack of them.

    python -m benchmarks.executed_code [check RUN --fail-on never …]

Counted are functions of the package `tracekit`, comprehensions and lambdas left out, in all threads of the process;
and, apart, with the bodies of classes, which run once when a module is imported.
"""

import sys
import threading
from collections.abc import Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

import tracekit

_PACKAGE = str(Path(tracekit.__file__).parent)
_DEFAULT = ("check", "sample_traces/demo-fsdp2", "--fail-on", "never", "--no-cache")


class ExecutedCode:
    """Counts the functions of tracekit that run while it is installed as the profiling function of all threads."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.max_depth = 0
        self._depths: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count a call, or the return from one."""
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE) or (code.co_name.startswith("<") and code.co_name != "<module>"):
            return
        thread = threading.get_ident()
        if event == "call":
            depth = self._depths[thread] = self._depths.get(thread, 0) + 1
            if code.co_name != "<module>":
                self.functions.add(code)
                self.max_depth = max(self.max_depth, depth)
        elif event == "return":
            self._depths[thread] = self._depths.get(thread, 1) - 1


def count(words: Sequence[str]) -> ExecutedCode:
    """Run a command in this process and count what it executes."""
    from tracekit.cli import application

    executed = ExecutedCode()
    sys.argv = ["tracekit", *words]
    threading.setprofile(executed)
    sys.setprofile(executed)
    try:
        application.run()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented
    return executed


def main() -> None:
    """Print the counts."""
    executed = count(sys.argv[1:] or _DEFAULT)
    called = {code for code in executed.functions if code.co_flags & CO_OPTIMIZED}  # the body of a class is not
    for what, codes in (("functions", called), ("functions and class bodies", executed.functions)):
        files = {code.co_filename for code in codes}
        sys.stderr.write(f"{len(codes)} {what} in {len(files)} files of tracekit\n")
    sys.stderr.write(f"{executed.max_depth} frames deep\n")


if __name__ == "__main__":
    main()
