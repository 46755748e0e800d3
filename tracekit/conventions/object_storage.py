"""Files behind URLs (s3://, gs://, http(s)://, …): how recording and analysis open them, retry, and describe errors.

File systems come from fsspec, which is imported when a URL is used. Time limits, retries and messages are the same for
all of them, so the file systems' own retries are off where they can be.
"""

import contextlib
import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

TIMEOUT_VARIABLE = "TRACEKIT_REMOTE_TIMEOUT_S"
ATTEMPTS_VARIABLE = "TRACEKIT_REMOTE_ATTEMPTS"
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 15.0
_CONNECT_S = 10.0
_URL = re.compile(r"^[a-z][a-z0-9+.-]+(?:::[a-z0-9+.-]+)*://", re.I)
_S3, _GCS, _HTTP = ("s3", "s3a"), ("gs", "gcs"), ("http", "https")

T = TypeVar("T")


class StorageError(OSError):
    """An operation on a URL failed. The message states what, where and what to do, on one line."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """One of KINDS."""


MISSING, DENIED, CREDENTIALS, TIMEOUT, BUSY, UNREACHABLE, CUT, PACKAGE, OTHER = KINDS = (
    "missing",
    "denied",
    "credentials",
    "timeout",
    "busy",
    "unreachable",
    "cut",
    "package",
    "other",
)
TRANSIENT = (TIMEOUT, BUSY, UNREACHABLE, CUT)
"""Kinds of errors after which the same request may succeed: those that are retried."""


class IncompleteError(Exception):
    """A file arrived incomplete, or changed while it was read."""


def is_url(path: object) -> bool:
    """Return whether a path is a URL, such as s3://bucket/run.

    >>> is_url("s3://bucket/run"), is_url("runs/today"), is_url("C:/runs")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def without_file_scheme(path: str) -> str:
    """Return the path of a file:// URL; anything else as it is.

    >>> without_file_scheme("file:///tmp/run"), without_file_scheme("s3://bucket/run")
    ('/tmp/run', 's3://bucket/run')
    """
    return path.partition("://")[2] if is_url(path) and protocol(path) in ("file", "local") else path


def protocol(url: str) -> str:
    """Return the outermost protocol of a URL, in lower case.

    >>> protocol("S3://bucket/run")
    's3'
    """
    return re.split(r"::|://", url, maxsplit=1)[0].lower()


def shown(url: str) -> str:
    """Return a URL without what may be secret: user, password and the query of a signed URL.

    >>> shown("https://me:secret@host/run/rank0.json?X-Amz-Signature=abc")
    'https://host/run/rank0.json'
    """
    scheme, separator, rest = url.partition("://")
    if protocol(url) in _HTTP:
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def timeout_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return the time that a request may take without any data arriving, in s."""
    try:
        return max(0.1, float(environment.get(TIMEOUT_VARIABLE, "")))
    except ValueError:
        return DEFAULT_TIMEOUT_S


def attempts(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of attempts of a request in all."""
    stated = environment.get(ATTEMPTS_VARIABLE, "")
    return max(1, int(stated)) if stated.isdecimal() else DEFAULT_ATTEMPTS


def connect(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it. Raises StorageError if there is none for it."""
    with storage_errors(url):
        import fsspec

        if protocol(url) in _GCS:  # else each bucket costs a gRPC call, which needs a permission and a minute to fail
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        system, path = fsspec.core.url_to_fs(url, **_options(protocol(url)))
        if protocol(url) in _S3:
            system.retries = 1
        return system, path


def call_with_retries(url: str, call: Callable[[], T]) -> T:
    """Return the result of `call`, attempted again after errors that may pass, with growing pauses.

    Raises StorageError, about `url`.
    """
    # gcsfs has retries of its own, which cannot be switched off.
    count = min(2, attempts()) if protocol(url) in _GCS else attempts()
    for number in range(1, count + 1):
        try:
            with storage_errors(url, number):
                return call()
        except StorageError as error:
            if error.kind not in TRANSIENT or number == count:
                raise
        pause_s = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** (number - 1))
        time.sleep(min(pause_s, timeout_s()) * random.uniform(0.5, 1))  # noqa: S311 spreads clients, protects nothing
    raise AssertionError("there is at least one attempt")


@contextlib.contextmanager
def storage_errors(url: str, attempt: int = 1) -> Iterator[None]:
    """Raise the error of a file system as StorageError about `url`, in its given attempt."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # each file system has its own exceptions
        kind = _kind(error)
        after = f" in {attempt} attempts" if attempt > 1 else ""
        raise StorageError(f"{shown(url)}: {_message(kind, error, url, after)}", kind=kind) from error


def _options(name: str) -> dict[str, Any]:
    """Return the options of a file system: time limits, no listings that outlive a command, no retries of its own."""
    limit_s = timeout_s()
    if name in _S3:
        retries = {"total_max_attempts": 1, "mode": "standard"}
        config = {"connect_timeout": min(_CONNECT_S, limit_s), "read_timeout": limit_s, "retries": retries}
        return {"config_kwargs": config, "use_listings_cache": False}
    if name in _GCS:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs each error that it raises, with a traceback
        return {"requests_timeout": limit_s, "use_listings_cache": False}
    if name in _HTTP:
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(_CONNECT_S, limit_s), sock_read=limit_s)
        return {"client_kwargs": {"timeout": limits}, "use_listings_cache": False}
    return {}


# Errors --------------------------------------------------------------------------------------------------------------

_CREDENTIAL_ERRORS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
    "SSOError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError",
}  # fmt: skip
_CREDENTIAL_CODES = {
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch",
    "TokenRefreshRequired", "AuthorizationHeaderMalformed",
}  # fmt: skip
_TIMEOUTS = {"TimeoutError", "FSTimeoutError", "ReadTimeoutError", "ConnectTimeoutError", "ServerTimeoutError"}
_NO_CONNECTION = {
    "EndpointConnectionError", "ClientConnectorError", "gaierror", "ConnectionRefusedError", "ProxyConnectionError",
}  # fmt: skip
_CONNECTION_CUT = {
    "ConnectionClosedError", "ServerDisconnectedError", "ClientPayloadError", "IncompleteReadError", "IncompleteRead",
    "ResponseStreamingError", "ConnectionResetError", "ConnectionError", "HTTPClientError", "ClientConnectionError",
    "ResponseParserError", "IncompleteError", "ChecksumError",
}  # fmt: skip
_BUSY_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "503", "500"}
_BUSY_STATUS = {408, 425, 429, 500, 502, 503, 504}


def _kind(error: BaseException) -> str:
    # An error and those that caused it.
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    names = {parent.__name__ for link in chain for parent in type(link).__mro__}
    status = next((number for link in chain if (number := _status(link)) is not None), None)
    code = next((text for link in chain if (text := _code(link))), "")
    if names & {"ImportError", "ModuleNotFoundError"}:
        return PACKAGE
    if names & _CREDENTIAL_ERRORS or code in _CREDENTIAL_CODES or status == 401:
        return CREDENTIALS
    if status in _BUSY_STATUS or code in _BUSY_CODES or getattr(error, "errno", None) == errno.EBUSY:
        return BUSY
    # In this order: a timeout is also an error of the connection, and HTTP's missing files may be any of these.
    for kind, error_names in ((TIMEOUT, _TIMEOUTS), (UNREACHABLE, _NO_CONNECTION), (CUT, _CONNECTION_CUT)):
        if names & error_names:
            return kind
    if status == 403 or "PermissionError" in names or str(error).startswith("Forbidden"):
        return DENIED
    return MISSING if status in (404, 410) or "FileNotFoundError" in names else OTHER


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of aiohttp, gcsfs or botocore states."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    stated = getattr(error, "status", None) or metadata.get("HTTPStatusCode") or vars(error).get("code")
    return int(str(stated)) if str(stated).isdecimal() else None


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _message(kind: str, error: Exception, url: str, after: str) -> str:
    """Return the message for the user: the error and its remedy, without the URL."""
    name = protocol(url)
    detail = _line(error, url)
    if kind == PACKAGE:
        extra = "'torch-tracekit[remote]'" if name in (*_S3, *_GCS, *_HTTP) else "the package that it names"
        return f"the package for {name}:// is not installed ({detail}); install it: pip install {extra}"
    return {
        CREDENTIALS: f"no valid credentials ({detail}); {_LOGIN.get(name, 'log in to the server')}",
        DENIED: "access denied (403); check which account is used, and its permissions",
        MISSING: "no such file or folder; check the address",
        TIMEOUT: f"no answer within {timeout_s():g} s{after}; check the network, or set {TIMEOUT_VARIABLE}",
        BUSY: f"the server is busy or failed ({detail}){after}; try again later",
        UNREACHABLE: f"cannot connect to the server ({detail}){after}; check the address and the network",
        CUT: f"the connection was cut ({detail}){after}; try again, or check the network",
    }.get(kind, f"cannot be accessed ({detail}); check the address and your access to it")


_S3_LOGIN = (
    "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (other providers: AWS_ENDPOINT_URL); "
    "for a public bucket set FSSPEC_S3_ANON=true"
)
_GCS_LOGIN = "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
_LOGIN = dict.fromkeys(_S3, _S3_LOGIN) | dict.fromkeys(_GCS, _GCS_LOGIN)


def _line(error: Exception, url: str) -> str:
    text = " ".join(str(error).split()).replace(url, shown(url)) or type(error).__name__
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\")]+", r"\1", text)[:200]
