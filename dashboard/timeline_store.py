"""Scenes that were opened: laid out once, then shared by all who look at the run. What each sees is their own."""

import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import run_store as runs
from dashboard.components.timeline import message
from dashboard.run_catalog import RunEntry
from tracekit.ingest import loader
from tracekit.model.run import Run
from tracekit.report import timeline

MAX_SCENES = 6
MAX_SEARCHES = 64
MAX_DETAILS = 512
MAX_TEXT = 200
PATIENCE_S = 0.15


class _Kept:
    """What was made last, by key; two who ask for the same at once may both make it."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._made: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._lock:
            self._made[key] = made
            while len(self._made) > self._at_most:
                self._made.popitem(last=False)
        return made


@dataclass(frozen=True, eq=False)
class OpenTimeline:
    """A run, of which no trace was read, and the scene of one window. `lock` is held around what reads traces."""

    run: Run
    scene: timeline.Scene
    window: int
    lock: Any
    read_s: float = field(default_factory=time.time)
    """When it was opened, Unix time in seconds."""
    _searches: _Kept = field(default_factory=lambda: _Kept(MAX_SEARCHES))
    _readings: _Kept = field(default_factory=lambda: _Kept(MAX_DETAILS))
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "timeline-details"))

    def find(self, text: str) -> timeline.Matches:
        """Return the slices whose name contains `text`."""
        wanted = text[:MAX_TEXT]
        found: timeline.Matches = self._searches.once(wanted, lambda: timeline.find_by_name(self.scene, wanted))
        return found

    @cached_property
    def about(self) -> dict[str, Any]:
        """Return what a browser is told of the scene."""
        return message.scene(self.scene)

    def details(self, track: int, slice_id: int) -> dict[str, Any] | None:
        """Return details and arrows of a slice as a browser is told them, None while they are being read.

        The tables of a rank can take seconds to read; meanwhile the picture goes on answering. Raises what reading
        them raised.
        """
        reading = self._readings.once((track, slice_id), lambda: self._reader.submit(self._read, track, slice_id))
        try:
            read: dict[str, Any] = reading.result(PATIENCE_S)
        except TimeoutError:
            return None
        return read

    def _read(self, track: int, slice_id: int) -> dict[str, Any]:
        with self.lock:
            told = timeline.details(self.run, self.scene, track, slice_id)
            arrows = timeline.arrows(self.run, self.scene, track, slice_id)
        return {"details": message.details(self.scene, told), "arrows": message.arrows(self.scene, arrows)}


def run_of(entry: RunEntry) -> Run:
    """Return the run with its files listed and no trace of several read. Raises TracekitError."""
    return _run_of(entry).run


def open_timeline(entry: RunEntry, window: int, on_progress: Callable[[int, int], None]) -> OpenTimeline:
    """Return the scene of a window: mapped where it was laid out before, else laid out now. Raises TracekitError.

    `on_progress(done, total)` is called for each trace that is laid out.
    """
    shelf = st.session_state.setdefault("own_scenes", _SceneCache()) if entry.is_private else _scene_cache()
    key = (entry.path, runs.stamp_seen(entry), window)
    with shelf.lock_of(key):
        found: OpenTimeline | None = shelf.get(key)
        if found is None:
            loaded = _run_of(entry)
            with loaded.lock:
                scene = _laid_out(loaded.run, window, on_progress, is_private=entry.is_private)
            found = OpenTimeline(loaded.run, scene, window, loaded.lock)
            shelf.put(key, found)
        return found


def _laid_out(run: Run, window: int, on_progress: Callable[[int, int], None], *, is_private: bool) -> timeline.Scene:
    if not is_private:
        return timeline.open_scene(run, window, on_progress=on_progress)
    # The file is mapped: it lasts as long as the scene, and nobody finds it.
    with tempfile.TemporaryDirectory() as folder:
        return timeline.open_scene(run, window, folder=Path(folder), on_progress=on_progress)


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A run, and the lock to hold around what reads its traces: it serves one thread."""

    run: Run
    lock: Any = field(default_factory=threading.RLock)


def _run_of(entry: RunEntry) -> _Loaded:
    if entry.is_private:
        return _loaded_private(entry, entry.stamp)
    runs.refuse_links(entry)
    return _loaded(entry, runs.stamp_seen(entry))


@st.cache_resource(max_entries=20, show_spinner=False)
def _loaded(_entry: RunEntry, stamp: str) -> _Loaded:  # noqa: ARG001  # the stamp is the cache's key
    return _Loaded(loader.load(_entry.path))


@st.cache_resource(max_entries=1, show_spinner=False, scope="session")
def _loaded_private(_entry: RunEntry, stamp: str) -> _Loaded:  # noqa: ARG001  # the stamp is the cache's key
    return _Loaded(loader.load(_entry.path, cache=False))


class _SceneCache:
    """The scenes used last, by key. Streamlit's cache would not let a function that it keeps report its progress."""

    def __init__(self) -> None:
        self._scenes: OrderedDict[Any, OpenTimeline] = OrderedDict()
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()

    def lock_of(self, key: Any) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def get(self, key: Any) -> OpenTimeline | None:
        with self._lock:
            if key in self._scenes:
                self._scenes.move_to_end(key)
            return self._scenes.get(key)

    def put(self, key: Any, scene: OpenTimeline) -> None:
        with self._lock:
            self._scenes[key] = scene
            while len(self._scenes) > MAX_SCENES:
                oldest, _ = self._scenes.popitem(last=False)
                self._locks.pop(oldest, None)


@st.cache_resource(show_spinner=False)
def _scene_cache() -> _SceneCache:
    return _SceneCache()
