"""What the threads of this process do: their Python stacks, processor time and system calls."""

import linecache
import os
import platform
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_MAX_FRAMES = 64
_SAMPLE_S = 0.2
_TASKS = Path("/proc/self/task")
_MAX_PATH = 4096
_OWN = str(Path(__file__).parent)
# Numbers of the system calls in which a training may be blocked: <asm/unistd_64.h>, <asm-generic/unistd.h>.
_X86 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 16: "ioctl",
    17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 21: "access", 23: "select", 24: "sched_yield",
    35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
    47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate",
    82: "rename", 83: "mkdir", 87: "unlink", 162: "sync", 202: "futex", 217: "getdents64",
    230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat",
    263: "unlinkat", 264: "renameat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 285: "fallocate",
    295: "preadv", 296: "pwritev", 306: "syncfs", 316: "renameat2", 326: "copy_file_range", 327: "preadv2",
    332: "statx", 437: "openat2",
}  # fmt: skip
_ARM = {
    22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 35: "unlinkat", 38: "renameat", 46: "ftruncate",
    47: "fallocate", 56: "openat", 57: "close", 61: "getdents64", 63: "read", 64: "write", 65: "readv",
    66: "writev", 67: "pread64", 68: "pwrite64", 69: "preadv", 70: "pwritev", 71: "sendfile", 72: "pselect6",
    73: "ppoll", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4", 267: "syncfs",
    276: "renameat2", 285: "copy_file_range", 286: "preadv2", 291: "statx", 437: "openat2",
}  # fmt: skip
_CALLS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})
_PATH_ARGUMENT = {"open": 0, "stat": 0, "lstat": 0, "access": 0, "unlink": 0, "mkdir": 0, "rename": 0, "openat": 1,
                  "newfstatat": 1, "statx": 1, "unlinkat": 1, "renameat": 1, "renameat2": 1, "openat2": 1}  # fmt: skip
_NO_FILE = frozenset({"futex", "poll", "select", "nanosleep", "clock_nanosleep", "wait4", "waitid", "pselect6", "ppoll",
                      "sched_yield", "sync"})  # fmt: skip


def states(*, without: int | None = None) -> list[dict[str, Any]]:
    """Return each Python thread but `without`: name, stack (innermost first), load and system call.

    The load is the share of 0.2 s in which the thread ran or was ready to run, waiting for a processor.
    """
    threads = [thread for thread in threading.enumerate() if thread.ident != without]
    before = {thread.native_id: _runnable_s(thread.native_id) for thread in threads}
    began = time.monotonic()
    time.sleep(_SAMPLE_S)
    passed_s = time.monotonic() - began
    frames = sys._current_frames()
    return [_state(thread, frames.get(thread.ident or 0), before[thread.native_id], passed_s) for thread in threads]


def _state(
    thread: threading.Thread, frame: FrameType | None, before_s: float | None, passed_s: float
) -> dict[str, Any]:
    after_s = _runnable_s(thread.native_id)
    ratio = None if before_s is None or after_s is None else min(1.0, (after_s - before_s) / passed_s)
    return {
        "name": thread.name,
        "is_main": thread is threading.main_thread(),
        "frames": stack(frame),
        "cpu_ratio": None if ratio is None else round(ratio, 3),
        "system_call": _system_call(thread.native_id),
    }


def stack(frame: FrameType | None) -> list[dict[str, Any]]:
    """Stack of a frame, innermost first, with the text of each line."""
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_own(file):
            frames.append({"name": frame.f_code.co_name, "filename": file, "line": line, "source": _source(file, line)})
        frame = frame.f_back
    return frames


def of_traceback(trace: TracebackType | None) -> list[dict[str, Any]]:
    """Stack of an exception, innermost first."""
    frames: list[dict[str, Any]] = []
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        frames.append(
            {"name": trace.tb_frame.f_code.co_name, "filename": file, "line": line, "source": _source(file, line)}
        )
        trace = trace.tb_next
    return frames[::-1][:_MAX_FRAMES]


def is_own(file: str) -> bool:
    """Return whether a file is part of the hang watch, whose frames are not part of the training."""
    return file.startswith(_OWN)


def _source(file: str, line: int) -> str:
    """Text of a line, of a source that is read already: the disk may be what hangs."""
    lines = linecache.cache.get(file)
    text = lines[2][line - 1] if lines and len(lines) > 2 and 0 < line <= len(lines[2]) else ""
    return text.strip()[:200]


def _runnable_s(thread: int | None) -> float | None:
    """Time in which a thread ran or waited for a processor: schedstat has both, in ns."""
    try:
        ran_ns, delayed_ns = Path(_TASKS, str(thread), "schedstat").read_text(encoding="ascii").split()[:2]
        return (int(ran_ns) + int(delayed_ns)) / 1e9
    except (OSError, ValueError):
        return None


def _system_call(thread: int | None) -> dict[str, str] | None:
    """System call that a thread is in, and the file that it is about; None if it runs or is not known."""
    try:
        words = Path(_TASKS, str(thread), "syscall").read_text(encoding="ascii").split()
        name = _CALLS.get(int(words[0]))
        arguments = [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):
        return None
    if name is None:
        return None
    return {"name": name, "path": _path(name, arguments)}


def _path(name: str, arguments: list[int]) -> str:
    try:
        if name in _PATH_ARGUMENT:
            return _text_at(arguments[_PATH_ARGUMENT[name]])
        return "" if name in _NO_FILE else os.readlink(f"/proc/self/fd/{arguments[0]}")  # noqa: PTH115 not resolved
    except (OSError, IndexError):
        return ""


def _text_at(address: int) -> str:
    """Text at an address of this process; the kernel refuses an address that is none."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, _MAX_PATH, address).partition(b"\0")[0].decode("utf-8", "replace")
    except OverflowError:
        return ""
    finally:
        os.close(memory)
