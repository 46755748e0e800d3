"""``tracekit checkpoint``: verify checkpoints on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.cli.options import DocumentOptions, expand_options
from tracekit.model import units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.ingest.checkpoint_files import Problem, VerifiedCheckpoint

SCHEMA = "tracekit.verify/1"
checkpoint = typer.Typer(help="Verify checkpoints on disk.", no_args_is_help=True)


@checkpoint.callback()
def _checkpoints() -> None:
    """Verify checkpoints on disk."""


@checkpoint.command(short_help="Verify that checkpoints are complete and undamaged.")
@expand_options
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder with checkpoints, such as a run.")
    ],
    *,
    table: DocumentOptions,
) -> None:
    """Verify that each checkpoint is complete; if one is damaged, name the rank, the file and the remedy.

    Needs no torch and executes no code from a checkpoint. Checkpoints of tracekit's trainers are verified in full.
    For others, it verifies the storage index of torch.distributed.checkpoint, CRC32 checksums of torch.save, and
    headers and sizes of safetensors. Exit codes: 0 all are complete, 1 one is damaged, 2 one cannot be read or the
    folder has none.
    """
    from tracekit.ingest import checkpoint_files

    verified = checkpoint_files.verify(path)
    from tracekit.report.document import Document, Line

    lines = tuple(Line((text,), wraps=False) for ckpt in verified for text in _lines(ckpt))
    document = Document((lines,), values={"schema": SCHEMA, "checkpoints": [_values(ckpt) for ckpt in verified]})
    table.write_document(document)
    statuses = {ckpt.status for ckpt in verified}
    if statuses != {checkpoint_files.WHOLE}:
        raise typer.Exit(1 if checkpoint_files.DAMAGED in statuses else 2)


def _lines(ckpt: "VerifiedCheckpoint") -> "Iterator[str]":
    yield f"{ckpt.status:<10}  {ckpt.path}  {ckpt.files} files, {units.size(ckpt.total_bytes)}: {_verified_share(ckpt)}"
    yield from (f"  {_problem(problem)}" for problem in ckpt.problems)
    yield from (f"  note: {note}" for note in ckpt.notes if not ckpt.problems)
    if ckpt.remedy:
        yield f"  what to do: {ckpt.remedy}"


def _verified_share(ckpt: "VerifiedCheckpoint") -> str:
    if not ckpt.total_bytes:
        return ", ".join(ckpt.kinds)
    return f"{units.share(ckpt.checked_bytes / ckpt.total_bytes)} by checksum ({', '.join(ckpt.kinds)})"


def _problem(problem: "Problem") -> str:
    return f"{'' if problem.rank is None else f'rank {problem.rank}: '}{problem.file} {problem.what}"


def _values(ckpt: "VerifiedCheckpoint") -> dict[str, Any]:
    problems = [{"rank": problem.rank, "file": problem.file, "what": problem.what} for problem in ckpt.problems]
    return {
        "path": ckpt.path,
        "status": ckpt.status,
        "kinds": list(ckpt.kinds),
        "files": ckpt.files,
        "bytes": ckpt.total_bytes,
        "checked_bytes": ckpt.checked_bytes,
        "problems": problems,
        "notes": list(ckpt.notes),
        "remedy": ckpt.remedy or None,
    }
