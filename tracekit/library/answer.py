"""Answer: what a call of the library returns. It shows itself in a notebook and is saved by the suffix of a file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from tracekit.errors import InputError
from tracekit.report import html_fragments, shared_view
from tracekit.report.shared_view import SharedView


class Answer(ABC):
    """An answer about one run or two."""

    @abstractmethod
    def as_html(self) -> str:
        """Pieces of HTML, without their style sheet."""

    @abstractmethod
    def formats(self) -> Mapping[str, Callable[[], str]]:
        """The formats that `save` writes: suffix of a file -> its text."""

    def save(self, path: str | Path) -> Path:
        """Write the answer to a file in the format of its suffix. Raises InputError for another suffix."""
        path, formats = Path(path), self.formats()
        if path.suffix not in formats:
            raise InputError(f"{path}: unknown format {path.suffix or 'without a suffix'}; use {', '.join(formats)}")
        try:
            path.write_text(formats[path.suffix](), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}; name another file") from None
        return path

    def _repr_html_(self) -> str:
        return f"<style>{html_fragments.style()}</style><div>{self.as_html()}</div>"

    def as_page(self, run: str, title: str, subtitle: str) -> str:
        """The answer as an HTML page of its own."""
        return shared_view.render(SharedView(run, title, subtitle, [self.as_html()]))
