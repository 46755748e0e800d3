"""Stacks of a process as text -> its threads: of `faulthandler`, and of ``py-spy dump`` (text or --json)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tracekit.model.hang_dump import Frame, ThreadStack

_MAX_THREADS = 4096
_MAX_FRAMES = 128
_MAX_TEXT = 1000
_MAX_LINE = 1 << 31
_FAULT_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ (?:\[(.*)\] )?\(most recent call first\):")
_FAULT_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')
_SPY_THREAD = re.compile(r'Thread (?:0x)?[0-9A-Fa-f]+ \((idle|active)[^)]*\)(?:: "(.*)")?')
_SPY_FRAME = re.compile(r"    (\S.*) \((.*?)(?::(\d{1,9}))?\)")
_SPY_PROCESS = re.compile(r"^Process (\d{1,9}): ", re.MULTILINE)
_MAIN = "MainThread"


def parse_text(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a text by faulthandler or py-spy, the last dump in it; none if it is not such a text."""
    if "(most recent call first):" in text:
        return _of_faulthandler(text.splitlines())
    return _of_py_spy(text.splitlines()) if _SPY_THREAD.search(text) else ()


def process_id(text: str) -> int | None:
    """Return the process that a text by py-spy is of."""
    match = _SPY_PROCESS.search(text)
    return int(match[1]) if match else None


def parse_json(value: Any) -> tuple[ThreadStack, ...]:
    """Return the threads of ``py-spy dump --json``; none if a value is something else."""
    if not isinstance(value, list) or not all(isinstance(thread, dict) and "frames" in thread for thread in value):
        return ()
    return tuple(_spy_thread(thread) for thread in value[:_MAX_THREADS])


def is_spy_of(value: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the process that the threads of ``py-spy dump --json`` are of."""
    pid = value[0].get("pid") if value else None
    return pid if type(pid) is int else None


def _of_faulthandler(lines: list[str]) -> tuple[ThreadStack, ...]:
    """Return the threads of the last dump. Faulthandler writes the main thread last, each as 'innermost first'."""
    last = max((n for n, line in enumerate(lines) if line.startswith(("Timeout (", "Fatal Python error"))), default=-1)
    threads: list[tuple[str, list[Frame]]] = []
    for line in lines[last + 1 :]:
        if (head := _FAULT_THREAD.match(line)) and len(threads) < _MAX_THREADS:
            threads.append(((head[2] or "")[:_MAX_TEXT], []))
        elif threads and (frame := _FAULT_FRAME.match(line)) and len(threads[-1][1]) < _MAX_FRAMES:
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][1].append(Frame(frame[3][:_MAX_TEXT], frame[1][:_MAX_TEXT], number))
    main = len(threads) - 1  # the thread that the interpreter created first
    return tuple(ThreadStack(name, tuple(frames), is_main=n == main) for n, (name, frames) in enumerate(threads))


def _of_py_spy(lines: list[str]) -> tuple[ThreadStack, ...]:
    threads: list[tuple[str, str, list[Frame]]] = []
    for line in lines:
        if (head := _SPY_THREAD.match(line)) and len(threads) < _MAX_THREADS:
            threads.append((head[1], (head[2] or "")[:_MAX_TEXT], []))
        elif threads and (frame := _SPY_FRAME.match(line)) and len(threads[-1][2]) < _MAX_FRAMES:
            threads[-1][2].append(Frame(frame[1][:_MAX_TEXT], frame[2][:_MAX_TEXT], int(frame[3] or 0)))
    return tuple(
        ThreadStack(name, tuple(frames), is_main=name == _MAIN, cpu_ratio=_activity(active))
        for active, name, frames in threads
    )


def _activity(state: object) -> float | None:
    """Return 1 for an active thread; py-spy calls a thread idle also where it cannot know."""
    return 1.0 if state in ("active", True) else None


def _spy_thread(value: Mapping[str, Any]) -> ThreadStack:
    frames = value["frames"] if isinstance(value["frames"], list) else []
    name = value.get("thread_name")
    return ThreadStack(
        name[:_MAX_TEXT] if isinstance(name, str) else "",
        tuple(_spy_frame(frame) for frame in frames[:_MAX_FRAMES] if isinstance(frame, dict)),
        is_main=name == _MAIN,
        cpu_ratio=_activity(value.get("active")),
    )


def _spy_frame(value: Mapping[str, Any]) -> Frame:
    name, file, line = value.get("name"), value.get("filename"), value.get("line")
    return Frame(
        str(name)[:_MAX_TEXT] if isinstance(name, str) else "",
        file[:_MAX_TEXT] if isinstance(file, str) else "",
        line if type(line) is int and 0 <= line < _MAX_LINE else 0,
    )
