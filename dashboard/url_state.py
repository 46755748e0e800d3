"""What a person chose stands in the address, so that a link shows to another what the first one saw.

Each function binds one widget to the parameter of its name and returns the key to give to the widget, which then needs
no value of its own:

    rank = st.selectbox("Rank", ranks, key=url_state.bind("rank", ranks))

Pages may share a name: what is chosen on one holds on the other where it is a choice there. A text in an address is
looked up among the choices, never used as it stands. What differs from the first choice is written to the address.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

PAGE = "page_shown"
MAX_TEXT = 200
_STALE_S = 1.5
"""A browser that is asked twice in a moment still tells the address of before the first answer."""

Texts: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class _Binding:
    """What a parameter was when a page was last made."""

    value: Any
    texts: Texts
    before: Texts
    page: str
    at_s: float


def bind(name: str, options: Sequence[Any], default: Any = None) -> str:
    """Return the key of a widget that takes one of `options`: at first `default`, or the first where it is none."""
    by_text = {str(option): option for option in options}
    first = default if default in options else next(iter(options), None)
    return _bound(
        name,
        first,
        parse=lambda texts: by_text[texts[-1]],
        tell=lambda value: (str(value),),
        is_choice=lambda value: value in options,
    )


def bind_several(name: str, options: Sequence[Any], default: Sequence[Any] = (), *, at_most: int | None = None) -> str:
    """Return the key of a widget that takes several of `options`, the first `at_most` of those that are asked for.

    What is no option any more is dropped.
    """
    by_text = {str(option): option for option in options}
    wanted = st.session_state.get(name)
    usable = wanted and [each for each in wanted if each in options][:at_most]
    if usable != wanted:
        st.session_state[name] = usable
    return _bound(
        name,
        [each for each in default if each in options][:at_most],
        parse=lambda texts: [by_text[text] for text in dict.fromkeys(texts) if text in by_text][:at_most],
        tell=lambda value: tuple(map(str, value)) or ("",),
        is_choice=lambda value: all(each in options for each in value),
    )


def bind_number(name: str, low: float, high: float, default: Any) -> str:
    """Return the key of a widget that takes a number from `low` to `high`, or two where `default` is a pair."""
    kind: type = type(default[0] if isinstance(default, tuple) else default)

    def parse(texts: Texts) -> Any:
        found = tuple(kind(text) for text in texts)
        if isinstance(default, tuple):
            left, right = found
            return (left, right)
        return found[-1]

    def is_choice(value: Any) -> bool:
        numbers = value if isinstance(value, tuple) else (value,)
        return list(numbers) == sorted(numbers) and all(math.isfinite(n) and low <= n <= high for n in numbers)

    return _bound(
        name,
        default,
        parse=parse,
        tell=lambda value: tuple(map(str, value if isinstance(value, tuple) else (value,))),
        is_choice=is_choice,
    )


def bind_text(name: str, default: str = "", max_characters: int = MAX_TEXT) -> str:
    """Return the key of a widget that takes text, of at most so many characters."""
    return _bound(
        name,
        default,
        parse=lambda texts: texts[-1],
        tell=lambda value: (value,),
        is_choice=lambda value: len(value) <= max_characters,
    )


def bind_flag(name: str, default: bool = False) -> str:  # noqa: FBT001, FBT002, RUF100  # a flag's own value
    """Return the key of a widget that is on or off."""
    return bind(name, (False, True), default)


def parameters() -> dict[str, list[str]]:
    """Return all that the address says now, as `st.switch_page` takes it."""
    return {name: st.query_params.get_all(name) for name in st.query_params}


def _bound(
    name: str,
    default: Any,
    *,
    parse: Callable[[Texts], Any],
    tell: Callable[[Any], Texts],
    is_choice: Callable[[Any], bool],
) -> str:
    state, page = st.session_state, st.session_state.get(PAGE, "")
    asked: Texts = tuple(st.query_params.get_all(name))
    last: _Binding | None = state.get(f"told-{name}")
    value = _value(name, default, asked, last, parse=parse)
    if not is_choice(value):
        value = last.value if last is not None and is_choice(last.value) else default
    if name not in state or state[name] != value:
        state[name] = value
    is_plain = not asked and value == default and not (last and last.texts)
    texts = () if is_plain else tell(value)
    if texts != asked:
        st.query_params[name] = texts[0] if len(texts) == 1 else list(texts)
    is_same = last is not None and last.texts == texts
    state[f"told-{name}"] = _Binding(
        value,
        texts,
        before=last.before if is_same and last else (last.texts if last else ()),
        page=page,
        at_s=last.at_s if is_same and last else time.monotonic(),
    )
    return name


def _value(name: str, default: Any, asked: Texts, last: _Binding | None, *, parse: Callable[[Texts], Any]) -> Any:
    """Return what was chosen: by the widget, else by the address, else before on another page, else `default`."""
    state = st.session_state
    has_widget = name in state
    if has_widget and last is not None and state[name] != last.value:
        return state[name]
    if asked and (last is None or (asked != last.texts and not _is_stale(asked, last))):
        try:
            return parse(asked)
        except (KeyError, ValueError, OverflowError):
            pass
    elif not asked and last and last.texts and has_widget and last.page == state.get(PAGE, ""):
        # The browser went back to the address without it; another page's address begins without it, too.
        return default
    if has_widget:
        return state[name]
    return last.value if last is not None else default


def _is_stale(asked: Texts, last: _Binding) -> bool:
    went_back = getattr(get_script_run_ctx(suppress_warning=True), "is_history_navigation", False)
    return not went_back and asked == last.before and time.monotonic() - last.at_s < _STALE_S
