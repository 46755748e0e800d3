"""Parquet files whose writing fails as that of any other file."""

import os
import re
from pathlib import Path

import polars as pl

_CODE = re.compile(r"\(os error (\d+)\)")


def write(table: pl.DataFrame, path: Path, *, compression_level: int | None = None) -> None:
    """Write a table. Raises OSError where the file cannot be written, such as on a full disk.

    Polars raises its own ComputeError there.
    """
    try:
        table.write_parquet(path, compression="zstd", compression_level=compression_level)
    except pl.exceptions.ComputeError as error:
        code = _CODE.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
