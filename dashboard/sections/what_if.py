"""What if: the step time without one or several causes of lost time, and on another network or strategy."""

from collections.abc import Sequence

import polars as pl
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import downloads, widgets
from dashboard.run_store import OpenRun, what_if
from dashboard.run_store.what_if import Answer, NodeSpec, Prediction, WhatIf
from dashboard.url_state import bind, bind_flag, bind_number, bind_several
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts, headlines, phrases, rank_selection
from tracekit.report import what_if as answer_text
from tracekit.report.render import html as render_html

WITHOUT, SAVINGS, PRICE = "without", "savings", "price"
"""Parameters of the address: the causes that are removed, whether all savings are shown, and a GPU-hour's price."""
MAX_PRICE = 10_000.0
PRICE_HELP = "In any currency; shows what each change is worth per day of training"
NOTHING, NETWORK, FEWER = "choose one", "another network", "fewer recomputed layers"
CHOICES = (NOTHING, NETWORK, *what_if.STRATEGIES, FEWER)
TIMES = (0.1, 0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
GPUS_PER_NODE = (2, 4, 8, 16, 32, 64, 72)
NODE_GB_PER_S = (10, 20, 50, 100, 150, 200, 230, 300, 400, 600, 800, 1200, 1800)
MAX_LAYERS = 1000
MISSING_RANKS = (
    "Ranks without a trace are assumed to arrive no later than the others: put the traces of all ranks into one folder."
)
INFERRED = (
    "The traces do not record which stream waits for which, so these dependencies are inferred and the answers are "
    "less certain. To record them: experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True), as "
    "tracekit record does."
)


def bind_causes() -> None:
    """Take the causes to remove from the address, before `tick` and `show` draw them."""
    bind_several(WITHOUT, what_if.cause_names())


def tick(cause: str, key: str) -> None:
    """Let a person remove the cause of a finding, which has this key, from the step that `show` predicts."""
    state = f"tick-{key}"
    st.session_state[state] = cause in st.session_state[WITHOUT]
    st.checkbox("Predict the step without it", key=state, on_change=_remove, args=(cause, state))


def _remove(cause: str, state: str) -> None:
    other_causes = [name for name in st.session_state[WITHOUT] if name != cause]
    st.session_state[WITHOUT] = [*other_causes, cause] if st.session_state[state] else other_causes


def show(run: OpenRun) -> None:
    """Predict the step without the chosen causes together; on request show the saving of each, and other setups."""
    try:
        widgets.subheader("The step without several of these together")
        causes = st.multiselect(
            "Without", what_if.cause_names(), key=WITHOUT, placeholder="Tick findings above, or choose causes to remove"
        )
        price = st.session_state.get(PRICE) or None
        if causes:
            with st.spinner("Replaying the steps"):
                _chosen_causes(run, causes, price)
        if st.toggle("Savings of all causes, and other networks and strategies", key=bind_flag(SAVINGS)):
            _all_savings(run)
    except TracekitError as error:
        widgets.problem(str(error))


def _all_savings(run: OpenRun) -> None:
    """Show how well the replay reproduces the run and what each change would save; predict other setups."""
    _replay(run)
    price = _price(what_if.without(run).gpus)
    answers = what_if.without(run, gpu_hour_price=price)
    widgets.headline(headlines.savings(run.report, answers))
    _accuracy(run, answers)
    _single_causes(run, answers)
    _predictions(run, answers.gpus, price)


def _replay(run: OpenRun) -> None:
    bar = st.empty()
    what_if.replay(run, lambda ratio, part: bar.progress(ratio, f"{part}, once for this run"))
    bar.empty()


def _accuracy(run: OpenRun, answers: WhatIf) -> None:
    widgets.numbers(
        {
            "mean recorded step": units.duration(answers.step_ns),
            "replayed without changes": units.duration(answers.replayed_ns),
            "replay error, all steps": _signed_share(answers.replay_error_ratio),
            "largest error of a step": units.share(what_if.worst_error_ratio(answers.replay)),
        }
    )
    widgets.caption(
        "Times are means over steps. The replay uses durations, order, dependencies and host time between calls, but "
        "no recorded start times. Its error on the recorded steps shows how far to trust the answers below."
    )
    caveat = answer_text.caveat(answers)
    if caveat:
        st.warning(widgets.plain(caveat), icon=":material/warning:")
    if answers.infers_waits:
        widgets.caption(widgets.plain(INFERRED))
    missing = run.run.data_quality.filter(kind="missing_ranks")["message"]
    if missing.len():
        widgets.caption(widgets.plain(f"{missing[0]} {MISSING_RANKS}"))


def _signed_share(ratio: float) -> str:
    """Return a ratio with its sign, or none where it rounds to zero.

    >>> _signed_share(-0.0131), _signed_share(-0.0001)
    ('−1.3%', '0.0%')
    """
    text = units.share(abs(ratio))
    return text if text == units.share(0) else ("−" if ratio < 0 else "+") + text


def _price(gpus: int | None) -> float | None:
    if not gpus:
        return None
    label, key = f"Price of a GPU-hour ({gpus:,} GPUs)", bind_number(PRICE, 0.0, MAX_PRICE, 0.0)
    price = st.number_input(label, 0.0, MAX_PRICE, step=0.5, key=key, width=230, help=PRICE_HELP)
    return float(price) or None


def _single_causes(run: OpenRun, answers: WhatIf) -> None:
    widgets.subheader("Without one cause")
    table = answer_text.as_table(answers)
    if table.is_empty():
        widgets.info("No cause that the replay can remove would shorten a step of this run.")
    else:
        widgets.caption(
            "Each change by itself. Savings may overlap, so do not add them up: choose several together above."
        )
        widgets.chart(charts.potential_savings(table), key="whatif-savings")
        widgets.html(render_html.table(answer_text.savings_cells(answers.answers)))
        step_ns = pl.lit(answers.step_ns).alias("step_ns")
        downloads.table(table.select("cause", step_ns, pl.exclude("cause")), key="whatif")
        for (caveat,), rows in table.filter(pl.col("caveat") != "").group_by("caveat", maintain_order=True):
            widgets.caption(widgets.plain(f"Less certain: {', '.join(rows['cause'])}, because {caveat}."))
        with st.expander("Savings by rank"):
            by_rank = what_if.savings_by_rank(run, [(given.name,) for given in answers.answers if given.causes])
            if len(run.run.ranks) <= rank_selection.MAX_DRAWN:
                by_rank = by_rank.with_columns(pl.format("rank {}_ns", "rank"))
                by_rank = by_rank.pivot("rank", index="cause", values="saved_ns")
            widgets.frame(by_rank, key="whatif-by-rank")
    _others(answers)


def _others(answers: WhatIf) -> None:
    answered = {answer.name for answer in (*answers.answers, *answers.unavailable)}
    small = [name for name in what_if.cause_names() if name not in answered]
    if small:
        widgets.caption(f"These would save less than {what_if.MIN_SAVED_RATIO:.1%} of a step: {', '.join(small)}.")
    if answers.unavailable:
        with st.expander(f"{len(answers.unavailable)} that cannot be computed for this run, with the reason"):
            rows = [(answer.name, answer.unavailable_reason) for answer in answers.unavailable]
            widgets.html(escaping.html_table(("without", "cannot be computed, because"), rows))


def _chosen_causes(run: OpenRun, causes: Sequence[str], price: float | None) -> None:
    singly = what_if.without(run, tuple(causes), gpu_hour_price=price)
    if causes[1:]:
        answer = what_if.together(run, tuple(causes), gpu_hour_price=price)
    else:
        answer = (*singly.answers, *singly.unavailable)[0]
    if answer.unavailable_reason:
        widgets.info(
            widgets.plain(f"The step time without {answer.name} cannot be computed: {answer.unavailable_reason}.")
        )
        return
    widgets.numbers(_numbers(answer) | answer_text.worth(answer))
    if causes[1:]:
        saved = ", ".join(f"{units.duration(answer.saved_ns)} without {answer.name}" for answer in singly.answers)
        widgets.caption(widgets.plain(f"Savings of each alone: {saved}."))
    widgets.caption(widgets.plain(" ".join(filter(None, (_about(answer), answer_text.caveat(singly))))))
    with st.expander("By rank and step by step"):
        by_rank = what_if.savings_by_rank(run, [tuple(causes)])
        drawn_ranks = run.result_of(rank_selection.drawn_ranks)
        widgets.chart(charts.savings_by_rank(by_rank, answer.name, drawn_ranks), key="whatif-ranks")
        widgets.note(rank_selection.selection_note(run.run))
        widgets.frame(what_if.steps_without(run, tuple(causes)), key="whatif-steps")


def _numbers(answer: Answer) -> dict[str, str]:
    return {
        "mean step": units.duration(answer.step_ns),
        f"without {answer.name}": units.duration(answer.without_ns),
        "saved": units.duration(answer.saved_ns),
        "of the step": units.share(answer.saved_ratio),
    }


def _about(answer: Answer) -> str:
    caveat = f" Less certain: {answer.caveat}." if answer.caveat else ""
    code = answer.code
    rule = f" Rule {code} {phrases.rule_name(code)} reports this cause." if code else ""
    summary = answer.summary[0].upper() + answer.summary[1:]
    return f"{summary}. Basis: {answer.basis}. Confidence {answer.confidence:.0%}.{caveat}{rule}"


def _predictions(run: OpenRun, gpus: int | None, price: float | None) -> None:
    """Let a person choose a network, strategy or recomputation, and show the predicted step time."""
    widgets.subheader("Another network or strategy, or less recomputation")
    columns = st.columns([2, 2, 2, 4])
    choice = columns[0].selectbox("Predict", CHOICES, key=bind("predict", CHOICES))
    if choice == NOTHING:
        widgets.caption("A prediction from the recorded kernels and transfers, with its assumptions.")
        return
    try:
        prediction = _predict(run, choice, columns)
    except TracekitError as error:
        widgets.info(widgets.plain(str(error)))
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
    return what_if.predict_strategy(run, choice, _node(columns) if choice == what_if.HSDP else None)


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
        "mean step": units.duration(prediction.step_ns),
        f"predicted, {prediction.name}": units.duration(prediction.predicted_ns),
        "of the step": _signed_share(-prediction.saved_ratio),
    }
    hours = what_if.hours_per_day(prediction.saved_ratio, gpus or 0)
    if hours is not None:
        numbers["GPU-hours saved a day"] = f"{hours:,.1f}"
        if price is not None:
            numbers["worth a day"] = f"{hours * price:,.2f}"
    widgets.numbers(numbers)
    st.markdown("This prediction assumes:\n" + "\n".join("- " + widgets.plain(text) for text in prediction.assumptions))
