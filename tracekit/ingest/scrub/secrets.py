"""What must not be told of a run, and what stands in its place."""

import json
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

# Names that say nothing about anybody, or that a trace needs: they go where they stand in a path, nowhere else.
_COMMON = frozenset(
    b"root user users home data admin ubuntu debian centos ec2-user azureuser runner jovyan nobody worker work job "
    b"jobs local localhost shared public default test main gpu cpu cuda rank host node train trainer torch pytorch "
    b"python nccl gloo true false null none kernel ops step".split()
)
_MIN_WORD_LENGTH = 3


@dataclass
class Secrets:
    """What must not be told. Words (users and hosts) are learned first, from all files; then `hide` replaces."""

    words: dict[bytes, str] = field(default_factory=dict)
    """By word as JSON may write it: its kind."""
    _placeholders: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)

    def learn(self, text: bytes) -> None:
        """Take up every user and host that a piece of JSON gives away."""
        for kind, known_by in ((USER, patterns.USERS), (HOST, patterns.HOSTS)):
            for pattern in known_by:
                for match in pattern.finditer(text):
                    self.add(kind, match[1])
        for start, end in patterns.emails(text):
            self.add(USER, text[start:end].partition(b"@")[0])

    def add(self, kind: str, word: bytes) -> None:
        """Take up one word as JSON writes it; a host also by its name without the domain."""
        for each in {word, word.partition(b".")[0]} if kind == HOST else {word}:
            if len(each) >= _MIN_WORD_LENGTH and each.lower() not in _COMMON and re.search(rb"[A-Za-z\x80-\xff]", each):
                for written in _writings(each):
                    self.words.setdefault(written, kind)

    def hide(self, text: bytes) -> bytes:
        """Return a piece of JSON with what must not be told replaced: words, paths' folders, addresses, secrets."""
        for pattern in patterns.SECRETS:
            text = _replaced(
                text, (match.span("value") for match in pattern.finditer(text)), self._placeholder_for(SECRET)
            )
        text = _replaced(text, patterns.emails(text), self._placeholder_for(EMAIL))
        text = _replaced(
            text, _spans(patterns.URL, text), lambda url: url[:1] + b"//" + self._placeholder(URL, url[1:])
        )
        for pattern in patterns.PATHS:
            text = _replaced(text, _spans(pattern, text), self._hide_folders)
        text = _replaced(text, patterns.addresses(text), self._placeholder_for(ADDRESS))
        return self._hide_words(text, patterns.words(self.words))

    def hide_in_name(self, name: str) -> str:
        """Return the name of a file without the words in it."""
        hidden = self._hide_words(name.encode(), patterns.words_in_name(self.words))
        return hidden.replace(b"<", b"").replace(b">", b"").decode()

    def find_leaks(self, text: bytes) -> list[str]:
        """Return the kinds of what is still told in a piece of text that should tell nothing."""
        told = {
            PATH: any(pattern.search(text) for pattern in patterns.PATHS),
            URL: patterns.URL.search(text),
            EMAIL: any(patterns.emails(text)),
            ADDRESS: any(patterns.addresses(text)),
            SECRET: any(pattern.search(text) for pattern in patterns.SECRETS),
            "word": any(pattern.search(text) for pattern in patterns.words(self.words)),
        }
        return [kind for kind, found in told.items() if found]

    def removed(self) -> dict[str, tuple[int, int]]:
        """Return how many different ones of each kind were replaced, and in how many places."""
        distinct = {kind: sum(of == kind for of, _ in self._placeholders) for kind in KINDS}
        return {kind: (distinct[kind], self._places[kind]) for kind in KINDS if kind in self._places}

    def _hide_words(self, text: bytes, known_by: list[re.Pattern[bytes]]) -> bytes:
        for pattern in known_by:
            text = _replaced(text, _spans(pattern, text), lambda word: self._placeholder(self.words[word], word))
        return text

    def _placeholder_for(self, kind: str) -> Callable[[bytes], bytes]:
        return lambda secret: self._placeholder(kind, secret)

    def _placeholder(self, kind: str, secret: bytes) -> bytes:
        """Return what stands for a secret: the same for the same secret, in all files."""
        self._places[kind] = self._places.get(kind, 0) + 1
        key = (kind, secret)
        if key not in self._placeholders:
            number = 1 + sum(of == kind for of, _ in self._placeholders)
            self._placeholders[key] = f"<{kind}{number}>".encode()
        return self._placeholders[key]

    def _hide_folders(self, path: bytes) -> bytes:
        """Return a path without its folders: a library's file keeps its place in the library, a file its name."""
        kept = patterns.LIBRARY.search(path) or patterns.FILE.search(path)
        folder = (path[: kept.start()] if kept else path).rstrip(b"/\\")
        named = self._placeholder(PATH, folder)
        return named + b"/" + kept[0] if kept else named


def _spans(pattern: re.Pattern[bytes], text: bytes) -> Iterator[tuple[int, int]]:
    return (match.span() for match in pattern.finditer(text))


def _replaced(text: bytes, spans: Iterator[tuple[int, int]], stand_in: Callable[[bytes], bytes]) -> bytes:
    """Return `text` with what lies in each span replaced; spans come in order."""
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
