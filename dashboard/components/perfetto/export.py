"""Export of the aligned run to Perfetto: as a file to download, or into a tab of the person's own browser."""

import io

import streamlit as st

from dashboard import components, downloads, rank_choice, widgets
from dashboard.components.timeline.timeline_store import OpenTimeline
from tracekit.errors import InputError, TracekitError
from tracekit.model import units
from tracekit.report.export import perfetto
from tracekit.rules.rule import Finding

MAX_FILE_BYTES = 256 << 20
MAX_TAB_BYTES = 64 << 20
ALL, DRAWN = "all", "those drawn"
_mount_button = components.register("perfetto", ("perfetto.js",))


class _BoundedFile(io.BytesIO):
    """A file in memory of limited size. Raises InputError beyond it."""

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        if self.tell() + len(data) > MAX_FILE_BYTES:
            raise InputError(
                f"the file would be larger than {units.size(MAX_FILE_BYTES)}: choose one rank, or run "
                "tracekit export RUN --out run.pftrace"
            )
        return super().write(data)


@st.fragment
def show(run_name: str, opened: OpenTimeline, findings: list[Finding]) -> None:
    """Offer the run for Perfetto. The file is made on request."""
    ranks = opened.run.ranks
    # All traces of a large run would exceed the limit, after minutes.
    all_ranks = DRAWN if rank_choice.is_needed(len(ranks)) else ALL
    columns = st.columns([1, 1, 3], vertical_alignment="bottom")
    with columns[0]:
        rank = st.selectbox("Ranks", [all_ranks, *ranks], key=f"perfetto-rank-{run_name}") if ranks[1:] else all_ranks
    key = f"perfetto-{opened.scene.key[:16]}-{rank}"
    with columns[1]:
        if st.button("Write the file", key=f"make-{key}"):
            _write(opened, findings, rank, key)
    data: bytes | None = st.session_state.get("perfetto", {}).get(key)
    if data is None:
        st.caption(
            f"One Perfetto trace of {'all ranks' if all_ranks == ALL else 'the ranks drawn'} on one clock, with the "
            "findings. Writing it takes about as long as opening the run."
        )
        return
    name = f"{downloads.file_name(run_name)}{'' if rank == all_ranks else f'-rank{rank}'}.pftrace"
    st.download_button(
        f"Download {units.size(len(data))}",
        data,
        file_name=name,
        mime="application/octet-stream",
        key=f"file-{key}",
        on_click="ignore",
    )
    if len(data) > MAX_TAB_BYTES:
        st.caption(
            f"The file is too large to open in a tab (limit: {units.size(MAX_TAB_BYTES)}). Download it and open it at "
            "ui.perfetto.dev, or choose one rank."
        )
        return
    # The trace goes to the browser now, and to a tab of ui.perfetto.dev on a click. Bytes travel as they are, after
    # their name.
    head = name.encode()
    _mount_button(key=f"open-{key}", data=len(head).to_bytes(2, "little") + head + data)


def _write(opened: OpenTimeline, findings: list[Finding], rank: int | str, key: str) -> None:
    scene_ranks = opened.scene.tracks["rank"].unique(maintain_order=True).to_list()
    ranks = scene_ranks if isinstance(rank, str) else [rank]
    # One file per person at a time: they are large.
    st.session_state["perfetto"] = {}
    file = _BoundedFile()
    try:
        with opened.lock, st.spinner("Writing the ranks on one clock"):
            perfetto.write(opened.run, file, ranks=None if rank == ALL else ranks, findings=findings)
    except TracekitError as error:
        widgets.problem(str(error))
        return
    st.session_state["perfetto"] = {key: file.getvalue()}
