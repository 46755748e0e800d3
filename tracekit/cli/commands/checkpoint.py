"""``tracekit checkpoint``: verify checkpoints on disk."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.cli.options import TableOptions, expand_options
from tracekit.model import units

if TYPE_CHECKING:
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
    table: TableOptions,
) -> None:
    """Verify that each checkpoint is complete; if one is damaged, name the rank, the file and the remedy.

    Needs no torch and executes no code from a checkpoint. Checkpoints of tracekit's trainers are verified in full.
    For others, it verifies the storage index of torch.distributed.checkpoint, CRC32 checksums of torch.save, and
    headers and sizes of safetensors. Exit codes: 0 all are complete, 1 one is damaged, 2 one cannot be read or the
    folder has none.
    """
    from tracekit.ingest import checkpoint_files

    verified = checkpoint_files.verify(path)
    table.emit(_as_json(verified) if table.is_json else "".join(map(_as_text, verified)))
    statuses = {each.status for each in verified}
    if statuses != {checkpoint_files.WHOLE}:
        raise typer.Exit(1 if checkpoint_files.DAMAGED in statuses else 2)


def _as_text(each: "VerifiedCheckpoint") -> str:
    from tracekit.model import escaping

    lines = [
        f"{each.status:<10}  {each.path}  {each.files} files, {units.size(each.total_bytes)}: {_verified_share(each)}"
    ]
    lines += [f"  {_problem(problem)}" for problem in each.problems]
    lines += [f"  note: {note}" for note in each.notes if not each.problems]
    if each.remedy:
        lines.append(f"  what to do: {each.remedy}")
    return "".join(escaping.inert(line, len(line) + 1) + "\n" for line in lines)


def _verified_share(each: "VerifiedCheckpoint") -> str:
    if not each.total_bytes:
        return ", ".join(each.kinds)
    return f"{units.share(each.checked_bytes / each.total_bytes)} by checksum ({', '.join(each.kinds)})"


def _problem(problem: "Problem") -> str:
    return f"{'' if problem.rank is None else f'rank {problem.rank}: '}{problem.file} {problem.what}"


def _as_json(verified: "list[VerifiedCheckpoint]") -> str:
    def row(each: "VerifiedCheckpoint") -> dict[str, Any]:
        problems = [{"rank": one.rank, "file": one.file, "what": one.what} for one in each.problems]
        return {
            "path": each.path,
            "status": each.status,
            "kinds": list(each.kinds),
            "files": each.files,
            "bytes": each.total_bytes,
            "checked_bytes": each.checked_bytes,
            "problems": problems,
            "notes": list(each.notes),
            "remedy": each.remedy or None,
        }

    return json.dumps({"schema": SCHEMA, "checkpoints": [row(each) for each in verified]}, indent=2) + "\n"
