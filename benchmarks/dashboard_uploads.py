"""``python -m benchmarks.dashboard_uploads RUN``: 30 visitors upload, cancel and reload at once; what the server keeps.

Each round starts all visitors at the same moment, without a browser. After a round the script waits until the sessions
have expired while nobody visits, and the server counts its objects, its uploads and its resident memory.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import screenshots
from tests.support.visitor import TIMEOUT_S, Visitor, WidgetState

VISITORS, ROUNDS = 30, 4
QUIET_S = 45.0
"""Longer than `disconnectedSessionTTL` and one interval of `dashboard.server.expired_sessions` together."""
_RANKS = 2


@dataclass(frozen=True)
class Retained:
    """What a server holds after a collection of garbage and malloc_trim."""

    objects: int
    sessions: int
    uploaded_bytes: int
    folders: int
    rss_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds and print a table; return 1 if a visit failed."""
    options = _parser().parse_args(arguments)
    if options.serve:
        _serve(options.serve, options.run)
        return 0
    failures: list[str] = []
    with _server(options.run.resolve()) as server:
        with Visitor(server.port) as visitor:
            visitor.open()
        print("| round | visits | failed | longest | objects | sessions | uploads | folders | RSS |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
        _print_row("before", [], 0.0, server.retained_resources())
        for number in range(options.rounds):
            outcomes, longest_s = _round(server.port, options.run, number, options.visitors)
            failures += filter(None, outcomes)
            time.sleep(options.quiet)
            _print_row(str(number + 1), outcomes, longest_s, server.retained_resources())
    for reason, count in Counter(failures).most_common():
        print(f"{count} visits: {reason}", file=sys.stderr)
    return int(bool(failures))


def _print_row(label: str, outcomes: Sequence[str], longest_s: float, retained: Retained) -> None:
    failed = sum(map(bool, outcomes))
    memory = f"{retained.uploaded_bytes / 2**20:.1f} MiB | {retained.folders} | {retained.rss_bytes / 2**20:.0f} MiB"
    counts = f"{retained.objects} | {retained.sessions}"
    print(f"| {label} | {len(outcomes)} | {failed} | {longest_s:.1f} s | {counts} | {memory} |", flush=True)


# Visits ---------------------------------------------------------------------------------------------------------------


def _round(port: int, run: Path, number: int, visitors: int) -> tuple[list[str], float]:
    """Outcome of each visit, '' where it succeeded, and the time of the longest visit, in s."""
    files = [(path.name, path.read_bytes()) for path in sorted(run.glob("*.json.gz"))[:_RANKS]]
    outcomes, times_s = [""] * visitors, [0.0] * visitors
    start = threading.Barrier(visitors)

    def play(place: int) -> None:
        visit = VISITS[place % len(VISITS)]
        start.wait()
        began_s = time.monotonic()
        try:
            visit(port, files, random.Random(number * visitors + place))
        except Exception as error:  # noqa: BLE001  each failure is a result of the measurement
            outcomes[place] = f"{visit.__name__}: {type(error).__name__}: {error}"
        times_s[place] = time.monotonic() - began_s

    threads = [threading.Thread(target=play, args=(place,)) for place in range(visitors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, max(times_s)


def upload(port: int, files: Sequence[tuple[str, bytes]], drawn: random.Random) -> None:
    """Upload the files and look at the run that they form."""
    del drawn
    with Visitor(port) as visitor:
        _upload(visitor, files)


def remove(port: int, files: Sequence[tuple[str, bytes]], drawn: random.Random) -> None:
    """Upload the files, and remove one of them."""
    with Visitor(port) as visitor:
        state = _upload(visitor, files)
        del state.file_uploader_state_value.uploaded_file_info[drawn.randrange(len(files))]
        answer = visitor.open(widgets=[state])
        _expect_uploaded(answer.title, files[:1])


def _send_part(visitor: Visitor, file: tuple[str, bytes], drawn: random.Random) -> None:
    """Open the page, and close the connection in the middle of a file."""
    visitor.open()
    name, content = file
    (url,) = visitor.upload_urls([name])
    visitor.send_part(url.upload_url, name, content, part_bytes=drawn.randrange(len(content)))


def cancel(port: int, files: Sequence[tuple[str, bytes]], drawn: random.Random) -> None:
    """Close the connection in the middle of a file, and upload it again."""
    with Visitor(port) as visitor:
        _send_part(visitor, files[0], drawn)
        _upload(visitor, files)


def leave(port: int, files: Sequence[tuple[str, bytes]], drawn: random.Random) -> None:
    """Close the page in the middle of a file, and do not come back."""
    with Visitor(port) as visitor:
        _send_part(visitor, files[0], drawn)


def reload(port: int, files: Sequence[tuple[str, bytes]], drawn: random.Random) -> None:
    """Upload the files, and open the page again in a new session while the first page is being drawn."""
    with Visitor(port) as visitor:
        state = _upload(visitor, files)
        visitor.start("", [state])
        time.sleep(drawn.random() * 0.2)
    with Visitor(port) as visitor:
        _upload(visitor, files)


VISITS: tuple[Callable[[int, Sequence[tuple[str, bytes]], random.Random], None], ...] = (
    upload,
    remove,
    cancel,
    leave,
    reload,
)


def _upload(visitor: Visitor, files: Sequence[tuple[str, bytes]]) -> WidgetState:
    statuses, answer, state = visitor.upload(files)
    if set(statuses) != {204}:
        raise RuntimeError(f"an upload was answered {sorted(set(statuses))}")
    _expect_uploaded(answer.title, files)
    return state


def _expect_uploaded(title: str, files: Sequence[tuple[str, bytes]]) -> None:
    if not title.startswith("uploaded: "):
        raise RuntimeError(f"the page shows {title!r} instead of {len(files)} uploaded files")


# The server -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A dashboard in a process of its own that counts what it holds when it is asked."""

    process_id: int
    port: int
    answers: Path

    def retained_resources(self) -> Retained:
        """What the server holds now. Raises TimeoutError if it does not answer."""
        before = set(self.answers.iterdir())
        os.kill(self.process_id, signal.SIGUSR1)
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            new = [path for path in set(self.answers.iterdir()) - before if path.suffix == ".json"]
            if new:
                return Retained(**json.loads(new[0].read_bytes()))
            time.sleep(0.05)
        raise TimeoutError("the server does not answer SIGUSR1")


@contextlib.contextmanager
def _server(run: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    answers, temporary = folder / "answers", folder / "temporary"
    answers.mkdir()
    temporary.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "TRACEKIT_CACHE_DIR": str(folder / "cache"),
        _ANSWERS: str(answers),
    }
    command = [sys.executable, "-m", "benchmarks.dashboard_uploads", "--serve", str(port), str(run)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=screenshots.ROOT)
    try:
        screenshots.wait_until_healthy(port)
        yield Server(process.pid, port, answers)
    finally:
        process.terminate()
        process.wait(60)
        sys.stderr.write((folder / "log").read_text()[-4000:])
        shutil.rmtree(folder)


_ANSWERS = "DASHBOARD_UPLOADS_ANSWERS"


def _serve(port: int, run: Path) -> None:
    """Serve the dashboard in this process, and count on SIGUSR1."""
    from dashboard.server import serve

    signal.signal(signal.SIGUSR1, lambda *_: _answer())
    sys.argv = ["streamlit", "--server.port", str(port), "--", str(run)]
    serve.main()


def _answer() -> None:
    from streamlit import runtime
    from streamlit.runtime.app_session import AppSession

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    files = runtime.get_instance().uploaded_file_mgr.file_storage
    retained = {
        "objects": len(objects),
        "sessions": sum(isinstance(item, AppSession) for item in objects),
        "uploaded_bytes": sum(len(file.data) for session in files.values() for file in session.values()),
        "folders": len(list(Path(tempfile.gettempdir()).glob("tracekit-upload-*"))),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
    path = Path(os.environ[_ANSWERS]) / f"{time.monotonic_ns()}"
    path.write_text(json.dumps(retained))
    path.rename(path.with_suffix(".json"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard_uploads", description=__doc__)
    parser.add_argument("run", type=Path, help="the run whose first two traces are uploaded")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of visits (default: {ROUNDS})")
    parser.add_argument("--visitors", type=int, default=VISITORS, help=f"visitors at once (default: {VISITORS})")
    parser.add_argument(
        "--quiet", type=float, default=QUIET_S, help=f"seconds without visits after a round (default: {QUIET_S:g})"
    )
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
