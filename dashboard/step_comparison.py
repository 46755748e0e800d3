"""A step of the run next to one of another run on the timeline: their choice, and how much the steps differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboard import crashes, flame_graph, rank_choice, run_store, sharing, widgets
from dashboard.components.timeline import address, open_pair, timeline_store
from dashboard.components.timeline.open_pair import OpenPair
from dashboard.components.timeline.timeline_store import OpenTimeline
from dashboard.run_entry import RunEntry
from dashboard.run_store import LoadedRun
from dashboard.url_state import bind, forget
from tracekit.errors import TracekitError
from tracekit.model import escaping
from tracekit.report import step_pair
from tracekit.report.headlines import Headline
from tracekit.report.step_pair import MarkedSteps

OTHER, NO_RUN = "with", "no other run"
RANKS, STEPS = ("rank_a", "rank_b"), ("step_a", "step_b")
"""The parameters of the address: the other run, and rank and step of both."""
_WANTED = "steps_wanted"
"""The state with the steps that the browser had, and those that were chosen since then."""
MAX_NAME = 80
HOW_TO_MARK = "call profiler.step() after each optimizer step, or record with `tracekit record`"


def choose_run(current: RunEntry, listed: Sequence[RunEntry]) -> RunEntry | None:
    """Let a person choose another run; None without one. Those chosen in the sidebar come first."""
    by_name = {entry.name: entry for entry in listed if entry.name != current.name}
    if not by_name:
        return None
    name = st.selectbox(
        "Compare steps with", [NO_RUN, *by_name], key=bind(OTHER, [NO_RUN, *by_name]), format_func=escaping.inert
    )
    if name not in by_name:
        return None
    _forget_choices_of_other_runs(current.name, name)
    return by_name[name]


def _forget_choices_of_other_runs(*names: str) -> None:
    compared = st.session_state.get("steps_compared_of")
    if compared not in (None, names):
        for name in (*RANKS, *STEPS):
            forget(name)
    st.session_state["steps_compared_of"] = names


def leave() -> None:
    """Show one run again, such as when another page leads to a moment of it."""
    if OTHER in st.session_state or st.query_params.get(OTHER):
        forget(OTHER)


def compare(entry: RunEntry, opened: OpenTimeline, other: RunEntry, draw: Callable[[OpenPair], None], key: str) -> bool:
    """Compare a step of the run with one of another, and `draw` both; return whether both have marked steps."""
    entries, loaded, marked = (entry, other), [], []
    for side, window in ((entry, opened.window), (other, None)):
        of_run = widgets.try_reading(side, _read)
        steps = _measure_steps(side, of_run, window) if of_run is not None else None
        if of_run is None or steps is None:
            return False
        loaded.append(of_run)
        marked.append(steps)
    sides = tuple(map(_Run, entries, loaded, marked, (opened, None)))
    st.fragment(crashes.guard(_compare, "the timeline", "The rest of the page is shown."))(sides, draw, key)
    return True


@dataclass(frozen=True)
class _Run:
    """A run that is compared: its steps, and a timeline that may not draw every rank."""

    entry: RunEntry
    loaded: LoadedRun
    marked: MarkedSteps
    opened: OpenTimeline | None

    def timeline_of(self, rank: int) -> OpenTimeline:
        """Return a timeline that draws a rank; of many ranks, it draws no other one. Raises TracekitError."""
        if self.opened is not None and any(part.rank == rank for part in self.opened.scene.parts):
            return self.opened
        ranks = (rank,) if rank_choice.is_needed(len(self.loaded.run.ranks)) else None
        with st.spinner(f"Laying out the timeline of {widgets.plain(self.entry.name)}"):
            return timeline_store.open_timeline(
                self.entry, self.marked.window, lambda *_: None, open_run=self.loaded, ranks=ranks
            )


def _compare(sides: tuple[_Run, _Run], draw: Callable[[OpenPair], None], key: str) -> None:
    """Choose a rank and a step of both runs, state the difference, and draw the two ranks: a fragment."""
    marked = (sides[0].marked, sides[1].marked)
    _move(marked, (st.session_state.get(key) or {}).get("step"), key)
    rows = [side.row(rank, step) for side, (rank, step) in zip(marked, _choose_steps(marked), strict=True)]
    try:
        timelines = [side.timeline_of(row["rank"]) for side, row in zip(sides, rows, strict=True)]
    except TracekitError as error:
        widgets.problem(str(error))
        return
    steps = [
        open_pair.pair_step(view, side.entry.name, row) for view, side, row in zip(timelines, sides, rows, strict=True)
    ]
    is_private = any(side.entry.is_private for side in sides)
    pair = open_pair.open_pair((timelines[0], timelines[1]), (steps[0], steps[1]), is_private=is_private)
    about = (
        f"{letter} is rank {row['rank']} of {len(side.loaded.run.ranks)} of {escaping.inert(side.entry.name, MAX_NAME)}"
        for letter, row, side in zip(open_pair.LETTERS, rows, sides, strict=True)
    )
    with sharing.fragment("steps side by side"):
        widgets.headline(Headline(step_pair.sentence(rows[0], rows[1], open_pair.LETTERS), "; ".join(about)))
        _follow_step(pair, key)
        draw(pair)


def _follow_step(pair: OpenPair, key: str) -> None:
    """Let view and flame graph of a pair stay at the same place relative to the step that is compared now."""
    state, view = st.session_state, f"address-{key}"
    now = (pair.scene.key, pair.zero_ns)
    before = state.get(f"zero-{key}")
    state[f"zero-{key}"] = now
    if before is None:
        state.setdefault(view, address.linked_part(pair))
    elif before != now:
        span_ns, later_ns = pair.scene.span[1] - pair.scene.span[0], now[1] - before[1]
        for name in (view, flame_graph.state_of(key)):
            if state.get(name) is not None:
                start_ns, end_ns = (min(max(edge + later_ns, 0), span_ns) for edge in state[name])
                state[name] = (start_ns, end_ns) if start_ns < end_ns else None


def _read(entry: RunEntry) -> LoadedRun:
    return run_store.open_run(entry) if run_store.is_checked_soon(entry) else run_store.load(entry)


@run_store.cached_per_run(max_entries=run_store.MAX_LOADED_RUNS)
def _marked_steps(entry: RunEntry) -> dict[int | None, MarkedSteps]:  # noqa: ARG001 the key of the cache
    return {}


def _measure_steps(entry: RunEntry, loaded: LoadedRun, window: int | None = None) -> MarkedSteps | None:
    """Return the steps of a run in a window, or say why they cannot be compared and return None."""
    by_window = _marked_steps(entry)
    if window not in by_window:
        try:
            with st.spinner(f"Measuring the steps of {widgets.plain(entry.name)}"), loaded.lock:
                by_window[window] = step_pair.marked_steps(loaded.run, window)
        except TracekitError as error:
            widgets.problem(f"{entry.name}: {error}")
            return None
    if by_window[window].step is None:
        widgets.info(
            f"{widgets.plain(entry.name)} has no marked steps, so it cannot be aligned by step. To mark them, "
            f"{HOW_TO_MARK}."
        )
        return None
    return by_window[window]


def _choose_steps(marked: tuple[MarkedSteps, MarkedSteps]) -> list[tuple[int, int]]:
    """Let a person choose rank and step of both runs; return them. The representative step of each is the default."""
    choices = []
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for side, (run_steps, letter) in enumerate(zip(marked, open_pair.LETTERS, strict=True)):
            # In a narrow window, rank and step of a run stay next to each other.
            of_run = st.container(horizontal=True, width="content")
            ranks = run_steps.table["rank"].unique().sort().to_list()
            rank = of_run.selectbox(f"{letter}: rank", ranks, key=bind(RANKS[side], ranks, run_steps.rank), width=110)
            steps = run_steps.steps(rank)
            step = of_run.selectbox(
                f"{letter}: step",
                steps,
                key=bind(STEPS[side], steps, run_steps.step),
                format_func=lambda step, run_steps=run_steps, rank=rank: _step_label(run_steps, rank, step),
                width=210,
            )
            choices.append((rank, step))
        buttons = st.container(horizontal=True, width="content")
        for by, label in ((-1, "Previous steps"), (1, "Next steps")):
            moved = _shift(marked, choices, by)
            buttons.button(label, key=f"steps{by}", disabled=moved is None, on_click=_choose, args=(moved,))
    return choices


def _move(marked: tuple[MarkedSteps, MarkedSteps], request: Any, key: str) -> None:
    """Choose the next or the previous step of both runs, as a request of the browser says: each is obeyed once."""
    number, by = (request.get(name) if isinstance(request, Mapping) else None for name in ("number", "by"))
    choices = [(st.session_state.get(RANKS[side]), st.session_state.get(STEPS[side])) for side in range(2)]
    if number != st.session_state.get(f"steps-moved-{key}"):
        st.session_state[f"steps-moved-{key}"] = number
        if by in (-1, 1):
            _choose(_shift(marked, choices, by))
    _apply_choice([step for _, step in choices])


def _apply_choice(reported: list[int | None]) -> None:
    """Let the widgets have the steps that were chosen by a key or a button, until the browser reports these.

    A message that comes before the browser has them, such as of a new view, has the steps from before.
    """
    before, requested = st.session_state.get(_WANTED, (None, None))
    if reported == before:
        st.session_state.update(zip(STEPS, requested, strict=True))
    else:
        st.session_state.pop(_WANTED, None)


def _shift(marked: tuple[MarkedSteps, MarkedSteps], choices: Sequence[tuple[Any, Any]], by: int) -> list[int] | None:
    """Return the steps `by` later of both runs; None where one has no such step."""
    shifted = []
    for side, (rank, step) in zip(marked, choices, strict=True):
        steps = side.steps(rank)
        index = steps.index(step) + by if step in steps else -1
        if not 0 <= index < len(steps):
            return None
        shifted.append(steps[index])
    return shifted


def _choose(steps: list[int] | None) -> None:
    if steps is not None:
        st.session_state[_WANTED] = ([st.session_state.get(name) for name in STEPS], steps)


def _step_label(run_steps: MarkedSteps, rank: int, step: int) -> str:
    return f"{step} · representative" if (rank, step) == (run_steps.rank, run_steps.step) else str(step)
