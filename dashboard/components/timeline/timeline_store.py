"""Timelines: laid out once per run and window, then shared by everyone who looks at the run."""

import contextlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import run_store
from dashboard.components.timeline import message
from dashboard.run_entry import RunEntry
from dashboard.run_store import LoadedRun
from tracekit.report import timeline

MAX_SCENES = 6
MAX_SEARCHES = 64
MAX_DETAILS = 512
MAX_SEARCH_CHARACTERS = 200
DETAILS_TIMEOUT_S = 0.15


class _LruCache:
    """The values used last, by key, each made once. Streamlit's cache would not let `make` report its progress."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._key_locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                while len(self._values) > self._max_entries:
                    oldest, _ = self._values.popitem(last=False)
                    self._key_locks.pop(oldest, None)
            return value


@dataclass(frozen=True, eq=False)
class OpenTimeline(LoadedRun):
    """A run, none of whose traces was read yet, and the scene of one window."""

    scene: timeline.Scene = field(kw_only=True)
    window: int = field(kw_only=True)
    about: Mapping[int, str] = field(default_factory=dict)
    """The ranks drawn if these are not all, each with what it is, such as "typical"."""
    _searches: _LruCache = field(default_factory=lambda: _LruCache(MAX_SEARCHES))
    _details: _LruCache = field(default_factory=lambda: _LruCache(MAX_DETAILS))
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "timeline-details"))

    def find(self, text: str) -> timeline.Matches:
        """Return the slices whose name contains `text`."""
        text = text[:MAX_SEARCH_CHARACTERS]
        matches: timeline.Matches = self._searches.get(text, lambda: timeline.find_by_name(self.scene, text))
        return matches

    @cached_property
    def header(self) -> dict[str, Any]:
        """Return the part of the browser's message that never changes: see `message.scene`."""
        return message.scene(self.scene)

    def details(self, track: int, slice_id: int) -> dict[str, Any] | None:
        """Return details and arrows of a slice for the browser, None while they are being read.

        Reading the tables of a rank can take seconds; the timeline keeps responding meanwhile. Raises what the read
        raised.
        """
        reading = self._details.get((track, slice_id), lambda: self._reader.submit(self._read, track, slice_id))
        try:
            details: dict[str, Any] = reading.result(DETAILS_TIMEOUT_S)
        except TimeoutError:
            return None
        return details

    def _read(self, track: int, slice_id: int) -> dict[str, Any]:
        with self.lock:
            details = timeline.details(self.run, self.scene, track, slice_id)
            arrows = timeline.arrows(self.run, self.scene, track, slice_id)
        return {"details": message.details(self.scene, details), "arrows": message.arrows(self.scene, arrows)}


def open_timeline(
    entry: RunEntry,
    window: int,
    on_progress: Callable[[int, int], None],
    *,
    of: LoadedRun | None = None,
    ranks: tuple[int, ...] | None = None,
) -> OpenTimeline:
    """Return the timeline of a window: mapped if it was laid out before, else laid out now. Raises TracekitError.

    `on_progress(done, total)` is called for each trace that is laid out. `of` is the run if it is open already, `ranks`
    are those to draw.
    """

    def laid_out() -> OpenTimeline:
        loaded = of or run_store.load(entry)
        # The mapped file of a private run lasts as long as the scene, under no name that anyone could open.
        temporary = tempfile.TemporaryDirectory() if entry.is_private else contextlib.nullcontext()
        with loaded.lock, temporary as name:
            folder = Path(name) if name else None
            scene = timeline.open_scene(loaded.run, window, ranks=ranks, folder=folder, on_progress=on_progress)
        return OpenTimeline(loaded.run, loaded.lock, scene=scene, window=window)

    scenes = st.session_state.setdefault("own_scenes", _LruCache(MAX_SCENES)) if entry.is_private else _shared_scenes()
    opened: OpenTimeline = scenes.get((entry.path, run_store.stamp_seen(entry), window, ranks), laid_out)
    return opened


@st.cache_resource(show_spinner=False)
def _shared_scenes() -> _LruCache:
    return _LruCache(MAX_SCENES)
