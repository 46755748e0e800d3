"""What if: what a step would take without each cause of lost time, by replays; the same as `tracekit whatif` says."""

from collections.abc import Sequence

import polars as pl
import streamlit as st

from dashboard import downloads, rule_families, run_store, what_if, widgets
from dashboard.pages import predictions
from dashboard.run_catalog import RunEntry
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.replay.graph import causes, savings, steps
from tracekit.replay.graph import what_if as answers
from tracekit.replay.graph.what_if import Answer, WhatIf
from tracekit.report import charts, html_fragments, phrases
from tracekit.report import what_if as told

MAX_PRICE = 10_000.0
MISSING_RANKS = "They are taken to come no later than those that have one: put the traces of all ranks into one folder."
INFERRED = (
    "The traces do not tell which stream waits for which; that is inferred, and the answers are less sure. To have it "
    "recorded: experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True), as tracekit record does."
)


def page(entry: RunEntry) -> None:
    """Say how well the replay reproduces the run, what each change would save, and where; and predict others."""
    held = rule_families.begin(entry)
    if held is None:
        return
    try:
        _replayed(entry)
        found = what_if.without(entry)
        _reproduced(found, held)
        price = _price(found)
        found = what_if.without(entry, gpu_hour_price=price)
        _ranked(entry, found)
        _chosen(entry, held, found, price)
        predictions.section(entry, found, price)
    except TracekitError as error:
        widgets.problem(str(error))


def _replayed(entry: RunEntry) -> None:
    place = st.empty()
    what_if.replay(entry, lambda ratio, what: place.progress(ratio, f"{what}, once for this run"))
    place.empty()


def _reproduced(found: WhatIf, held: run_store.OpenRun) -> None:
    st.html(
        html_fragments.numbers(
            {
                "a step, recorded": (units.duration(found.step_ns), ""),
                "replayed with nothing changed": (units.duration(found.replayed_ns), ""),
                "off, all steps together": (_signed(found.replay_error_ratio), ""),
                "off in one step, at most": (units.share(steps.worst_error_ratio(found.replay)), ""),
            }
        )
    )
    st.caption(
        "The replay knows durations, order, waits and the host's time between its calls, and nothing of when work "
        "began: how near it comes to the recorded steps says how far to trust what follows."
    )
    caveat = told.caveat(found)
    if caveat:
        st.warning(widgets.plain(caveat), icon=":material/warning:")
    if found.infers_waits:
        st.caption(widgets.plain(INFERRED))
    missing = held.run.data_quality.filter(pl.col("kind") == "missing_ranks")["message"]
    if missing.len():
        st.caption(widgets.plain(f"{missing[0]} {MISSING_RANKS}"))


def _signed(ratio: float) -> str:
    """Return a ratio with its sign, or none where it rounds to nothing.

    >>> _signed(-0.0131), _signed(-0.0001)
    ('−1.3%', '0.0%')
    """
    told = units.share(abs(ratio))
    return told if told == units.share(0) else ("−" if ratio < 0 else "+") + told


def _price(found: WhatIf) -> float | None:
    if not found.gpus:
        return None
    price = st.number_input(
        f"Price of a GPU-hour ({found.gpus:,} GPUs)",
        0.0,
        MAX_PRICE,
        step=0.5,
        key=widgets.bind_number("price", 0.0, MAX_PRICE, 0.0),
        width=230,
        help="In any currency; it tells what each change is worth per day of training",
    )
    return float(price) or None


def _ranked(entry: RunEntry, found: WhatIf) -> None:
    st.subheader("Without one cause")
    table = told.as_table(found)
    if table.is_empty():
        st.info("Nothing that can be taken away from this run would make its step shorter.")
    else:
        st.caption("Each change by itself. They overlap: what several save together is not their sum.")
        widgets.chart(charts.potential_savings(table), key="whatif-savings")
        st.html(_table(found))
        downloads.table(
            table.select("cause", pl.lit(found.step_ns).alias("step_ns"), pl.exclude("cause")), key="whatif"
        )
        for (caveat,), rows in table.filter(pl.col("caveat") != "").group_by("caveat", maintain_order=True):
            st.caption(widgets.plain(f"Less sure: {', '.join(rows['cause'])}, for {caveat}."))
        with st.expander("Saved on each rank"):
            each = what_if.savings(entry, [(name,) for name in table["cause"]])
            saved = savings.by_rank(each).with_columns(pl.format("rank {}_ns", "rank"))
            widgets.frame(saved.pivot("rank", index="cause", values="saved_ns"), key="whatif-by-rank")
    _rest(found)


def _table(found: WhatIf) -> str:
    """Return the answers as a table of HTML: each as a sentence, and its numbers."""
    header = ["without", "that is", "a step takes", "saved", "of the step", "confidence"]
    rows = []
    for each in found.answers:
        numbers = (units.duration(each.without_ns), units.duration(each.saved_ns), units.share(each.saved_ratio))
        rows.append([each.cause.name, each.cause.summary, *numbers, f"{each.confidence:.0%}", *_worth(each).values()])
    header += list(_worth(found.answers[0]))
    return escaping.html_table(header, rows, right=[at > 1 for at in range(len(header))])


def _worth(answer: Answer) -> dict[str, str]:
    shown = {"GPU-hours a day": answer.gpu_hours_per_day, "worth a day": answer.per_day}
    return {label: f"{value:,.{at + 1}f}" for at, (label, value) in enumerate(shown.items()) if value is not None}


def _rest(found: WhatIf) -> None:
    named = {each.cause.name for each in (*found.answers, *found.unavailable)}
    little = [name for name in causes.CAUSES if name not in named]
    if little:
        st.caption(f"Would save less than {answers.MIN_SAVED_RATIO:.1%} of a step: {', '.join(little)}.")
    if found.unavailable:
        with st.expander(f"{len(found.unavailable)} that this run cannot tell, and why"):
            rows = [(each.cause.name, each.unavailable_reason) for each in found.unavailable]
            st.html(escaping.html_table(("without", "cannot be told, because"), rows))


def _chosen(entry: RunEntry, held: run_store.OpenRun, found: WhatIf, price: float | None) -> None:
    st.subheader("One change or several together, rank by rank")
    names = [each.cause.name for each in found.answers]
    names += [name for name in causes.CAUSES if name not in names]
    wanted = st.multiselect(
        "Without", names, key=widgets.bind_several("without", names, names[:1]), placeholder="Choose what to take away"
    )
    if not wanted:
        return
    alone = what_if.without(entry, tuple(wanted), gpu_hour_price=price)
    if wanted[1:]:
        answer = what_if.together(entry, tuple(wanted), gpu_hour_price=price)
    else:
        answer = (*alone.answers, *alone.unavailable)[0]
    if answer.unavailable_reason:
        st.info(
            widgets.plain(
                f"This run cannot tell what it would be without {answer.cause.name}: {answer.unavailable_reason}."
            )
        )
        return
    st.html(html_fragments.numbers(_numbers(answer)))
    if wanted[1:]:
        each = ", ".join(f"{units.duration(one.saved_ns)} without {one.cause.name}" for one in alone.answers)
        st.caption(widgets.plain(f"Saved by each alone: {each}."))
    st.caption(widgets.plain(_about(answer)))
    (saved,) = what_if.savings(entry, [tuple(wanted)])
    widgets.chart(charts.savings_by_rank(savings.by_rank([saved]), answer.cause.code), key="whatif-ranks")
    with st.expander("Step by step"):
        table = saved.steps
        widgets.frame(table.select(each.name for each in table if each.null_count() < table.height), key="whatif-steps")
    _findings(held, wanted)


def _numbers(answer: Answer) -> dict[str, tuple[str, str]]:
    shown = {
        "a step takes": units.duration(answer.step_ns),
        f"without {answer.cause.name}": units.duration(answer.without_ns),
        "saved": units.duration(answer.saved_ns),
        "of the step": units.share(answer.saved_ratio),
    }
    return {label: (value, "") for label, value in (shown | _worth(answer)).items()}


def _about(answer: Answer) -> str:
    caveat = f" Less sure: {answer.caveat}." if answer.caveat else ""
    code = answer.cause.code
    rule = f" The rule that speaks of it is {code} {phrases.rule_name(code)}." if code else ""
    return (
        f"{answer.cause.summary[0].upper()}{answer.cause.summary[1:]}. This rests on: {answer.basis}. Confidence "
        f"{answer.confidence:.0%}.{caveat}{rule}"
    )


def _findings(held: run_store.OpenRun, names: Sequence[str]) -> None:
    keyed = widgets.finding_keys(held.report.findings)
    mine = {key: found for key, found in keyed.items() if found.what_if and found.what_if.cause in names}
    if mine:
        with st.expander(f"{len(mine)} finding{'s' * (len(mine) > 1)} about it in this run"):
            for key, found in mine.items():
                widgets.finding(found, held, key=f"whatif-{key}")
