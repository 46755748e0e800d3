"""The manifest of a run: run.json, as the recorder writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.reader import Reader
from tracekit.model.manifest import Manifest

_MAX_BYTES = 4 << 20


class Manifests(Reader):
    """Reads run.json; it has no trace."""

    name = "run manifest"
    suffixes = (conventions.MANIFEST_FILE,)
    contents = "strategy, world size, model, arguments, versions and commit of the run"
    has_traces = False
    usage = "name the run's folder or a trace file"

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether the file is called run.json or states the schema of a manifest."""
        return name == conventions.MANIFEST_FILE or f'"{conventions.RUN_SCHEMA}"'.encode() in head[:200]


def read(path: Path) -> Manifest | None:
    """The manifest, for programs that load no run; None if it is no JSON object of at most 4 MiB."""
    try:
        return Manifest.of(parse(path.read_bytes())) if path.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError):
        return None


def parse(text: str | bytes) -> Mapping[str, Any]:
    """Return the fields of a manifest. Raises ValueError if it is not a JSON object."""
    fields = untrusted_json.parse(text)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields
