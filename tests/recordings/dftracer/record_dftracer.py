"""Record the run of this folder: ``python -m tests.recordings.dftracer.record_dftracer`` from the project's root.

Needs ``pip install dftracer==2.2.0``; where that is another environment, DFTRACER_LIBRARY names its
libdftracer_preload.so. Two gloo ranks of the instrumented trainers stream a text and save checkpoints. Paths and the
name of the machine are replaced; of the launcher's logs, only that with the command stays.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
OPTIONS = (
    "--strategy fsdp2 --device cpu --model micro --steps 6 --tokens 64 --batch 2 --stream --checkpoint-every 2 "
    "--profile-wait 2 --profile-warmup 1 --profile-active 1 --no-memory"
)


def library():
    if (named := os.environ.get("DFTRACER_LIBRARY")) is not None:
        return named
    import dftracer

    return next(str(path) for path in Path(dftracer.__file__).parent.rglob("libdftracer_preload.so"))


def record(folder):
    text = folder / "text.jsonl"
    words = [f"word{n * n % 997}" for n in range(200)]
    text.write_text("".join(json.dumps({"text": " ".join(words[n % 50 :])}) + "\n" for n in range(400)))
    (folder / "logs").mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    trainer = ["-m", "instrumented_trainers", *OPTIONS.split(), "--data", str(text), "--out", str(folder / "run")]
    settings = {
        "LD_PRELOAD": library(),
        "DFTRACER_ENABLE": "1",
        "DFTRACER_INIT": "PRELOAD",
        "DFTRACER_INC_METADATA": "1",
        "DFTRACER_LOG_FILE": str(folder / "logs" / "io"),
        "DFTRACER_DATA_DIR": f"{text}:{folder / 'run'}",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([*launcher, *trainer], check=True, cwd=ROOT, env=os.environ | settings)


def keep(folder):
    replaced = {str(folder): "/data", str(ROOT): "/home/user/tracekit", sys.executable: "python"}
    replaced[f'"{os.uname().nodename}"'] = '"host"'
    for path in HERE.iterdir():
        if path.is_file() and path.name != Path(__file__).name:
            path.unlink()
    for path in (*(folder / "run").iterdir(), *(folder / "logs").iterdir()):
        if path.is_dir() or not path.stat().st_size:
            continue
        packed = path.suffix == ".gz"
        content = (gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).decode()
        for old, new in replaced.items():
            content = content.replace(old, new)
        if not packed or "text.jsonl" in content or path.name.startswith("rank"):
            (HERE / path.name).write_bytes(gzip.compress(content.encode(), mtime=0) if packed else content.encode())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as above:
        record(Path(above))
        keep(Path(above))
