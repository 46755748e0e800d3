"""The fixes of all rules on all public recordings: none names a feature that the recording shows is not in use.

Thresholds are lowered so that as many rules as possible find something. Which features are in use is read from the raw
file, apart from tracekit.
"""

import dataclasses
import gzip
import re
from pathlib import Path

import pytest

from tests.support import shared_findings
from tests.support.selection import others_in_accuracy
from tracekit.errors import RuleError
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.registry import all_rules

OTHERS = Path(__file__).parents[3] / "shared" / "traces"
FOLDERS = sorted(path.name for path in OTHERS.glob("*") if any(path.glob("*.json.gz")))

OF_WRAPPERS = {
    # What a fix may say only if the file shows that it is in use: words of fixes, and names in the file.
    r"fully_shard|FSDPModule|MixedPrecisionPolicy|set_modules_to_|set_separate_reduce|reshard_after": rb"FSDP::",
    r"FullyShardedDataParallel|\bMixedPrecision\(|SHARD_GRAD_OP|limit_all_gathers": rb"FullyShardedDataParallel",
    r"register_comm_hook|bucket_cap_mb|no_sync\(": rb"DistributedDataParallel",
    r"YaFSDP": rb"yafsdp",
    r"all-to-all": rb"(?i)all_?to_?all|SendRecv",
}
ONCE = {
    # What a fix must not advise if it is in use already.
    r"torch\.compile": rb"triton_(?:poi|red|per)_|CompiledFxGraph",
    r"reduce-overhead": rb"GraphLaunch",
}
OF_TRAINING = r"activation checkpointing|no_sync|optimizer|gradient|register_comm_hook"
TRAINS = rb"autograd::|Optimizer\.step|[Bb]ackward|_foreach_"


EVERYDAY = {"torchrec_v100_4ranks"}.intersection(FOLDERS)


@pytest.mark.parametrize("name", others_in_accuracy(FOLDERS, EVERYDAY) or ["nothing"])
def test_fixes_name_no_feature_that_is_not_in_use(name):
    if name == "nothing":
        pytest.skip("needs ../shared/traces, which is not part of the project")
    folder = OTHERS / name
    recorded = b"".join(map(names, sorted(folder.glob("*.json.gz"))))
    findings = lenient_findings(folder)
    assert findings
    for found in findings:
        for words, sign in OF_WRAPPERS.items():
            if re.search(words, found.fix):
                assert re.search(sign, recorded), (found.code, words, found.fix)
        for words, sign in ONCE.items():
            if re.search(words, found.fix):
                assert not re.search(sign, recorded), (found.code, words, found.fix)
        if re.search(OF_TRAINING, found.fix):
            assert re.search(TRAINS, recorded), (found.code, found.fix)


def names(path):
    """Return the names of a file's events, once each."""
    return b"\n".join(set(re.findall(rb'"name"\s*:\s*"([^"]{1,300})', gzip.decompress(path.read_bytes()))))


def lenient_findings(folder):
    run = load(folder)
    findings = list(shared_findings.findings(folder))
    for rule in map(lenient, all_rules()):
        try:
            findings += check(run, [rule]).findings
        except RuleError:  # a threshold of nothing where there is nothing
            continue
    return [found for found in findings if not found.code.startswith("DATA")]


def lenient(rule):
    least = {
        field.name: 1e-9
        for field in dataclasses.fields(rule)
        if field.name.startswith(("min_", "info_", "max_")) and field.name.endswith("_ratio")
    }
    return rule(**least)
