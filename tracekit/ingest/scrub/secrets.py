"""The confidential values of a run, and their placeholders; patterns of users, hosts and paths in the bytes of JSON.

Patterns start with a literal wherever they can, with what must not stand before it checked after: Python then searches
for the literal at memory speed, where a pattern that starts with a choice is tried at every byte. None crosses a quote
or a line's end, and none can match in a number.
"""

import contextlib
import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tracekit.conventions import redaction

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
FILE = re.compile(rb"(?<![^/\\])[^/\\]*\.\w{1,12}\Z")

# Places that name users and hosts without a name before them. Names before them are those of `_identity`.
USERS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"/home\\?/(%b+)" % _LETTERS,
        rb"/[Uu]sers\\?/(%b+)" % _LETTERS,
        rb"\\Users\\\\(%b+)" % _LETTERS,
        rb"~(?<=[\"'=:\s]~)([A-Za-z][\w.-]*)\\?/",
        rb"torchinductor_([A-Za-z][\w.-]*)",
    )
)
HOSTS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"://(?<=tcp://)(?:[^@/\"\s]*@)?([A-Za-z][\w.-]*)",
        rb"://(?<=ssh://)(?:[^@/\"\s]*@)?([A-Za-z][\w.-]*)",
        rb"://(?<=grpc://)(?:[^@/\"\s]*@)?([A-Za-z][\w.-]*)",
        rb"\"name\"\s*:\s*\"HH\"[^{}\n]{0,200}\"args\"\s*:\s*\{[^{}\n]*?\"name\"\s*:\s*\"([^\"\\]+)\"",  # DFTracer
        rb"@(?<=\w@)([\w.-]+):(?=[/~]|[\w.-]+/)",  # of rsync and git
    )
)
_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.-]{0,99}+)(?:=|\s+(?<=\w)|:\s*)(?P<value>[^\s\"'=]+)")
_USER_NAMES = frozenset(["user", "username", "uname", "login", "logname", "owner", "author", "account"])
_USER_ENDINGS = (["started", "by"], ["created", "by"], ["submitted", "by"], ["user", "name"], ["login", "name"])
_HOST_NAMES = frozenset((
    "computername", "fqdn", "host", "hostlist", "hostname", "hostnames", "hosts", "nodelist", "nodename",
    "workstation",
))  # fmt: skip
_HOST_ENDINGS = (["host", "name"], ["node", "name"], ["node", "list"], ["host", "list"], ["computer", "name"])
_ADDRESS_NAMES = frozenset(["addr", "address", "endpoint", "ip", "ipaddr"])
_OF_ADDRESS = frozenset((
    "coordinator", "head", "host", "launch", "leader", "main", "master", "node", "ray", "rdzv", "rendezvous",
    "scheduler", "server", "store", "topology",
))  # fmt: skip
_NODE_RANGE = re.compile(r"(?P<prefix>[\w.-]{1,255}+)\[(?P<numbers>[\d,-]+)\](?P<suffix>[\w.-]*)")
_MAX_NODES = 4096
# An address of a mailbox, or a place that git, ssh or rsync reach.
_AT = re.compile(rb"@[\w-]+(?:(?:\.[\w-]+)*\.[a-z]{2,}\b(?::[\w~./-]*/[\w./~-]+)?|[\w.-]*:(?:[/~]|[\w.-]+/)[\w./~-]*)")
_BEFORE_AT = re.compile(rb"[\w.+-]+\Z")
_LAST_OF_ADDRESS = re.compile(rb"\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w.-])")
_FIRST_OF_ADDRESS = re.compile(rb"(?<![\w.-])\d{1,3}\Z")
_IN_IPV6 = re.compile(rb":[0-9a-fA-F]{0,4}:")
_IPV6_BEGIN = re.compile(rb"(?<![\w:.])[0-9a-fA-F:]*\Z")
_IPV6_END = re.compile(rb"[0-9a-fA-F:]{0,45}(?:(?<=:)\d{1,3}(?:\.\d{1,3}){3})?(?![\w:])")
"""No address is longer than 45 characters: of a long run of colons, each would be looked at from each."""
_GLOBAL_IPV6 = re.compile(rb"(?:[23][0-9a-f]{3}|f[cde][0-9a-f]{2}):", re.IGNORECASE)
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
    SECRET: "secret",
}

# Names that identify nobody, or that a trace needs: they are removed only from paths.
_COMMON = frozenset(
    b"root git user users home data admin ubuntu debian centos ec2-user azureuser runner jovyan nobody worker work job "
    b"jobs local localhost shared public default test main gpu cpu cuda rank host node train trainer torch pytorch "
    b"python nccl gloo true false null none kernel ops step".split()
)
_MIN_WORD_LENGTH = 3
_SECRET_PLACEHOLDER = b"<secret"
_DISTINCTIVE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[^\s\"\\<>]{8,}")
_WORD_AND_NUMBER = re.compile(r"[A-Za-z]+[_.:/-]?\d+")


@dataclass
class Secrets:
    """Confidential values. Words (users and hosts) are first collected from all files; then `hide` replaces them."""

    words: dict[bytes, str] = field(default_factory=dict)
    """Kind of each word, by its JSON spellings."""
    _placeholders: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _seen: set[bytes] = field(default_factory=set)
    _identities: dict[bytes, str] = field(default_factory=dict)
    """Strings that are names of users or hosts: USER or HOST."""
    _redactor: redaction.Redactor = field(init=False)

    def __post_init__(self) -> None:
        self._redactor = redaction.Redactor(self._secret)

    def learn(self, text: bytes) -> None:
        """Collect the users, hosts and secrets in a piece of JSON."""
        strings = set(redaction.STRING.findall(text))
        self._redactor.redact_strings(text, strings)
        for kind, known_by in ((USER, USERS), (HOST, HOSTS)):
            for pattern in known_by:
                for match in pattern.finditer(text):
                    self.add(kind, match[1])
        for start, end in emails(text):
            self.add(USER, text[start:end].partition(b"@")[0])
        for raw in strings - self._seen:
            self._learn_from(raw)
        self._seen |= strings
        for raw in strings & self._identities.keys():
            for match in _values_of(raw).finditer(text):
                for value in redaction.STRING.findall(match["value"]):
                    self._add_identity(self._identities[raw], redaction.decode(value))

    def _learn_from(self, raw: bytes) -> None:
        """Collect the users and hosts that a string assigns to names, and note whether it is such a name itself."""
        if raw.count(b":") > 1:
            for start, end in _ipv6_addresses(raw):
                self.words.setdefault(raw[start:end], ADDRESS)
        text = redaction.decode(raw)
        kind = _identity(text)
        if kind:
            self._identities[raw] = kind
        for match in _NAMED.finditer(text):
            kind = _identity(match["name"])
            if kind and "(" not in match["value"]:
                self._add_identity(kind, match["value"])

    def _add_identity(self, kind: str, value: str) -> None:
        user = value.partition(":")[0]
        for name in _hosts_in(value) if kind == HOST else (user, user.rpartition("\\")[2]):  # of a Windows domain
            self.add(kind, json.dumps(name, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass"))

    def add(self, kind: str, word: bytes) -> None:
        """Add one word, as JSON writes it; a host also without its domain."""
        for name in {word, word.partition(b".")[0]} if kind == HOST else {word}:
            if len(name) >= _MIN_WORD_LENGTH and name.lower() not in _COMMON and re.search(rb"[A-Za-z\x80-\xff]", name):
                for written in _writings(name):
                    self.words.setdefault(written, kind)

    def hide(self, text: bytes) -> bytes:
        """Return a piece of JSON with placeholders for words, folders of paths, addresses and secrets."""
        before = text.count(_SECRET_PLACEHOLDER)
        text = self._redactor.redact(text)
        removed = text.count(_SECRET_PLACEHOLDER) - before
        if removed:
            self._places[SECRET] = self._places.get(SECRET, 0) + removed
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
            SECRET: self._redactor.redact(text) != text,
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

    def _secret(self, secret: str, is_certain: bool) -> str:
        """Placeholder of a secret; one that no other text could mean is removed wherever it stands."""
        raw = json.dumps(secret, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")
        if _DISTINCTIVE.fullmatch(secret) and (is_certain or not _WORD_AND_NUMBER.fullmatch(secret)):
            self.add(SECRET, raw)
        return self._named_placeholder(SECRET, raw).decode()

    def _placeholder(self, kind: str, secret: bytes) -> bytes:
        self._places[kind] = self._places.get(kind, 0) + 1
        return self._named_placeholder(kind, secret)

    def _named_placeholder(self, kind: str, secret: bytes) -> bytes:
        """Return the placeholder of a value: the same for the same value, in all files."""
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
    plain = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")  # as json.loads decodes bytes
    return {word, json.dumps(text)[1:-1].encode(), plain}


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


def _ipv6_addresses(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each IPv6 address but that of this machine; `c10::add` is none."""
    done = 0
    for middle in _IN_IPV6.finditer(text):
        if middle.start() < done:
            continue
        begin = _IPV6_BEGIN.search(text, max(0, middle.start() - _LOOK_BACK_BYTES), middle.start())
        end = _IPV6_END.match(text, middle.start())
        if not begin or not end:
            continue
        address = text[begin.start() : end.end()]
        if address.count(b":") < 3 and not _GLOBAL_IPV6.match(address):
            continue
        with contextlib.suppress(ValueError):
            if not ipaddress.IPv6Address(address.decode("ascii")).is_loopback:
                done = end.end()
                yield begin.start(), done


def _identity(name: str) -> str:
    """Whether a name announces a user or a host: USER, HOST or ''.

    >>> [_identity(name) for name in ("SLURM_JOB_USER", "--master-addr", "SLURM_JOB_NODELIST", "num_users")]
    ['user', 'host', 'host', '']
    """
    words = [word.lower() for word in _NAME_WORDS.findall(name)] if len(name) <= _LOOK_BACK_BYTES else []
    if not words:
        return ""
    if words[-1] in _USER_NAMES or words[-2:] in _USER_ENDINGS:
        return USER
    is_address = words[-1] in _ADDRESS_NAMES and (not words[:-1] or words[-2] in _OF_ADDRESS) and len(words) > 1
    return HOST if words[-1] in _HOST_NAMES or words[-2:] in _HOST_ENDINGS or is_address else ""


def _values_of(name: bytes) -> re.Pattern[bytes]:
    """Pattern of the strings that stand under a name of JSON, in an object with name and value, or after a flag."""
    follows = rb"\s*[:,]\s*" if name.startswith(b"-") else rb"\s*(?:,\s*\"value\"\s*)?:\s*"
    return re.compile(rb"\"%b\"%b(?P<value>\"[^\"\\]*+(?:\\.[^\"\\]*+)*+\"|\[[^\[\]]*\])" % (re.escape(name), follows))


def _hosts_in(value: str) -> Iterator[str]:
    """Yield the hosts of a value: a host, with or without a port, several, or the ranges of a Slurm node list.

    >>> list(_hosts_in("gpu[01-03,7],login1:29500"))
    ['gpu[01-03,7]', 'gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']
    """
    for nodes in _NODE_RANGE.finditer(value):
        yield nodes[0]
        for numbers in nodes["numbers"].split(","):
            first, _, last = numbers.partition("-")
            if first.isdigit() and (not last or last.isdigit()):
                for number in range(int(first), min(int(last or first), int(first) + _MAX_NODES) + 1):
                    yield f"{nodes['prefix']}{number:0{len(first)}d}{nodes['suffix']}"
    for name in re.split(r"[,\s]+", _NODE_RANGE.sub("", value)):
        host = name.rpartition("://")[2].rpartition("@")[2].partition("/")[0].partition(":")[0]
        if host:
            yield host


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
