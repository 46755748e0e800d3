"""Databases of Ascend PyTorch Profiler, for tests: tables with the columns that its documentation lists.

The profiler needs NPUs, so these files are made by the published columns.
"""

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE_NS = 1_704_161_511_000_000_000
PROCESS = 437_675
TABLES = {
    "STRING_IDS": "id INTEGER PRIMARY KEY, value TEXT",
    "PYTORCH_API": (
        "startNs TEXT, endNs TEXT, globalTid INTEGER, connectionId INTEGER, name INTEGER, sequenceNumber INTEGER, "
        "fwdThreadId INTEGER, inputDtypes INTEGER, inputShapes INTEGER, callchainId INTEGER, type INTEGER"
    ),
    "CONNECTION_IDS": "id INTEGER, connectionId INTEGER",
    "CANN_API": (
        "startNs INTEGER, endNs INTEGER, type INTEGER, globalTid INTEGER, connectionId INTEGER PRIMARY KEY, "
        "name INTEGER"
    ),
    "TASK": (
        "startNs INTEGER, endNs INTEGER, deviceId INTEGER, connectionId INTEGER, globalTaskId INTEGER, "
        "globalPid INTEGER, taskType INTEGER, contextId INTEGER, streamId INTEGER, taskId INTEGER, modelId INTEGER"
    ),
    "COMPUTE_TASK_INFO": (
        "name INTEGER, globalTaskId INTEGER PRIMARY KEY, blockDim INTEGER, taskType INTEGER, opType INTEGER"
    ),
    "COMMUNICATION_TASK_INFO": "name INTEGER, globalTaskId INTEGER, taskType INTEGER, groupName INTEGER, opId INTEGER",
    "COMMUNICATION_OP": (
        "opName INTEGER, startNs INTEGER, endNs INTEGER, connectionId INTEGER, groupName INTEGER, "
        "opId INTEGER PRIMARY KEY, relay INTEGER, retry INTEGER, dataType INTEGER, algType INTEGER, count NUMERIC, "
        "opType INTEGER, deviceId INTEGER"
    ),
    "MSTX_EVENTS": "startNs INTEGER, endNs INTEGER, eventType INTEGER, message INTEGER, globalTid INTEGER",
    "STEP_TIME": "id INTEGER, startNs INTEGER, endNs INTEGER",
    "ENUM_HCCL_DATA_TYPE": "id INTEGER, name TEXT",
    "RANK_DEVICE_MAP": "rankId INTEGER, deviceId INTEGER",
    "NPU_INFO": "id INTEGER, name TEXT",
    "META_DATA": "name TEXT, value TEXT",
}


class Texts(dict[str, int]):
    """Numbers of texts, in the order of their first use."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def thread(number: int) -> int:
    """Global id of a thread of the process."""
    return PROCESS << 32 | number


def write(path: Path, drawing: "Drawing") -> Path:
    """Write rows as a database."""
    texts = drawing.texts
    rows: dict[str, list[dict[str, Any]]] = {
        **drawing.tables,
        "STRING_IDS": [{"id": number, "value": text} for text, number in texts.items()],
    }
    with sqlite3.connect(path) as database:
        for table, columns in TABLES.items():
            database.execute(f"CREATE TABLE {table} ({columns})")
            for row in rows.get(table, ()):
                names, marks = ", ".join(row), ", ".join("?" * len(row))
                database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))
    database.close()
    return path


@dataclass
class Drawing:
    """Rows of a database; times in µs since BASE_NS."""

    device: int
    texts: Texts = field(default_factory=Texts)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in TABLES})

    def span(self, start_us: float, dur_us: float) -> dict[str, int]:
        start_ns = BASE_NS + round(1000 * start_us)
        return {"startNs": start_ns, "endNs": start_ns + round(1000 * dur_us)}

    def operator(
        self, name: str, start_us: float, dur_us: float, connection: int | None = None, **columns: object
    ) -> None:
        number = len(self.tables["PYTORCH_API"])
        times = {key: str(at_ns) for key, at_ns in self.span(start_us, dur_us).items()}
        row = {**times, "globalTid": thread(1), "connectionId": number, "name": self.texts[name], "type": 50001}
        self.tables["PYTORCH_API"].append(row | columns)
        if connection is not None:
            self.tables["CONNECTION_IDS"].append({"id": number, "connectionId": connection})

    def call(self, name: str, start_us: float, connection: int) -> None:
        row = {**self.span(start_us, 3), "type": 10000, "globalTid": thread(2)}
        self.tables["CANN_API"].append(row | {"connectionId": connection, "name": self.texts[name]})

    def task(self, kind: str, start_us: float, dur_us: float, connection: int, stream: int = 3) -> int:
        number = len(self.tables["TASK"])
        row = {**self.span(start_us, dur_us), "deviceId": self.device, "connectionId": connection}
        more = {"globalTaskId": number, "taskType": self.texts[kind], "streamId": stream}
        self.tables["TASK"].append(row | more)
        return number

    def all_reduce(self, number: int, start_us: float, dur_us: float, connection: int) -> None:
        """A collective with a task on each of two streams."""
        for stream in (5, 6):
            task = self.task("Notify_Wait", start_us, dur_us, connection, stream)
            row = {"name": self.texts["Notify_Wait"], "globalTaskId": task}
            self.tables["COMMUNICATION_TASK_INFO"].append(row)
        names = {"opName": self.texts[f"hcom_allReduce__526_{number}_1"], "groupName": self.texts["group0"]}
        more = {"opId": number, "dataType": 4, "connectionId": connection, "count": 1024, "deviceId": self.device}
        self.tables["COMMUNICATION_OP"].append(names | self.span(start_us, dur_us) | more)


def training(rank: int = 0, steps: int = 2, *, with_marks: bool = True) -> Drawing:
    """Rows of a rank of two: each step of 1 ms launches a copy, a product of 400 µs and an all-reduce of 300 µs.

    The all-reduce has two tasks of its own, and the stream waits for an event.
    """
    drawing = Drawing(rank)
    texts, tables = drawing.texts, drawing.tables
    for step in range(steps):
        at, first = 1000 * step, 10 * step
        if with_marks:
            drawing.operator(f"ProfilerStep#{step}", at, 1000)
        shapes = {"inputShapes": texts["64,32;32,16"], "inputDtypes": texts["c10::BFloat16;c10::BFloat16"]}
        drawing.operator("aten::copy_", at + 5, 10, first)
        drawing.operator("aten::mm", at + 20, 15, first + 1, sequenceNumber=7 + step, **shapes)
        drawing.operator("Enqueue", at + 24, 2, type=50002)
        drawing.operator("c10d::allreduce_", at + 40, 10, first + 2)
        for number, name in enumerate(("aclrtMemcpyAsync", "aclnnMm_MatMulV3", "hcom_allReduce_")):
            drawing.call(name, at + 10 + 10 * number, first + number)
        drawing.task("MEMCPY_ASYNC", at + 40, 50, first)
        drawing.task("EVENT_WAIT", at + 90, 10, first + 1)
        product = {"name": texts["aclnnMm_MatMulV3Common_MatMulV3"]}
        tables["COMPUTE_TASK_INFO"].append(
            product | {"globalTaskId": drawing.task("AI_CORE", at + 100, 400, first + 1)}
        )
        drawing.all_reduce(step, at + 500, 300, first + 2)
        tables["STEP_TIME"].append({"id": step, **drawing.span(at, 1000)})
    group = {"group0": {"group_name": "default_group", "group_rank": rank, "global_ranks": [0, 1]}}
    tables["META_DATA"] = [{"name": "parallel_group_info", "value": json.dumps(group)}]
    tables["ENUM_HCCL_DATA_TYPE"] = [{"id": 4, "name": "FP32"}]
    tables["RANK_DEVICE_MAP"] = [{"rankId": rank, "deviceId": rank}]
    tables["NPU_INFO"] = [{"id": rank, "name": "Ascend910B3"}]
    return drawing
