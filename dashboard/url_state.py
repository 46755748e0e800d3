"""A person's choices are stored in the address, so that a link shows the same to another person.

Each function binds a widget to the parameter of its name and returns the key of the widget, which then needs no value:

    rank = st.selectbox("Rank", ranks, key=url_state.bind("rank", ranks))

Pages may share a name: a choice on one page applies to others where it is an option. A text in an address is looked up
among the options, never used as it is. What differs from the default is written to the address.

A browser that sends two requests at once reports an address from before the first response with the second one, however
late that arrives. So an address that a person has left counts again only if the browser's history or the app opened it.

A browser draws the last of several responses only. If the page is left before a widget was drawn, the response that set
its value is lost, and the browser would report an empty one. So a value is set until the browser reports the widget.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime.scriptrunner import get_script_run_ctx

PAGE = "page_shown"
MAX_TEXT = 200
_NAVIGATIONS = "navigations"
"""How often the app itself has opened an address in this session."""
_MAX_EARLIER = 100

Texts: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class _Binding:
    """The state of a parameter when a page last ran."""

    value: Any
    texts: Texts
    earlier: tuple[Texts, ...]
    """What the address said before, in this session."""
    page: str
    navigations: int


def bind(name: str, options: Sequence[Any], default: Any = None) -> str:
    """Return the key of a widget for one of `options`, by default `default` or else the first."""
    by_text = {str(option): option for option in options}
    initial = default if default in options else next(iter(options), None)
    return _bound(
        name,
        initial,
        parse=lambda texts: by_text[texts[-1]],
        to_texts=lambda value: (str(value),),
        is_choice=lambda value: value in options,
    )


def bind_several(name: str, options: Sequence[Any], default: Sequence[Any] = (), *, at_most: int | None = None) -> str:
    """Return the key of a widget for several of `options`, at most `at_most` of them.

    What is no longer an option is dropped. Where nothing is selected because there was no default, a default that
    appears later, such as when more runs are checked, is selected.
    """
    by_text = {str(option): option for option in options}
    initial = [option for option in default if option in options][:at_most]
    if initial and st.session_state.get(f"default-{name}") == [] and not st.session_state.get(name):
        forget(name)
    st.session_state[f"default-{name}"] = initial
    selected = st.session_state.get(name)
    usable = selected and [option for option in selected if option in options][:at_most]
    if usable != selected:
        st.session_state[name] = usable
    return _bound(
        name,
        initial,
        parse=lambda texts: [by_text[text] for text in dict.fromkeys(texts) if text in by_text][:at_most],
        to_texts=lambda value: tuple(map(str, value)) or ("",),
        is_choice=lambda value: all(option in options for option in value),
    )


def bind_number(name: str, low: float, high: float, default: Any) -> str:
    """Return the key of a widget for a number from `low` to `high`, or for two if `default` is a pair."""
    kind: type = type(default[0] if isinstance(default, tuple) else default)

    def parse(texts: Texts) -> Any:
        numbers = tuple(kind(text) for text in texts)
        if isinstance(default, tuple):
            first, second = numbers
            return (first, second)
        return numbers[-1]

    def is_choice(value: Any) -> bool:
        numbers = value if isinstance(value, tuple) else (value,)
        return list(numbers) == sorted(numbers) and all(math.isfinite(n) and low <= n <= high for n in numbers)

    return _bound(
        name,
        default,
        parse=parse,
        to_texts=lambda value: tuple(map(str, value if isinstance(value, tuple) else (value,))),
        is_choice=is_choice,
    )


def bind_text(name: str, default: str = "", max_characters: int = MAX_TEXT) -> str:
    """Return the key of a widget for text of at most so many characters."""
    return _bound(
        name,
        default,
        parse=lambda texts: texts[-1],
        to_texts=lambda value: (value,),
        is_choice=lambda value: len(value) <= max_characters,
    )


def bind_flag(name: str, default: bool = False) -> str:  # noqa: FBT001, FBT002, RUF100  # a flag's own value
    """Return the key of a toggle."""
    return bind(name, (False, True), default)


def forget(name: str) -> None:
    """Let the widget of a parameter have its default again, as if nobody had chosen anything."""
    for state in (name, f"binding-{name}"):
        st.session_state.pop(state, None)
    if name in st.query_params:
        del st.query_params[name]


def open_address(page: StreamlitPage, query: Mapping[str, list[str]]) -> NoReturn:
    """Open a page at an address whose parameters apply, also where they are a choice that was left before."""
    st.session_state[_NAVIGATIONS] = st.session_state.get(_NAVIGATIONS, 0) + 1
    st.switch_page(page, query_params=query)
    raise AssertionError  # it does not return


def parameters() -> dict[str, list[str]]:
    """Return the parameters of the address, as `st.switch_page` takes them."""
    return {name: st.query_params.get_all(name) for name in st.query_params}


def _bound(
    name: str,
    default: Any,
    *,
    parse: Callable[[Texts], Any],
    to_texts: Callable[[Any], Texts],
    is_choice: Callable[[Any], bool],
) -> str:
    state, page = st.session_state, st.session_state.get(PAGE, "")
    in_address: Texts = tuple(st.query_params.get_all(name))
    last: _Binding | None = state.get(f"binding-{name}")
    value = _value(name, default, in_address, last, parse=parse)
    if not is_choice(value):
        value = last.value if last is not None and is_choice(last.value) else default
    if name not in state or state[name] != value or not _is_reported(name):
        state[name] = value
    is_plain = not in_address and value == default and not (last and last.texts)
    texts = () if is_plain else to_texts(value)
    if texts != in_address:
        st.query_params[name] = texts[0] if len(texts) == 1 else list(texts)
    earlier = last.earlier if last else ()
    if last and last.texts != texts:
        earlier = (*earlier, last.texts)[-_MAX_EARLIER:]
    state[f"binding-{name}"] = _Binding(value, texts, earlier, page, state.get(_NAVIGATIONS, 0))
    return name


def _value(name: str, default: Any, in_address: Texts, last: _Binding | None, *, parse: Callable[[Texts], Any]) -> Any:
    """Return the choice: from the widget, else from the address, else from before on another page, else `default`."""
    state = st.session_state
    has_widget = name in state
    if has_widget and last is not None and state[name] != last.value:
        return state[name]
    if in_address and (last is None or (in_address != last.texts and _is_current(in_address, last))):
        try:
            return parse(in_address)
        except (KeyError, ValueError, OverflowError):
            pass
    elif not in_address and last and last.texts and has_widget and last.page == state.get(PAGE, ""):
        # The address of another page starts without it, too.
        return default if _is_current(in_address, last) else state[name]
    if has_widget:
        return state[name]
    return last.value if last is not None else default


def _is_reported(name: str) -> bool:
    """Return whether the browser's request has a value of the widget, so that its state is known there."""
    context = get_script_run_ctx(suppress_warning=True)
    return context is not None and any(
        state.id.endswith(f"-{name}") for state in context.session_state.get_widget_states()
    )


def _is_current(in_address: Texts, last: _Binding) -> bool:
    """Return whether an address other than the last is meant: it is new, or was opened by the history or the app."""
    went_back = getattr(get_script_run_ctx(suppress_warning=True), "is_history_navigation", False)
    is_opened = st.session_state.get(_NAVIGATIONS, 0) > last.navigations
    return bool(went_back or is_opened or in_address not in last.earlier)
