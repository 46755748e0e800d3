"""Redact secrets before anything is written: values under secret names, values that look like keys, logins in URLs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

_SECRET_WORDS = ("auth", "authorization", "bearer", "key", "keys", "passphrase", "pat", "pwd", "sig", "signature")
_SECRET_ENDINGS = (
    "token",
    "password",
    "passwd",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "apikey",
    "accesskey",
)
# "key" is also half of attention's vocabulary.
_ATTENTION = re.compile(r"key[-_]?values?|query[-_]?key", re.IGNORECASE)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_SECRET_VALUES = re.compile(
    r"""
      \b(?:hf|npm|gh[pousr])_[A-Za-z0-9]{30,} | \bgithub_pat_\w{30,} | \bglpat-[\w-]{20,}
    | \bsk-[\w-]{20,} | \b[rsp]k_(?:live|test)_\w{16,} | \bxox[a-z]-[\w-]{10,} | \bpypi-[\w-]{16,}
    | \bAIza[\w-]{30,} | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    | \beyJ[\w-]+\.[\w-]+\.[\w-]*                   # a JSON web token
    | (?<=[Bb]earer\ )[\w.~+/=-]{8,} | (?<=[Bb]asic\ )[\w+/=-]{8,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*
    | (?<![\w/.+=-])(?=[A-Za-z+=]*[0-9])(?=[0-9+=]*[A-Za-z])[A-Za-z0-9+=]{32,}(?![\w/.-])  # a long run of random text
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_LOGIN = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/\s?#]*@", re.IGNORECASE)
_NAME = re.compile(r"(?P<name>[\w.-]+)[\"']?\s*[=:]\s*")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic)\s+)?[^&;,\s]+", re.IGNORECASE)
_FLAG = re.compile(r"-{1,2}(?P<name>[A-Za-z][\w.-]*)\Z")


def redact(value: Any, name: str = "") -> Any:
    """Return `value` fit for JSON, with what looks secret replaced by ``[redacted]``.

    Every value under a name such as api_key, HF_TOKEN or db-password is replaced. In text, keys of known forms are
    replaced, logins in URLs, and what is assigned to such a name. A list is also read as a command line: what follows
    the flag ``--token`` is replaced. Other objects become their text.

    >>> redact(["train.py", "--hf-token", "abc", "--data", "s3://me:abc@host/x", "--lr=1", "api_key=abc"])
    ['train.py', '--hf-token', '[redacted]', '--data', 's3://[redacted]@host/x', '--lr=1', 'api_key=[redacted]']
    """
    if is_secret_name(name) and value is not None and not isinstance(value, bool):
        return REDACTED
    if isinstance(value, Mapping):
        return {str(key): redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return _redact_words(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _redact_text(str(value))


def is_secret_name(name: str) -> bool:
    """Return whether a name announces a secret: one of its words is token, key, password, secret or the like.

    >>> [is_secret_name(name) for name in ("hf_token", "apiKey", "tokens_per_second", "key_value_heads", "monkey")]
    [True, True, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(_ATTENTION.sub("", name))]
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


def _redact_words(words: Sequence[Any]) -> list[Any]:
    clean: list[Any] = []
    secret_next = False
    for word in words:
        flag = _FLAG.match(word) if isinstance(word, str) else None
        if secret_next and not (flag and word.startswith("--")):
            clean.append(REDACTED)
            secret_next = False
        else:
            clean.append(redact(word))
            secret_next = bool(flag and is_secret_name(flag.group("name")))
    return clean


def _redact_text(text: str) -> str:
    text = _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    return _SECRET_VALUES.sub(REDACTED, _redact_assignments(text))


def _redact_assignments(text: str) -> str:
    parts, done = [], 0
    for match in _NAME.finditer(text):
        value = _VALUE.match(text, match.end())
        if value and match.start() >= done and is_secret_name(match.group("name")):
            parts += [text[done : match.end()], REDACTED]
            done = value.end()
    return "".join((*parts, text[done:]))
