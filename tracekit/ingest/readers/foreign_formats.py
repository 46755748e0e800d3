"""Files that are often passed in place of a trace: what they are, and what to do. No reader reads them."""

import re

_OWN_OUTPUT = re.compile(rb'"schema"\s*:\s*"tracekit\.([a-z]+)/')


def describe(head: bytes) -> str | None:
    """Return what a file is by its first bytes, and what to do about it; None if it is none of these."""
    start = head.lstrip()[:64].lower()
    if not start:
        return "the file is empty; record it again"
    if start.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the file it points to; run: git lfs pull"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page, not a trace, so the download failed; download the file again"
    if start.startswith(b"pk\x03\x04") or head[257:262] == b"ustar":
        return "this is an archive or a checkpoint, not a trace; extract the traces and name their folder"
    if (own := _OWN_OUTPUT.search(head[:200])) is not None:
        return f"this is a {own[1].decode()} that tracekit wrote, not a trace; name a trace file or the run's folder"
    return None
