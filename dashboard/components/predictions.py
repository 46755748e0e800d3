"""Predicted step times on another network, with another strategy, or with less recomputation: part of What if."""

from collections.abc import Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import what_if, widgets
from dashboard.run_store import OpenRun
from dashboard.url_state import bind, bind_number
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.replay.graph import strategies
from tracekit.replay.graph.hsdp import NodeSpec
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import hours_per_day
from tracekit.report import html_fragments

NOTHING, NETWORK, FEWER = "choose one", "another network", "fewer recomputed layers"
CHOICES = (NOTHING, NETWORK, *strategies.NAMES, FEWER)
TIMES = (0.1, 0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
GPUS_PER_NODE = (2, 4, 8, 16, 32, 64, 72)
NODE_GB_PER_S = (10, 20, 50, 100, 150, 200, 230, 300, 400, 600, 800, 1200, 1800)
MAX_LAYERS = 1000


def show(run: OpenRun, gpus: int | None, price: float | None) -> None:
    """Let a person choose a network, strategy or recomputation, and show the predicted step time."""
    st.subheader("Another network or strategy, or less recomputation")
    columns = st.columns([2, 2, 2, 4])
    choice = columns[0].selectbox("Predict", CHOICES, key=bind("predict", CHOICES))
    if choice == NOTHING:
        st.caption("A prediction from the recorded kernels and transfers, with its assumptions.")
        return
    try:
        prediction = _predict(run, choice, columns)
    except TracekitError as error:
        st.info(widgets.plain(str(error)))
        return
    _show_prediction(prediction, gpus, price)


def _predict(run: OpenRun, choice: str, columns: Sequence[DeltaGenerator]) -> Prediction:
    """Show the inputs that the choice needs, and return the prediction."""
    if choice == NETWORK:
        key, label = bind("network-times", TIMES, 2.0), "{:g} times the recorded".format
        times = columns[1].select_slider("Link bandwidth", TIMES, format_func=label, key=key)
        return what_if.other_network(run, float(times))
    if choice == FEWER:
        key = bind_number("layers", 1, MAX_LAYERS, 1)
        layers = columns[1].number_input("Layers", 1, MAX_LAYERS, step=1, key=key)
        return what_if.recomputing_less(run, int(layers))
    return what_if.predicted(run, choice, _node(columns) if choice == strategies.HSDP else None)


def _node(columns: Sequence[DeltaGenerator]) -> NodeSpec:
    gpus = columns[1].select_slider("GPUs per node", GPUS_PER_NODE, key=bind("node-gpus", GPUS_PER_NODE, 8))
    rate = columns[2].select_slider(
        "Bus bandwidth within a node, GB/s",
        NODE_GB_PER_S,
        key=bind("node-bandwidth", NODE_GB_PER_S, 230),
        help="As all_gather_perf of nccl-tests reports it on one node",
    )
    return NodeSpec(int(gpus), rate * 1e9)


def _show_prediction(prediction: Prediction, gpus: int | None, price: float | None) -> None:
    numbers = {
        "step time": units.duration(prediction.step_ns),
        f"predicted, {prediction.name}": units.duration(prediction.predicted_ns),
        "of the step": f"{-prediction.saved_ratio:+.1%}".replace("-", "−"),
    }
    hours = hours_per_day(prediction.saved_ratio, gpus)
    if hours is not None:
        numbers["GPU-hours saved a day"] = f"{hours:,.1f}"
        if price is not None:
            numbers["worth a day"] = f"{hours * price:,.2f}"
    st.html(html_fragments.numbers({label: (value, "") for label, value in numbers.items()}))
    st.markdown("This prediction assumes:\n" + "\n".join("- " + widgets.plain(text) for text in prediction.assumptions))
