"""Commands that show or set a device, by its vendor: fixes name those of NVIDIA, and a run of others gets its own.

Sources: `amd-smi --help` (rocm.docs.amd.com/projects/amdsmi), `npu-smi` and `hccn_tool` (hiascend.com).
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Vendor
from tracekit.rules.rule import Report

_COMMAND = re.compile(r"nvidia-smi(?: (?:--?[\w-]+(?:=[\w,]+)?|pmon|topo|nvlink|[A-Z]+(?:[_,][A-Z]+)*(?![\w-])|1))*")
_PROCESSES, _STATE, _TOPOLOGY, _LINKS = "processes", "state", "topology", "links"
_POWER_LIMIT, _CLOCK_LIMIT, _CLOCK_RESET, _RESET, _EXCLUSIVE = "power limit", "clock", "clock reset", "reset", "alone"
_PURPOSES = {
    "topo": _TOPOLOGY, "nvlink": _LINKS, "-pl": _POWER_LIMIT, "-lgc": _CLOCK_LIMIT, "-rgc": _CLOCK_RESET,
    "-rac": _CLOCK_RESET, "--gpu-reset": _RESET, "-c EXCLUSIVE": _EXCLUSIVE, "-q": _STATE,
}  # fmt: skip
"""What each command of NVIDIA is for, by what it contains, the first that does; others list processes."""
_COMMANDS: Mapping[Vendor, Mapping[str, str]] = {
    Vendor.AMD: {
        _PROCESSES: "amd-smi process", _STATE: "amd-smi metric --clock --power --temperature --throttle",
        _TOPOLOGY: "amd-smi topology", _LINKS: "amd-smi xgmi", _POWER_LIMIT: "amd-smi set --power-cap",
        _CLOCK_LIMIT: "amd-smi set --perf-determinism", _CLOCK_RESET: "amd-smi reset --clocks",
        _RESET: "amd-smi reset --gpureset", _EXCLUSIVE: "ROCR_VISIBLE_DEVICES of each job",
    },
    Vendor.ASCEND: {
        _PROCESSES: "npu-smi info", _STATE: "npu-smi info -t power -i ID, npu-smi info -t temp -i ID",
        _TOPOLOGY: "npu-smi info -t topo -i ID", _LINKS: "hccn_tool -i ID -link -g",
        _POWER_LIMIT: "npu-smi info -t power -i ID", _CLOCK_LIMIT: "npu-smi info -t common -i ID",
        _CLOCK_RESET: "npu-smi info -t common -i ID", _RESET: "npu-smi set -t reset -i ID",
        _EXCLUSIVE: "ASCEND_RT_VISIBLE_DEVICES of each job",
    },
}  # fmt: skip
_OTHER_NAMES: Mapping[Vendor, Mapping[str, str]] = {
    Vendor.AMD: {"nccl-tests": "rccl-tests"},
    Vendor.ASCEND: {"nccl-tests": "hccl_test", "NCCL_DEBUG=INFO": "ASCEND_GLOBAL_LOG_LEVEL=1"},
}
_ONLY_NVIDIA = re.compile(r"\bMPS\b|\bMIG\b|Nsight Compute")
_SENTENCE = re.compile(r"(?<=[.!]) (?=[A-Z])")


def name_commands(report: Report) -> Report:
    """Return the report with fixes that name the commands of the vendor of the run's devices."""
    vendor = workload.vendor(report.run)
    if vendor is Vendor.NVIDIA:
        return report
    findings = tuple(replace(finding, fix=of_vendor(finding.fix, vendor)) for finding in report.findings)
    return replace(report, findings=findings)


def of_vendor(fix: str, vendor: Vendor) -> str:
    """A fix with commands of another vendor; sentences on what only NVIDIA's GPUs have are left out.

    >>> of_vendor("Check the links (nvidia-smi topo -m). Share it under MPS.", Vendor.AMD)
    'Check the links (amd-smi topology).'
    """
    sentences = [sentence for sentence in _SENTENCE.split(fix) if not _ONLY_NVIDIA.search(sentence)] or [fix]
    text = _COMMAND.sub(lambda command: _COMMANDS[vendor][_purpose(command[0])], " ".join(sentences))
    for name, other in _OTHER_NAMES[vendor].items():
        text = text.replace(name, other)
    return text


def _purpose(command: str) -> str:
    return next((purpose for part, purpose in _PURPOSES.items() if part in command), _PROCESSES)
