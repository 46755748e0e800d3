"""Predictions of a step on another network, under another strategy, or with less recomputed: a part of What if."""

from collections.abc import Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import what_if, widgets
from dashboard.run_catalog import RunEntry
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.replay.graph import strategies
from tracekit.replay.graph import what_if as answers
from tracekit.replay.graph.hsdp import NodeSpec
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import WhatIf
from tracekit.report import html_fragments

NOTHING, NETWORK, FEWER = "choose one", "another network", "fewer recomputed layers"
CHOICES = (NOTHING, NETWORK, *strategies.NAMES, FEWER)
TIMES = (0.1, 0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
GPUS_OF_A_NODE = (2, 4, 8, 16, 32, 64, 72)
NODE_GB_PER_S = (10, 20, 50, 100, 150, 200, 230, 300, 400, 600, 800, 1200, 1800)
MAX_LAYERS = 1000


def section(entry: RunEntry, found: WhatIf, price: float | None) -> None:
    """Let a person choose what a step would run on, by, or without, and say what it would then take."""
    st.subheader("Another network or strategy, or less recomputed")
    columns = st.columns([2, 2, 2, 4])
    with columns[0]:
        choice = st.selectbox("Predict", CHOICES, key=widgets.bind("predict", CHOICES))
    if choice == NOTHING:
        st.caption("A prediction from the recorded kernels and transfers; what it assumes is told with it.")
        return
    try:
        told = _asked(entry, choice, columns)
    except TracekitError as error:
        st.info(widgets.plain(str(error)))
        return
    _shown(told, found, price)


def _asked(entry: RunEntry, choice: str, columns: Sequence[DeltaGenerator]) -> Prediction:
    """Let a person say what the choice needs besides, and return the prediction."""
    if choice == NETWORK:
        with columns[1]:
            times = st.select_slider(
                "Links carry",
                TIMES,
                format_func=lambda each: f"{each:g} times as much",
                key=widgets.bind("network-times", TIMES, 2.0),
            )
        return what_if.other_network(entry, float(times))
    if choice == FEWER:
        with columns[1]:
            key = widgets.bind_number("layers", 1, MAX_LAYERS, 1)
            layers = st.number_input("Layers", 1, MAX_LAYERS, step=1, key=key)
        return what_if.recomputing_less(entry, int(layers))
    return what_if.predicted(entry, choice, _node(columns) if choice == strategies.HSDP else None)


def _node(columns: Sequence[DeltaGenerator]) -> NodeSpec:
    with columns[1]:
        gpus = st.select_slider("GPUs of a node", GPUS_OF_A_NODE, key=widgets.bind("node-gpus", GPUS_OF_A_NODE, 8))
    with columns[2]:
        rate = st.select_slider(
            "Bus bandwidth in a node, GB/s",
            NODE_GB_PER_S,
            key=widgets.bind("node-bandwidth", NODE_GB_PER_S, 230),
            help="What all_gather_perf of nccl-tests prints on one node",
        )
    return NodeSpec(int(gpus), rate * 1e9)


def _shown(told: Prediction, found: WhatIf, price: float | None) -> None:
    hours = answers.hours_per_day(told.saved_ratio, found.gpus)
    shown = {
        "a step takes": units.duration(told.step_ns),
        f"predicted, {told.name}": units.duration(told.predicted_ns),
        "of the step": f"{-told.saved_ratio:+.1%}".replace("-", "−"),
    }
    if hours is not None:
        shown["GPU-hours a day less"] = f"{hours:,.1f}"
        if price is not None:
            shown["worth a day"] = f"{hours * price:,.2f}"
    st.html(html_fragments.numbers({label: (value, "") for label, value in shown.items()}))
    st.markdown("This prediction rests on:\n" + "\n".join("- " + widgets.plain(each) for each in told.assumptions))
