"""What recording a save costs: the same saves and loads with and without it, in rounds that take turns.

    python -m benchmarks.saves --rounds 20 --folder /dev/shm/saves

Both sides of a round run in one process, one right after the other, now this one first, now that one: other load of the
machine then affects both equally. A folder in memory excludes the disk's variation.
"""

import argparse
import gc
import io
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.results import machine_description
from benchmarks.yafsdp_measures import median_with_interval
from tracekit.capture.checkpoints import auto_recording

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Subject:
    """One kind of save or load: what is timed, and what comes before and after it."""

    name: str
    call: Callable[[Path], Any]
    prepare: Callable[[Path], Any] = lambda _: None
    settle: Callable[[Any], Any] = lambda _: None


@dataclass(frozen=True)
class Taken:
    """What one call took, its process's threads included in the processor time."""

    wall_s: float
    cpu_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each (default: 20)")
    parser.add_argument("--mib", type=int, default=256, help="size of the large state (default: 256)")
    parser.add_argument("--tensors", type=int, default=1000, help="tensors of the small state (default: 1000)")
    parser.add_argument("--calls", type=int, default=2000, help="calls of a small torch.save (default: 2000)")
    parser.add_argument("--only", default="", help="what is measured, by how its name begins (default: all)")
    parser.add_argument("--folder", type=Path, default=None, help="where to save (default: a temporary folder)")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # collecting, before each call, should not go over all that is imported
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="saves-") as folder:
        print(machine_description())
        recording = Recording(Path(folder) / "log")
        print("| what | without | added | wall, with over without | CPU, with over without |\n|---|---|---|---|---|")
        for subject in subjects(options.mib << 20, options.tensors):
            if not subject.name.startswith(options.only):
                continue
            print(row(subject.name, measure(subject, recording, Path(folder), rounds=options.rounds)), flush=True)
        print()
        print("\n".join(calls(recording, Path(folder), count=options.calls)))
    gc.unfreeze()
    torch.set_num_threads(threads)
    return 0


class Recording:
    """The watched libraries of this process; `on` says whether they are recorded."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        watch = (lambda: folder if self.on else None), (lambda: 0), (lambda: 1)
        self._watch = watch
        self.bare = torch.save
        auto_recording.watch_torch_files(*watch)
        auto_recording.watch_distributed_checkpoints(*watch)
        auto_recording.watch_safetensors(*watch)


def subjects(large_bytes: int, tensors: int) -> list[Subject]:
    """Subjects to measure: saves of a state of few large tensors, and of one of many small ones."""
    large = {f"layer{index}": torch.randn(large_bytes // 16 // 4) for index in range(16)}
    small = {f"layer{index}": torch.randn(64) for index in range(tensors)}
    size, many = f"{large_bytes >> 20} MiB", f"{tensors} tensors of 256 B"
    empty = {name: torch.zeros_like(value) for name, value in large.items()}
    return [
        Subject(f"dcp.save, {size}", lambda path: dcp.save(large, checkpoint_id=path, no_dist=True)),
        Subject(f"dcp.save, {many}", lambda path: dcp.save(small, checkpoint_id=path, no_dist=True)),
        Subject(
            f"dcp.async_save, {size}, time blocked",
            lambda path: dcp.async_save(large, checkpoint_id=path, no_dist=True),
            settle=lambda future: future.result(),
        ),
        Subject(
            f"dcp.load, {size}",
            lambda path: dcp.load(dict(empty), checkpoint_id=path, no_dist=True),
            prepare=lambda path: dcp.save(large, checkpoint_id=path, no_dist=True),
        ),
        Subject(f"torch.save, {size}", lambda path: torch.save(large, path)),
        Subject(f"torch.load, {size}", lambda path: torch.load(path), prepare=lambda path: torch.save(large, path)),
        Subject(f"safetensors save_file, {size}", lambda path: safetensors.torch.save_file(large, path)),
    ]


def measure(subject: Subject, recording: Recording, folder: Path, *, rounds: int) -> list[dict[bool, Taken]]:
    """Return for each round what was taken without (False) and with recording (True)."""
    measured = []
    for number in range(rounds + _WARM_UP_ROUNDS):
        order = (False, True) if number % 2 else (True, False)
        measured.append({on: _time_subject(subject, recording, folder / "checkpoint", on=on) for on in order})
    return measured[_WARM_UP_ROUNDS:]


def _time_subject(subject: Subject, recording: Recording, path: Path, *, on: bool) -> Taken:
    recording.on = False
    subject.prepare(path)
    gc.collect()
    recording.on = on
    began = time.perf_counter(), time.process_time()
    response = subject.call(path)
    took = Taken(time.perf_counter() - began[0], time.process_time() - began[1])
    subject.settle(response)
    recording.on = False
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return took


def row(name: str, measured: Sequence[dict[bool, Taken]]) -> str:
    """Return a line of the table: medians over rounds, a round's ratio being that of its two sides."""
    wall = [sides[True].wall_s / sides[False].wall_s for sides in measured]
    cpu = [sides[True].cpu_s / sides[False].cpu_s for sides in measured]
    added_ms = 1e3 * statistics.median(sides[True].wall_s - sides[False].wall_s for sides in measured)
    without_ms = 1e3 * statistics.median(sides[False].wall_s for sides in measured)
    return f"| {name} | {without_ms:.1f} ms | {added_ms:+.2f} ms | {_ratio(wall)} | {_ratio(cpu)} |"


def _ratio(ratios: Sequence[float]) -> str:
    median, low, high = median_with_interval(ratios)
    return f"{median:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None and high is not None else "")


def calls(recording: Recording, folder: Path, *, count: int) -> list[str]:
    """Table of the times of a small `torch.save`: bare, watched but not recorded, recorded."""
    value, path = {"step": 7, "lr": torch.ones(4)}, folder / "small.pt"
    watched = torch.save
    targets: dict[str, Callable[[Callable[..., None]], None]] = {
        "to memory": lambda save: save(value, io.BytesIO()),
        "to a file": lambda save: save(value, path),
    }
    lines = ["| small torch.save | bare | watched, not recorded | recorded |", "|---|---|---|---|"]
    for name, target in targets.items():
        sides: dict[str, list[float]] = {"bare": [], "watched": [], "recorded": []}
        for _ in range(count):
            for side, times_s in sides.items():
                recording.on = side == "recorded"
                save = recording.bare if side == "bare" else watched
                began = time.perf_counter()
                target(save)
                times_s.append(time.perf_counter() - began)
        recording.on = False
        cells = " | ".join(f"{1e6 * statistics.median(times_s):.1f} µs" for times_s in sides.values())
        lines.append(f"| {name} | {cells} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
