"""Regular files, opened once and checked after opening: a pipe would block, a device has no end."""

import errno
import io
import os
import stat

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_to_read(path: "str | os.PathLike[str]") -> io.BufferedReader:
    """Open a regular file, or a link to one, for bytes. Raises OSError for a pipe, a device or a folder."""
    try:
        descriptor = os.open(path, _FLAGS)
    except ValueError:  # a NUL in the name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "a pipe, device or folder, not a regular file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def size(file: io.BufferedReader) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def read_bytes(path: "str | os.PathLike[str]") -> bytes:
    """Content of a regular file. Raises OSError."""
    with open_to_read(path) as file:
        return file.read()


def read_text(path: "str | os.PathLike[str]", errors: str = "strict") -> str:
    """Text of a regular file in UTF-8, line ends as in text files. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")
