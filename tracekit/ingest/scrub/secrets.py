"""The confidential values of a run, and their placeholders."""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tracekit.ingest.scrub import patterns

USER, HOST, PATH, URL, ADDRESS, EMAIL, SECRET = "user", "host", "path", "url", "address", "email", "secret"
KINDS = {
    USER: "user name",
    HOST: "host name",
    PATH: "path",
    URL: "URL",
    ADDRESS: "IP address",
    EMAIL: "e-mail address",
    SECRET: "value under a key that announces a secret",
}

# Names that identify nobody, or that a trace needs: they are removed only from paths.
_COMMON = frozenset(
    b"root user users home data admin ubuntu debian centos ec2-user azureuser runner jovyan nobody worker work job "
    b"jobs local localhost shared public default test main gpu cpu cuda rank host node train trainer torch pytorch "
    b"python nccl gloo true false null none kernel ops step".split()
)
_MIN_WORD_LENGTH = 3


@dataclass
class Secrets:
    """Confidential values. Words (users and hosts) are first collected from all files; then `hide` replaces them."""

    words: dict[bytes, str] = field(default_factory=dict)
    """Kind of each word, by its JSON spellings."""
    _placeholders: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)

    def learn(self, text: bytes) -> None:
        """Collect the users and hosts in a piece of JSON."""
        for kind, known_by in ((USER, patterns.USERS), (HOST, patterns.HOSTS)):
            for pattern in known_by:
                for match in pattern.finditer(text):
                    self.add(kind, match[1])
        for start, end in patterns.emails(text):
            self.add(USER, text[start:end].partition(b"@")[0])

    def add(self, kind: str, word: bytes) -> None:
        """Add one word, as JSON writes it; a host also without its domain."""
        for name in {word, word.partition(b".")[0]} if kind == HOST else {word}:
            if len(name) >= _MIN_WORD_LENGTH and name.lower() not in _COMMON and re.search(rb"[A-Za-z\x80-\xff]", name):
                for written in _writings(name):
                    self.words.setdefault(written, kind)

    def hide(self, text: bytes) -> bytes:
        """Return a piece of JSON with placeholders for words, folders of paths, addresses and secrets."""
        for pattern in patterns.SECRETS:
            text = _replace_spans(
                text, (match.span("value") for match in pattern.finditer(text)), self._placeholder_for(SECRET)
            )
        text = _replace_spans(text, patterns.emails(text), self._placeholder_for(EMAIL))
        text = _replace_spans(
            text, _spans(patterns.URL, text), lambda url: url[:1] + b"//" + self._placeholder(URL, url[1:])
        )
        for pattern in patterns.PATHS:
            text = _replace_spans(text, _spans(pattern, text), self._hide_folders)
        text = _replace_spans(text, patterns.addresses(text), self._placeholder_for(ADDRESS))
        return self._hide_words(text, patterns.words(self.words))

    def hide_in_name(self, name: str) -> str:
        """Return a file name without confidential words."""
        hidden = self._hide_words(os.fsencode(name), patterns.words_in_name(self.words))
        return os.fsdecode(hidden.replace(b"<", b"").replace(b">", b""))

    def find_leaks(self, text: bytes) -> list[str]:
        """Return the kinds of confidential values left in a piece of text."""
        leaks = {
            PATH: any(pattern.search(text) for pattern in patterns.PATHS),
            URL: patterns.URL.search(text),
            EMAIL: any(patterns.emails(text)),
            ADDRESS: any(patterns.addresses(text)),
            SECRET: any(pattern.search(text) for pattern in patterns.SECRETS),
            "word": any(pattern.search(text) for pattern in patterns.words(self.words)),
        }
        return [kind for kind, is_found in leaks.items() if is_found]

    def removal_counts(self) -> dict[str, tuple[int, int]]:
        """Return, for each kind, the number of distinct values replaced and the number of places."""
        distinct = {kind: sum(secret_kind == kind for secret_kind, _ in self._placeholders) for kind in KINDS}
        return {kind: (distinct[kind], self._places[kind]) for kind in KINDS if kind in self._places}

    def _hide_words(self, text: bytes, known_by: list[re.Pattern[bytes]]) -> bytes:
        for pattern in known_by:
            text = _replace_spans(text, _spans(pattern, text), lambda word: self._placeholder(self.words[word], word))
        return text

    def _placeholder_for(self, kind: str) -> Callable[[bytes], bytes]:
        return lambda secret: self._placeholder(kind, secret)

    def _placeholder(self, kind: str, secret: bytes) -> bytes:
        """Return the placeholder of a value: the same for the same value, in all files."""
        self._places[kind] = self._places.get(kind, 0) + 1
        key = (kind, secret)
        if key not in self._placeholders:
            number = 1 + sum(secret_kind == kind for secret_kind, _ in self._placeholders)
            self._placeholders[key] = f"<{kind}{number}>".encode()
        return self._placeholders[key]

    def _hide_folders(self, path: bytes) -> bytes:
        """Return a path with its folders hidden: only the file name stays, or the path inside a library."""
        tail = patterns.LIBRARY.search(path) or patterns.FILE.search(path)
        folder = (path[: tail.start()] if tail else path).rstrip(b"/\\")
        placeholder = self._placeholder(PATH, folder)
        return placeholder + b"/" + tail[0] if tail else placeholder


def _spans(pattern: re.Pattern[bytes], text: bytes) -> Iterator[tuple[int, int]]:
    return (match.span() for match in pattern.finditer(text))


def _replace_spans(text: bytes, spans: Iterator[tuple[int, int]], stand_in: Callable[[bytes], bytes]) -> bytes:
    """Return `text` with each span replaced; spans are in order."""
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], stand_in(text[start:end])]
        done = end
    return b"".join((*parts, text[done:])) if parts else text


def _writings(word: bytes) -> set[bytes]:
    """Return the ways JSON may write a word: as it is, and with escapes for letters beyond ASCII."""
    try:
        text = json.loads(b'"' + word + b'"')
    except ValueError:
        return {word}
    return {word, json.dumps(text)[1:-1].encode(), json.dumps(text, ensure_ascii=False)[1:-1].encode()}
