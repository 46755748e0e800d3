"""Plotly's script with the kinds of traces that a page draws: 1.3 MB instead of 4.8 MB, which also draw maps and 3-D.

Plotly's package has one script, which esbuild wrote as a list of statements. Most define a module or a function. If the
other kinds are not registered, most definitions are mentioned nowhere, so the script can do without them.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from plotly.offline import get_plotlyjs

_BUILT_IN = {"scatter"}  # Plotly registers it itself.

# Quotes, slashes and brackets decide how the text after them is read. Runs of other characters are one token.
_TOKEN = re.compile(
    r"""[^"'`/(){}\[\];,]+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|/\*.*?\*/|//[^\n]*|.""",
    re.DOTALL,
)
_REGEX = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
# A slash begins a regular expression after these; after a name, a number or a closing bracket it divides.
_BEFORE_REGEX = re.compile(r"(?:[(,=:\[!&|?{};+\-*%~^<>]|\b(?:return|typeof|case|in|of))\s*$")
_LONGEST_BEFORE_REGEX = 12
_TEMPLATE_TEXT = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*", re.DOTALL)
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}

_NAME = re.compile(r"[\w$]+")
_BEGIN = re.compile(r"var Plotly=\(\(\)=>\{")
_ENTRY = re.compile(r"return ([\w$]+)\(\);")
_REGISTERED = re.compile(r"\.register\(\[([\w$(),]*)\]\)")
_EXPORTED = re.compile(r"\.exports=([\w$]+)\(\)")
_TRACE_KIND = re.compile(r'moduleType:"trace",name:"(\w+)"')
_FUNCTION = re.compile(r"(?:async )?function\*? ?([\w$]+)\(")
# esbuild's first statements define two functions: one defines modules, the other names what a module exports.
_HELPER_STATEMENTS = 20
_MODULE_HELPER = re.compile(r"(?<![\w$])([\w$]+)=\([\w,]+\)=>\(\)=>")
_EXPORT_HELPER = re.compile(r"(?<![\w$])([\w$]+)=\(\w,\w\)=>\{for\(var \w in \w\)[\w$]+\(\w,\w,\{get:")


class LayoutError(Exception):
    """A script that is not laid out as described above."""


class _Statement(NamedTuple):
    text: str
    last_comma: int
    """Position of the last comma outside of brackets: what is defined before it is not the only definition."""


@functools.cache
def script(kinds: frozenset[str]) -> str:
    """Plotly's script for these kinds of traces; the whole script where its layout or a kind is not known."""
    plotly: str = get_plotlyjs()
    try:
        return script_of_kinds(plotly, kinds - _BUILT_IN)
    except LayoutError:
        return plotly


def script_of_kinds(plotly: str, kinds: frozenset[str]) -> str:
    """Plotly's script without the definitions that only other kinds of traces need. Raises LayoutError."""
    begin, end, statements = _statements(plotly)
    names = _defined_names(statements)
    definitions = {name: text for name, (text, _) in zip(names, statements, strict=True) if name}
    # A name that is defined twice could mean either definition.
    if len(definitions) != len(names) - names.count(""):
        raise LayoutError
    main = _match(_ENTRY, statements[-1].text, 0)[1]
    definitions[main] = _registering(kinds, definitions.get(main, ""), definitions)
    texts = [definitions.get(name, text) for name, (text, _) in zip(names, statements, strict=True)]
    used = {"", *_used_names([text for name, text in zip(names, texts, strict=True) if not name], definitions)}
    kept = [text for name, text in zip(names, texts, strict=True) if name in used]
    return plotly[:begin] + "".join(kept) + plotly[end:]


def _registering(kinds: frozenset[str], main: str, definitions: Mapping[str, str]) -> str:
    """Main module that registers these kinds of traces and no others."""
    registered = _REGISTERED.search(main)
    if registered is None:
        raise LayoutError
    calls = {_trace_kind(call.removesuffix("()"), definitions): call for call in registered[1].split(",")}
    if not kinds <= calls.keys():
        raise LayoutError
    first, last = registered.span(1)
    return main[:first] + ",".join(calls[kind] for kind in sorted(kinds)) + main[last:]


def _trace_kind(name: str, definitions: Mapping[str, str]) -> str:
    """Kind of the traces that a module, or the module that it exports, draws; its name if it draws none."""
    text = definitions.get(name, "")
    exported = _EXPORTED.search(text)
    kind = _TRACE_KIND.search(text) or _TRACE_KIND.search(definitions.get(exported[1], "") if exported else "")
    return kind[1] if kind else name


def _used_names(roots: Iterable[str], definitions: Mapping[str, str]) -> set[str]:
    """Names that statements mention, that the definitions of these names mention, and so on.

    What is mentioned may be a local variable with the name of a definition, which is then kept without need.
    """
    used: set[str] = set()
    unread = list(roots)
    while unread:
        mentioned = set(_NAME.findall(unread.pop())) & definitions.keys() - used
        used |= mentioned
        unread += [definitions[name] for name in mentioned]
    return used


def _defined_names(statements: Sequence[_Statement]) -> list[str]:
    """Name without whose mention a statement has no effect; '' for a statement that is always needed."""
    helpers = "".join(text for text, _ in statements[:_HELPER_STATEMENTS] if text.startswith("var "))
    modules = "|".join(map(re.escape, _MODULE_HELPER.findall(helpers)))
    exports = "|".join(map(re.escape, _EXPORT_HELPER.findall(helpers)))
    if not modules or not exports:
        raise LayoutError
    # `var a,b,c=module(…)`: only the module c sets the variables a and b, so that whoever reads them mentions c, too.
    definition = re.compile(
        rf"{_FUNCTION.pattern}|var (?:[\w$]+,)*([\w$]+)=(?:{modules})\(|(?:{exports})\(([\w$]+),\{{"
    )
    names = []
    for text, last_comma in statements:
        match = definition.match(text)
        is_only_definition = match is not None and last_comma < match.end()
        names.append(next(filter(None, match.groups())) if match and is_only_definition else "")
    return names


def _statements(plotly: str) -> tuple[int, int, list[_Statement]]:
    """Begin and end of the list of statements in the script, and the statements."""
    opening = _BEGIN.search(plotly)
    if opening is None:
        raise LayoutError
    begin = opening.end()
    statements: list[_Statement] = []
    start, depth, last_comma = begin, 0, -1
    for position, token in _tokens(plotly, begin):
        depth += _DEPTH.get(token, 0)
        if depth < 0:
            return begin, position, statements
        if depth == 0 and plotly[position] == ",":
            last_comma = position - start
        ends_function = plotly[position] == "}" and _FUNCTION.match(plotly, start)
        if depth == 0 and (plotly[position] == ";" or ends_function):
            statements.append(_Statement(plotly[start : position + 1], last_comma))
            start, last_comma = position + 1, -1
    raise LayoutError


def _tokens(plotly: str, start: int) -> Iterator[tuple[int, str]]:
    """Tokens of a script from a position on, each with its position."""
    position, previous = start, ""
    while position < len(plotly):
        if plotly[position] == "`":
            end = _template_end(plotly, position)
        elif plotly[position] == "/" and _BEFORE_REGEX.search(previous):
            end = _match(_REGEX, plotly, position).end()
        else:
            end = _match(_TOKEN, plotly, position).end()
        yield position, plotly[position:end]
        previous = plotly[max(position, end - _LONGEST_BEFORE_REGEX) : end]
        position = end


def _template_end(plotly: str, position: int) -> int:
    """Position after the template string that begins at a position."""
    end = _match(_TEMPLATE_TEXT, plotly, position + 1).end()
    while plotly.startswith("$", end):
        end = _match(_TEMPLATE_TEXT, plotly, _brackets_end(plotly, end + 1)).end()
    return end + 1


def _brackets_end(plotly: str, start: int) -> int:
    """Position after the bracket that closes the one at the start."""
    depth = 0
    for position, token in _tokens(plotly, start):
        depth += _DEPTH.get(token, 0)
        if depth == 0:
            return position + 1
    raise LayoutError


def _match(pattern: re.Pattern[str], plotly: str, position: int) -> re.Match[str]:
    match = pattern.match(plotly, position)
    if match is None:
        raise LayoutError
    return match
