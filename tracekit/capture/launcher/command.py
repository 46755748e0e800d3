"""``tracekit record`` and ``tracekit merge``: their options, for both ways of calling them."""

import argparse
import json
import os
import re
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from tracekit import conventions
from tracekit.capture import atomic_files, notices
from tracekit.capture.launch_settings import GIBIBYTE, Settings
from tracekit.capture.launcher import exit_report, launch
from tracekit.capture.perturbed_places import MAX_DELAY_RATIO, parse_places
from tracekit.capture.window_schedule import WindowSchedule, parse_steps
from tracekit.conventions import object_storage, regular_files

_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIBIBYTE, "T": 1 << 40}
NONE = "none"
_MOST_STEPS = 1000  # of a requested window
_POLL_EVERY_S = 0.5
_ANSWER_S = 60.0
_MOST_SECONDS = 1e8

_EXAMPLES = """
examples:
  tracekit record -- torchrun --nproc-per-node 8 train.py
  tracekit record --steps 100:105 --ranks 0,8 --out runs/today -- srun python train.py
  tracekit record --steps 100:103 --every 5000 -- torchrun train.py    # periodically, in a long run
  tracekit record --out s3://bucket/runs/today -- torchrun train.py    # uploads each window
  tracekit record --hang-timeout 300 -- torchrun train.py              # and then: tracekit hang RUN
  tracekit record --steps none --on-outlier 4 -- torchrun train.py     # profiles when steps become slow
  tracekit record --perturb all --steps 100:105 -- torchrun train.py   # and then: tracekit summary RUN --by place
  tracekit record --attach runs/today                                  # now, from a run that is being recorded
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        notices.notify(f"{message}; {self.prog} --help lists the options")
        sys.exit(2)


def record(words: list[str], *, program: str) -> int:
    """Record the command that the command line names; return its exit code (2 for an invalid command line)."""
    parser = _parser(program)
    options = parser.parse_args(words)
    if options.attach is not None and object_storage.is_url(options.attach):
        parser.error("--attach needs a run on a file system; for a URL, use --signal with the recording command")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.attach is not None:
        if command:
            parser.error("--attach requests a window from a running training: it takes no command")
        return attach(Path(options.attach), steps=_count(parser, options.steps), quiet=options.quiet)
    if not command:
        parser.error(f"no command to record: {program} -- torchrun … train.py")
    return launch.run(command, _settings(parser, options), on_signal=options.signal, quiet=options.quiet)


def merge_run(words: list[str], *, program: str) -> int:
    """Merge the parts of a run into one folder; return the exit code."""
    parser = _Parser(prog=program, description="Merge the parts of one run, from several nodes, into one folder.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder to merge into; created if it does not exist")
    parser.add_argument("parts", metavar="PART", type=Path, nargs="+", help="folders that hold files of the run")
    options = parser.parse_args(words)
    try:
        moved = atomic_files.merge_parts(options.run, options.parts)
    except OSError as error:
        notices.notify(f"{error.filename}: {error.strerror}; check the path and its permissions")
        return 2
    except ValueError as error:
        notices.notify(f"{error}")
        return 2
    notices.notify(f"{moved} files moved to {options.run}; next: tracekit check {options.run}")
    return 0


def attach(run: Path, *, steps: "int | None", quiet: bool) -> int:
    """Request a window of so many steps, wait until it is written, and report it; return the exit code.

    2 where the run is not being recorded, 1 where the training ended before the window was recorded.
    """
    if not _is_live(run):
        notices.notify(f"{run}: no training is being recorded there; start one with tracekit record")
        return 2
    before = _windows(run)
    now = run / conventions.NOW_FILE
    try:
        now.write_text("" if steps is None else json.dumps({"steps": steps}), encoding="utf-8")
    except OSError as error:
        notices.notify(f"{now} cannot be written: {error.strerror}")
        return 2
    requested_s = time.monotonic()  # not the time of the file: the clocks of file servers differ, and may be set back
    while _is_live(run):
        if now.exists() and time.monotonic() - requested_s > _ANSWER_S:
            notices.notify(f"no rank has answered for {_ANSWER_S:.0f} s; the window follows with its next steps")
            return 1
        if not now.exists() and len(_windows(run)) > len(before):
            break
        time.sleep(_POLL_EVERY_S)
    new = [window for window in _windows(run) if window not in before]
    if not new:
        notices.notify("the training ended before the window was recorded")
        return 1
    if not quiet:
        first, count = new[-1]
        notices.notify(f"recorded steps {first} to {first + count - 1}; next: tracekit check {run}")
        if exit_report.has_analysis():
            exit_report.print_check(run)
    return 0


def _is_live(run: Path) -> bool:
    """Return whether a rank's metrics log is open: it gets its final name when the training ends."""
    suffix = conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX
    return any(run.glob(f"rank*{suffix}"))


def _windows(run: Path) -> "list[tuple[int, int]]":
    try:
        windows = json.loads(regular_files.read_text(run / conventions.MANIFEST_FILE))["windows"]
        return [(int(window["first_step"]), int(window["steps"])) for window in windows]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=f"{program} [options] -- COMMAND…\n       {program} --attach RUN [--steps N]",
        description="Record a training without changing it: put its command after --. Its output, exit code and\n"
        "signals stay the same, and a failure of the recorder never stops it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--steps",
        metavar="FIRST:END",
        help="optimizer steps to profile, half-open, counted from 0 [default: 10:15]; none: only on demand",
    )
    add("--every", type=_positive, metavar="N", help="profile such a window again every N steps")
    add("--ranks", type=_ranks, metavar="0,1|all", help="ranks to record [default: all]")
    add("--warmup", type=_natural, default=2, metavar="N", help="profiler warm-up steps before a window [default: 2]")
    add("-o", "--out", metavar="RUN", help="folder or URL of the run [default: runs/ and the job id or the time]")
    add("--output", dest="out", metavar="RUN", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--stacks", action="store_true", help="record Python stacks: traces grow tenfold, and steps take longer")
    add("--modules", action="store_true", help="record the forward calls of torch.nn.Modules, without stacks")
    add("--shapes", action="store_true", default=None, help="record operator shapes, the default on the CPU")
    add("--no-memory", action="store_false", dest="memory", help="record no allocator events")
    add(
        "--memory-snapshot",
        dest="snapshot",
        action="store_true",
        help="record the CUDA allocator's history of each window",
    )
    add(
        "--hang-timeout",
        dest="hang_timeout_s",
        type=_seconds,
        metavar="SECONDS",
        help="dump flight recorders and stacks of ranks whose collectives make no progress for so long",
    )
    add("--device-metrics", action="store_true", help="record clocks, power, temperature and throttling of the GPUs")
    add(
        "--on-outlier",
        type=_positive,
        default=0,
        metavar="N",
        help="profile steps when slow ones recur or last, at most N windows a day [default: never]",
    )
    add(
        "--perturb",
        type=_places,
        default=(),
        metavar="PLACES",
        help="inject small delays before these places, to measure how much each delays the training: all, or some of\n"
        f"{','.join(conventions.PERTURBED_PLACES)} [default: none]",
    )
    add(
        "--perturb-ratio",
        type=_delay_ratio,
        default=Settings.perturb_ratio,
        metavar="RATIO",
        help=f"length of a delay over the median step, at most {MAX_DELAY_RATIO} [default: {Settings.perturb_ratio}]",
    )
    add(
        "--tokens-per-step",
        type=_positive,
        metavar="N",
        help="tokens of all ranks per step, to report tokens per second",
    )
    add(
        "--disk-budget",
        dest="disk_budget_bytes",
        type=_size,
        default=10 * GIBIBYTE,
        metavar="SIZE",
        help="disk space that traces may take, of a URL those that wait to be uploaded [default: 10GiB]",
    )
    add(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="local folder for uncompressed traces [default: the system's temporary folder]",
    )
    add(
        "--signal",
        type=_signal,
        metavar="NAME",
        help="a signal to this command, such as USR2, that requests a window, and ends the delays of --perturb",
    )
    add("--attach", metavar="RUN", help="request a window now from a run that is being recorded: --steps is its length")
    add("--quiet", action="store_true", help="print no report at the end")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    steps = options.steps or Settings.steps
    if steps is not None and steps != NONE:
        try:
            WindowSchedule(*parse_steps(steps), every=options.every)
        except ValueError as error:
            parser.error(f"--steps: {error}")
    elif options.every is not None:
        parser.error("--every repeats a window: give it with --steps FIRST:END")
    out = object_storage.without_file_scheme(options.out or str(Path("runs", _name())))
    if object_storage.is_url(out):
        _require_access(parser, out)
    elif Path(out).is_file():
        parser.error(f"--out {out}: is a file; name a folder for the run")
    recorded = vars(options).keys() & {field.name for field in fields(Settings)}
    return Settings(
        **{name: getattr(options, name) for name in recorded - {"out", "scratch", "steps"}},
        out=out if object_storage.is_url(out) else os.path.abspath(out),  # noqa: PTH100 a link stays as named
        launch=launch.new_name(),
        notes="",
        scratch=os.path.abspath(options.scratch) if options.scratch else "",  # noqa: PTH100
        steps=None if steps == NONE else steps,
    )


def _require_access(parser: argparse.ArgumentParser, url: str) -> None:
    """End the command if a run cannot be uploaded to a URL for a reason that will not pass; warn of others."""
    if object_storage.protocol(url) in ("http", "https"):
        parser.error(f"--out {object_storage.shown(url)}: a web server takes no files; name a folder, s3:// or gs://")
    try:
        system, path = object_storage.connect(url)
        object_storage.call_with_retries(url, lambda: system.ls(path, detail=False))
    except object_storage.StorageError as error:
        if error.kind in object_storage.TRANSIENT:
            notices.notify(f"--out {error}; recording begins, and uploads are tried again")
        elif error.kind != object_storage.MISSING or not _has_bucket(url):
            parser.error(f"--out {error}")


def _has_bucket(url: str) -> bool:
    """Return whether the bucket of a URL can be listed; a folder in it need not exist yet."""
    scheme, _, rest = url.partition("://")
    bucket = f"{scheme}://{rest.partition('/')[0]}"
    try:
        system, path = object_storage.connect(bucket)
        object_storage.call_with_retries(bucket, lambda: system.ls(path, detail=False))
    except object_storage.StorageError as error:
        return error.kind in object_storage.TRANSIENT
    return True


def _name() -> str:
    """Name that one job's launchers on several nodes share, if a scheduler provides a job id."""
    job = next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)
    if job is not None:
        return "job-" + re.sub(r"[^\w.-]+", "-", job)
    return time.strftime("%Y%m%d-%H%M%S")


def _count(parser: argparse.ArgumentParser, steps: "str | None") -> "int | None":
    if steps is not None and not (steps.isdigit() and 0 < int(steps) <= _MOST_STEPS):
        parser.error(f"--attach takes --steps N, a number of steps up to {_MOST_STEPS}, not {steps!r}")
    return int(steps) if steps is not None else None


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds above 0")
    return seconds


def _places(text: str) -> "tuple[str, ...]":
    try:
        return parse_places(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _delay_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= MAX_DELAY_RATIO:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of a step above 0 and up to {MAX_DELAY_RATIO}")
    return ratio


def _ranks(text: str) -> "tuple[int, ...] | None":
    if text == "all":
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} names no ranks: use all, or numbers such as 0,1")
    return tuple(sorted({int(rank) for rank in text.split(",")}))


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use 500MB or 10GiB")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def _signal(text: str) -> int:
    name = text.upper().removeprefix("SIG")
    if name not in ("USR1", "USR2", "HUP", "WINCH"):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: use USR1, USR2, HUP or WINCH")
    return int(getattr(signal, f"SIG{name}"))
