"""The manifest of a run: run.json, as the recorder writes it."""

from collections.abc import Mapping
from typing import Any

from tracekit import conventions
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.reader import Reader


class Manifests(Reader):
    """Reads run.json; it has no trace."""

    name = "run manifest"
    suffixes = (conventions.MANIFEST_FILE,)
    contents = "strategy, world size, model, arguments and versions of the run"
    has_traces = False
    usage = "name the run's folder or a trace file"

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether the file is called run.json or states the schema of a manifest."""
        return name == conventions.MANIFEST_FILE or f'"{conventions.RUN_SCHEMA}"'.encode() in head[:200]


def parse(text: str) -> Mapping[str, Any]:
    """Return the fields of a manifest. Raises ValueError if it is not a JSON object."""
    fields = untrusted_json.parse(text)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields
