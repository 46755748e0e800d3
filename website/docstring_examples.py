"""The docstrings' doctests as blocks of code on the site: Griffe takes a bare ``>>>`` for a quotation."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)
_FLAGS = re.compile(r"\s*# doctest: .*")


class FencedDoctests(griffe.Extension):
    """Fences the doctests of all objects that Griffe loads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)


def fence_doctests(docstring: str) -> str:
    r"""Docstring whose doctests are fenced blocks without flags.

    >>> fence_doctests("Sum.\n\n>>> add(1, 2)  # doctest: +SKIP\n3")
    'Sum.\n\n```pycon\n>>> add(1, 2)\n3\n```'
    """
    return _DOCTEST.sub(lambda block: f"```pycon\n{_FLAGS.sub('', block[0])}\n```", docstring)
