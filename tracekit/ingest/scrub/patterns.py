"""Patterns of users, hosts and paths in the bytes of JSON text.

Patterns start with a literal wherever they can, with what must not stand before it checked after: Python then searches
for the literal at memory speed, where a pattern that starts with a choice is tried at every byte. None crosses a quote
or a line's end, and none can match in a number.
"""

import re
from collections.abc import Iterable, Iterator

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
URL = re.compile(rb":(?:\\?/){2}(?<=[A-Za-z0-9].{3})(?!<url)[^\s\"\\<>;,]+|:\\/\\/[^\s\"<>;,]+")
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


def words(secrets: Iterable[bytes]) -> list[re.Pattern[bytes]]:
    """Patterns that find each word, longest first: whole, not where it is a key of JSON or a trace's category."""
    return [
        re.compile(rb"%b(?<![\w<]%b)(?<!\"cat\": \"%b)(?<!\"cat\":\"%b)(?!\w)(?!\"\s*:)" % ((re.escape(word),) * 4))
        for word in sorted(secrets, key=lambda word: (-len(word), word))
    ]


def words_in_name(secrets: Iterable[bytes]) -> list[re.Pattern[bytes]]:
    """Patterns that find each word in a file name, where an underscore ends a word."""
    longest_first = sorted(secrets, key=lambda word: (-len(word), word))
    return [re.compile(rb"(?<![A-Za-z0-9])%b(?![A-Za-z0-9])" % re.escape(word)) for word in longest_first]
