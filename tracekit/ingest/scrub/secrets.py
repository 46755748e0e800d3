"""The confidential values of a run, and their placeholders; patterns of users, hosts and paths in the bytes of JSON.

Patterns start with a literal wherever they can, with what must not stand before it checked after: Python then searches
for the literal at memory speed, where a pattern that starts with a choice is tried at every byte. None crosses a quote
or a line's end, and none can match in a number.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

_SLASH = rb"\\?/"
_LETTERS = rb"(?:[\w.@+%~#$!&^\x80-\xff-]++|\\u[0-9a-fA-F]{4})"
_FOLDER = rb"%b(?:%b|[ ])*+" % (_LETTERS, _LETTERS)
_REST = rb"(?:%b%b)*%b*" % (_FOLDER, _SLASH, _LETTERS)
# A path begins neither within a word ("0/1", "n/a") nor after a bracket, in which our own placeholders end.
_WITHIN = rb"[\w./\\<>)\]}*&~-]"

PATHS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"/(?:(?<!%b/)%b%b%b|(?<=[\"'=]/)%b+(?=[\"'\s:;,)\\]))" % (_WITHIN, _FOLDER, _SLASH, _REST, _LETTERS),
        rb"\\/(?<!%b\\/)%b%b%b" % (_WITHIN, _FOLDER, _SLASH, _REST),
        rb"~(?<!\w~)[\w.-]*%b%b" % (_SLASH, _REST),
        rb":\\\\(?<=[^\w<][A-Za-z]:\\\\)(?:%b\\\\)*%b*" % (_FOLDER, _LETTERS),
        rb":/(?<=[^\w<][A-Za-z]:/)%b/%b" % (_FOLDER, _REST),
    )
)
URLS = re.compile(rb":(?:\\?/){2}(?<=[A-Za-z0-9].{3})(?!<url)[^\s\"\\<>;,]+|:\\/\\/[^\s\"<>;,]+")
LIBRARY = re.compile(rb"(?:site-packages|dist-packages|python3\.\d+)\\?/.*", re.DOTALL)
FILE = re.compile(rb"[^/\\]*\.\w{1,12}\Z")

# What follows a key that announces it, in the manifest and in headers that some programs write their environment
# into; and the known forms of keys, wherever they stand.
_ANNOUNCED = rb"s?\"\s*:\s*\"(?!\[redacted\]|<secret)(?P<value>(?:[^\"\\]|\\.)+)"
SECRETS = tuple(
    re.compile(spelling + _ANNOUNCED)
    for word in (b"token", b"password", b"passwd", b"secret", b"credential", b"_key", b"-key", b"apikey")
    for spelling in (word, word.upper(), word.title())
) + tuple(
    re.compile(rb"(?P<value>%b)" % pattern)
    for pattern in (
        rb"hf_[A-Za-z0-9]{30,}",
        rb"gh[pousr]_[A-Za-z0-9]{30,}",
        rb"github_pat_\w{30,}",
        rb"glpat-[\w-]{20,}",
        rb"sk-(?<![\w-]sk-)[\w-]{20,}",
        rb"xox[a-z]-[\w-]{10,}",
        rb"AKIA[0-9A-Z]{16}",
    )
)
USERS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"/home\\?/(%b+)" % _LETTERS,
        rb"/Users\\?/(%b+)" % _LETTERS,
        rb"\\Users\\\\(%b+)" % _LETTERS,
        rb"torchinductor_([A-Za-z][\w.-]*)",
        rb"(?i:\"(?:user|username|user_name|login|logname|owner|started_by|created_by)\"\s*:\s*\"([^\"\\]+)\")",
    )
)
HOSTS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"(?i:\"(?:host|hostname|host_name|nodename|node_name|fqdn|slurmd_nodename)\"\s*:\s*\"([^\"\\]+)\")",
        rb"(?i:\"(?:master_addr|master_address|rdzv_endpoint)\"\s*:\s*\"([^\"\\:]+))",
        rb"(?i:--(?:master[-_]addr|rdzv[-_]endpoint)(?:=|\",\s*\"|\s+)([^\"\\\s,:]+))",
        rb"://(?<=tcp://)(?:[^@/\"\s]*@)?([A-Za-z][\w.-]*)",
        rb"://(?<=ssh://)(?:[^@/\"\s]*@)?([A-Za-z][\w.-]*)",
        rb"://(?<=grpc://)(?:[^@/\"\s]*@)?([A-Za-z][\w.-]*)",
        rb"HOSTNAME=([\w.-]+)",
        rb"\"name\"\s*:\s*\"HH\"[^{}\n]{0,200}\"args\"\s*:\s*\{[^{}\n]*?\"name\"\s*:\s*\"([^\"\\]+)\"",  # DFTracer
    )
)
_AT = re.compile(rb"@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b")
_BEFORE_AT = re.compile(rb"[\w.+-]+\Z")
_LAST_OF_ADDRESS = re.compile(rb"\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w.-])")
_FIRST_OF_ADDRESS = re.compile(rb"(?<![\w.-])\d{1,3}\Z")
_VERSION = re.compile(rb"(?:version|driver|cudnn|nccl)[^,}]{0,40}\Z", re.IGNORECASE)
_HARMLESS_ADDRESSES = (b"127.0.0.1", b"0.0.0.0")
_LOOK_BACK_BYTES = 80

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
        for kind, known_by in ((USER, USERS), (HOST, HOSTS)):
            for pattern in known_by:
                for match in pattern.finditer(text):
                    self.add(kind, match[1])
        for start, end in emails(text):
            self.add(USER, text[start:end].partition(b"@")[0])

    def add(self, kind: str, word: bytes) -> None:
        """Add one word, as JSON writes it; a host also without its domain."""
        for name in {word, word.partition(b".")[0]} if kind == HOST else {word}:
            if len(name) >= _MIN_WORD_LENGTH and name.lower() not in _COMMON and re.search(rb"[A-Za-z\x80-\xff]", name):
                for written in _writings(name):
                    self.words.setdefault(written, kind)

    def hide(self, text: bytes) -> bytes:
        """Return a piece of JSON with placeholders for words, folders of paths, addresses and secrets."""
        for pattern in SECRETS:
            text = _replace_spans(
                text, (match.span("value") for match in pattern.finditer(text)), self._placeholder_for(SECRET)
            )
        text = _replace_spans(text, emails(text), self._placeholder_for(EMAIL))
        text = _replace_spans(text, _spans(URLS, text), lambda url: url[:1] + b"//" + self._placeholder(URL, url[1:]))
        for pattern in PATHS:
            text = _replace_spans(text, _spans(pattern, text), self._hide_folders)
        text = _replace_spans(text, addresses(text), self._placeholder_for(ADDRESS))
        return self._hide_words(text, word_patterns(self.words))

    def hide_in_name(self, name: str) -> str:
        """Return a file name without confidential words."""
        hidden = self._hide_words(os.fsencode(name), words_in_name(self.words))
        return os.fsdecode(hidden.replace(b"<", b"").replace(b">", b""))

    def find_leaks(self, text: bytes) -> list[str]:
        """Return the kinds of confidential values left in a piece of text."""
        leaks = {
            PATH: any(pattern.search(text) for pattern in PATHS),
            URL: URLS.search(text),
            EMAIL: any(emails(text)),
            ADDRESS: any(addresses(text)),
            SECRET: any(pattern.search(text) for pattern in SECRETS),
            "word": any(pattern.search(text) for pattern in word_patterns(self.words)),
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
        tail = LIBRARY.search(path) or FILE.search(path)
        folder = (path[: tail.start()] if tail else path).rstrip(b"/\\")
        placeholder = self._placeholder(PATH, folder)
        return placeholder + b"/" + tail[0] if tail else placeholder


def _spans(pattern: re.Pattern[bytes], text: bytes) -> Iterator[tuple[int, int]]:
    return (match.span() for match in pattern.finditer(text))


def _replace_spans(text: bytes, spans: Iterator[tuple[int, int]], stand_in: Callable[[bytes], bytes]) -> bytes:
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


def emails(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each e-mail address."""
    for match in _AT.finditer(text):
        before = _BEFORE_AT.search(text, max(0, match.start() - _LOOK_BACK_BYTES), match.start())
        if before:
            yield before.start(), match.end()


def addresses(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each IPv4 address, but for those every machine has and what stands as a version."""
    for match in _LAST_OF_ADDRESS.finditer(text):
        before = _FIRST_OF_ADDRESS.search(text, max(0, match.start() - 4), match.start())
        if not before:
            continue
        start, end = before.start(), match.end()
        numbers = text[start:end]
        is_address = numbers not in _HARMLESS_ADDRESSES and all(int(number) <= 255 for number in numbers.split(b"."))
        if is_address and not _VERSION.search(text, max(0, start - _LOOK_BACK_BYTES), start):
            yield start, end


def word_patterns(secrets: Iterable[bytes]) -> list[re.Pattern[bytes]]:
    """Patterns that find each word, longest first: whole, not where it is a key of JSON or a trace's category."""
    return [
        re.compile(rb"%b(?<![\w<]%b)(?<!\"cat\": \"%b)(?<!\"cat\":\"%b)(?!\w)(?!\"\s*:)" % ((re.escape(word),) * 4))
        for word in sorted(secrets, key=lambda word: (-len(word), word))
    ]


def words_in_name(secrets: Iterable[bytes]) -> list[re.Pattern[bytes]]:
    """Patterns that find each word in a file name, where an underscore ends a word."""
    longest_first = sorted(secrets, key=lambda word: (-len(word), word))
    return [re.compile(rb"(?<![A-Za-z0-9])%b(?![A-Za-z0-9])" % re.escape(word)) for word in longest_first]
