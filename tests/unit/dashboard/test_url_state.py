"""The address and the widgets of a page, bound together."""

import pytest

testing = pytest.importorskip("streamlit.testing.v1", reason="needs the extra [dashboard]")
get_script_run_ctx = pytest.importorskip("streamlit.runtime.scriptrunner").get_script_run_ctx
WidgetStates = pytest.importorskip("streamlit.proto.WidgetStates_pb2").WidgetStates

WAIT_S = 60


def _page():
    import streamlit as st

    from dashboard import url_state

    st.session_state[url_state.PAGE] = st.query_params.get("on", "")
    ranks = [0, 1, 2] if st.session_state[url_state.PAGE] != "fewer" else [0, 1]
    st.selectbox("Rank", ranks, key=url_state.bind("rank", ranks))
    st.multiselect("Others", ["a", "b", "c"], key=url_state.bind_several("others", ["a", "b", "c"], ["a"]))
    st.slider("Part", 0.0, 10.0, key=url_state.bind_number("part", 0.0, 10.0, (0.0, 10.0)))
    st.text_input("Find", key=url_state.bind_text("find", max_characters=5))
    st.toggle("All", key=url_state.bind_flag("all"))


@pytest.fixture
def shown():
    return testing.AppTest.from_function(_page, default_timeout=WAIT_S)


def _values(app):
    return {
        "rank": app.selectbox[0].value,
        "others": app.multiselect[0].value,
        "part": app.slider[0].value,
        "find": app.text_input[0].value,
        "all": app.toggle[0].value,
    }


FIRST = {"rank": 0, "others": ["a"], "part": (0.0, 10.0), "find": "", "all": False}


def _at(app, **params):
    app.query_params.clear()
    app.query_params.update(params)
    return app.run()


def _address(app):
    """What the address says; one value and a list of one are the same."""
    texts = {name: [value] if isinstance(value, str) else list(value) for name, value in app.query_params.items()}
    return {name: value for name, value in texts.items() if name != "on"}


def test_without_a_choice_the_address_stays_empty(shown):
    shown.run()
    assert not shown.exception
    assert _values(shown) == FIRST
    assert _address(shown) == {}


def test_an_address_that_asks_for_too_many_runs_gets_as_many_as_are_compared():
    def page():
        import streamlit as st

        from dashboard import widgets
        from dashboard.run_entry import RunEntry

        chosen, *others = widgets.choose_runs([RunEntry(f"r{number}", f"/r{number}") for number in range(14)])
        st.text(" ".join(entry.name for entry in (chosen, *others)))

    shown = testing.AppTest.from_function(page, default_timeout=WAIT_S)
    shown.query_params.update(run="r0", compare=[f"r{number}" for number in range(1, 12)])
    shown.run()
    assert not shown.exception
    assert shown.text[0].value == "r0 r1 r2 r3 r4 r5 r6 r7 r8"
    assert shown.query_params["compare"] == [f"r{number}" for number in range(1, 9)]


def test_an_address_sets_every_widget(shown):
    _at(shown, rank="2", others=["c", "b"], part=["1.5", "3.0"], find="gemm", all="True")
    assert not shown.exception
    assert _values(shown) == {"rank": 2, "others": ["c", "b"], "part": (1.5, 3.0), "find": "gemm", "all": True}
    assert _address(shown)["part"] == ["1.5", "3.0"]


def _set_by_the_server(app):
    """Return the names of the widgets whose value the response sets."""
    drawn = (app.selectbox[0], app.multiselect[0], app.slider[0], app.text_input[0], app.toggle[0])
    return {name for name, widget in zip(FIRST, drawn, strict=True) if widget.proto.set_value}


def test_a_value_is_set_until_the_browser_reports_the_widget(shown):
    """A browser that leaves the page before it has drawn a response has lost the values that this response set."""
    unreported = WidgetStates()
    shown.run()
    assert _set_by_the_server(shown) == set(FIRST)
    shown._run(unreported)
    assert _set_by_the_server(shown) == set(FIRST)
    assert _values(shown) == FIRST
    shown.run()  # reports all of them
    assert _set_by_the_server(shown) == set()  # what a person is typing meanwhile stays
    assert _values(shown) == FIRST


@pytest.mark.parametrize(
    "params",
    [
        {"rank": "7"},
        {"rank": "<img>"},
        {"others": ["x"]},
        {"part": ["3.0", "1.5"]},
        {"part": ["nan", "nan"]},
        {"part": "1.0"},
        {"part": ["0.0", "1e400"]},
        {"find": "longer than five"},
        {"all": "yes"},
    ],
    ids=str,
)
def test_what_is_no_choice_is_not_taken_and_leaves_the_address(shown, params):
    _at(shown, **params)
    assert not shown.exception
    expected = FIRST | ({"others": []} if "others" in params else {})
    assert _values(shown) == expected
    assert params.items().isdisjoint(shown.query_params.items())


def test_a_choice_is_written_to_the_address_and_so_is_a_return_to_the_default(shown):
    shown.run()
    shown.selectbox[0].select(2).run()
    assert _address(shown) == {"rank": ["2"]}
    shown.selectbox[0].select(0).run()
    assert _address(shown) == {"rank": ["0"]}
    shown.multiselect[0].set_value([]).run()
    assert _address(shown) == {"rank": ["0"], "others": [""]}
    assert _values(shown) == FIRST | {"others": []}


@pytest.fixture
def way_back(monkeypatch):
    """Let requests come from the browser's history, which the test's browser has not."""

    def from_history(**options):
        context = get_script_run_ctx(**options)
        context.is_history_navigation = True
        return context

    with monkeypatch.context() as patched:
        patched.setattr("dashboard.url_state.get_script_run_ctx", from_history)
        yield


@pytest.fixture
def after_choices(shown):
    """A page on which rank 2 and then rank 1 were chosen."""
    shown.run()
    shown.selectbox[0].select(2).run()
    return shown.selectbox[0].select(1).run()


def test_the_way_back_in_the_browser_takes_the_choice_back(after_choices, request):
    request.getfixturevalue("way_back")
    assert _values(_at(after_choices, rank="2"))["rank"] == 2
    assert _values(_at(after_choices))["rank"] == 0


@pytest.mark.parametrize("reported", [{"rank": "2"}, {}], ids=["the last choice", "no choice"])
def test_an_address_from_before_the_last_choice_does_not_undo_it_however_late_it_is_reported(after_choices, reported):
    for _ in range(3):
        assert _values(_at(after_choices, **reported))["rank"] == 1
        assert _address(after_choices) == {"rank": ["1"]}


def test_an_address_that_was_never_left_is_a_choice(after_choices):
    assert _values(_at(after_choices, find="gemm"))["find"] == "gemm"


def test_the_app_may_open_an_address_from_before(after_choices):
    after_choices.session_state["navigations"] = 1
    assert _values(_at(after_choices, rank="2"))["rank"] == 2
    assert _values(_at(after_choices, rank="1"))["rank"] == 2  # a report from before


def test_a_choice_is_remembered_on_another_page_as_far_as_it_is_one_there(shown):
    shown.run()
    shown.toggle[0].set_value(True)
    shown.selectbox[0].select(2).run()
    there = _at(shown, on="fewer")
    assert not there.exception
    assert _values(there) == FIRST | {"all": True}
    assert _address(there) == {"rank": ["0"], "all": ["True"]}


def _growing_page():
    import streamlit as st

    from dashboard import url_state

    options = [name for name in ("a", "b", "c") if name in st.session_state.get("listed", "")]
    st.multiselect("Others", options, key=url_state.bind_several("others", options, options[:2]))


def test_a_default_that_appears_later_is_selected_until_a_person_selects_others():
    app = testing.AppTest.from_function(_growing_page, default_timeout=WAIT_S)
    selected = []
    for listed in ("", "a", "abc"):
        app.session_state["listed"] = listed
        selected.append(app.run().multiselect[0].value)
    assert selected == [[], ["a"], ["a"]]
    assert app.multiselect[0].set_value([]).run().multiselect[0].value == []
    assert app.run().multiselect[0].value == []
    assert not app.exception
