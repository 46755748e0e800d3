"""Handing the aligned run over to Perfetto: as a file to keep, or into a tab of the person's own browser."""

import io
import re

import streamlit as st

from dashboard import timeline_store, widgets
from dashboard.components.perfetto.perfetto import open_in_perfetto
from dashboard.run_catalog import RunEntry
from tracekit.errors import InputError, TracekitError
from tracekit.model import escaping, units
from tracekit.report.export import perfetto
from tracekit.rules.rule import Finding

MAX_FILE_BYTES = 256 << 20
MAX_HANDED_BYTES = 64 << 20
ALL = "all"


class _Bounded(io.BytesIO):
    """A file in memory that takes no more than it may."""

    def write(self, data) -> int:  # type: ignore[no-untyped-def, override]
        if self.tell() + len(data) > MAX_FILE_BYTES:
            raise InputError(
                f"the file would be larger than {units.size(MAX_FILE_BYTES)}: choose one rank, or write it with "
                "tracekit export RUN --out run.pftrace"
            )
        return super().write(data)


def offer(entry: RunEntry, drawn: timeline_store.OpenTimeline, findings: list[Finding]) -> None:
    """Offer the run to Perfetto. Nothing is made before somebody asks for it."""
    with st.expander("Perfetto and offline use"):
        _offer(entry, drawn, findings)


@st.fragment
def _offer(entry: RunEntry, drawn: timeline_store.OpenTimeline, findings: list[Finding]) -> None:
    ranks = drawn.run.ranks
    columns = st.columns([1, 1, 3], vertical_alignment="bottom")
    with columns[0]:
        rank = st.selectbox("Ranks", [ALL, *ranks], key=f"perfetto-rank-{entry.name}") if ranks[1:] else ALL
    key = f"perfetto-{drawn.scene.key[:16]}-{rank}"
    with columns[1]:
        if st.button("Make the file", key=f"make-{key}"):
            _make(drawn, findings, rank, key)
    made: bytes | None = st.session_state.get("perfetto", {}).get(key)
    if made is None:
        st.caption(
            "One Perfetto trace of all ranks on one clock, with the findings. It is made here, from the whole traces, "
            "which takes about as long as opening the run."
        )
        return
    name = f"{_file_name(entry.name)}{'' if rank == ALL else f'-rank{rank}'}.pftrace"
    st.download_button(
        f"Download {units.size(len(made))}",
        made,
        file_name=name,
        mime="application/octet-stream",
        key=f"file-{key}",
        on_click="ignore",
    )
    if len(made) > MAX_HANDED_BYTES:
        st.caption(
            f"Too large to hand to a browser's tab ({units.size(MAX_HANDED_BYTES)} at most): download it and open the "
            "file at ui.perfetto.dev, or choose one rank."
        )
        return
    open_in_perfetto(made, name=name, key=f"open-{key}")


def _make(drawn: timeline_store.OpenTimeline, findings: list[Finding], rank: int | str, key: str) -> None:
    chosen = None if rank == ALL else [int(rank)]
    # One file a person at a time: they are large.
    st.session_state["perfetto"] = {}
    file = _Bounded()
    try:
        with drawn.lock, st.spinner("Writing all ranks on one clock"):
            perfetto.write(drawn.run, file, ranks=chosen, findings=findings)  # type: ignore[arg-type]
    except TracekitError as error:
        widgets.problem(str(error))
        return
    st.session_state["perfetto"] = {key: file.getvalue()}


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", escaping.inert(name, 60)).strip("-.") or "run"
