"""What each rank did last: named where ranks wait for one another in vain, as they do not run the same program.

Collectives match by order. A rank that runs a micro-batch more, or clips where another does not, waits for a collective
that nobody else calls. So each rank keeps a list of what it did; one whose patience ends asks the others for theirs,
through the store of the process group, and raises with all of them. Until then nothing is exchanged.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE_S = 60.0
"""How long a rank waits for another by default: longer than a step, shorter than the time limit of process groups."""
_SHOWN, _ANSWER_S, _POLL_S = 6, 5.0, 0.5

_patience = timedelta(seconds=PATIENCE_S)
_done: deque[tuple[int, str]] = deque(maxlen=64)
_numbers = itertools.count(1)
_stores: list[Any] = []
"""Of the process groups that have been the default one; the last is this one's."""
_models: dict[tuple[int, ...], int] = {}
"""How many models have been compared, by the ranks that they are sharded over."""


def set_patience(seconds: float) -> None:
    """Let ranks wait so long for one another, on gloo, before they compare their programs and raise."""
    global _patience
    if not seconds > 0:
        raise ValueError(f"YaFSDP: a patience of {seconds:g} s: takes more than 0")
    _patience = timedelta(seconds=seconds)


def note(what: str) -> None:
    """Note that this rank does something that all ranks must do in the same order."""
    _done.append((next(_numbers), what))


def wait_for(work: dist.Work) -> None:
    """Wait for a collective of gloo. Raises RuntimeError with what all ranks did last if it fails or takes too long."""
    try:
        work.wait(_patience)
    except RuntimeError as error:
        raise RuntimeError(_explanation(str(error))) from error


def answer_others() -> None:
    """Begin to answer ranks that ask what this one did, in a thread that asks the store twice a second."""
    store = dist.distributed_c10d._get_default_store()
    if any(other is store for other in _stores):
        return
    global _numbers
    _stores.append(store)
    _numbers = itertools.count(1)
    _done.clear()
    _models.clear()
    own_connection = store.clone()  # a thread that used the main one's would make it wait
    threading.Thread(
        target=_answer, args=(own_connection, dist.get_rank()), name="yafsdp-programs", daemon=True
    ).start()


def compare_models(description: Sequence[str], group: dist.ProcessGroup) -> int:
    """Raise RuntimeError, on every rank of the group, unless all describe their models alike.

    Returns the number of the model among those that these ranks have run, from 1 on: the same on all ranks. Through
    the store, before any of their collectives, whose sizes would differ, too.
    """
    store, members = dist.distributed_c10d._get_default_store(), tuple(dist.get_process_group_ranks(group))
    number = _models[members] = _models.get(members, 0) + 1
    keys = {rank: f"yafsdp/model/{'-'.join(map(str, members))}/{number}/{rank}" for rank in members}
    store.set(keys[dist.get_rank()], "\n".join(description))
    for rank, key in keys.items():
        try:
            store.wait([key], _patience)
        except RuntimeError as error:
            raise RuntimeError(_explanation(f"rank {rank} runs no model that is sharded over {members}")) from error
        others = store.get(key).decode().splitlines()
        for own_line, line in itertools.zip_longest(description, others):
            if own_line != line:
                raise RuntimeError(
                    "YaFSDP: the ranks shard different models; build and shard the same one on all ranks:\n  "
                    f"rank {dist.get_rank()}: {own_line or 'no more units'}\n  rank {rank}: {line or 'no more units'}"
                )
    return number


def _answer(store: Any, rank: int) -> None:
    answered, pause = 0, threading.Event()
    while not pause.wait(_POLL_S):
        try:
            asks = store.add("yafsdp/asks", 0)
            for ask in range(answered + 1, asks + 1):  # several ranks may ask at once
                store.set(_key(ask, rank), "\n".join(f"{number} {what}" for number, what in tuple(_done)))
            answered = asks
        except RuntimeError:  # the store ended before this process
            return


def _key(ask: int, rank: int) -> str:
    return f"yafsdp/program/{ask}/{rank}"


def _explanation(failure: str) -> str:
    """Explain why a collective did not end, by the programs of all ranks."""
    return explanation(
        f"YaFSDP: rank {dist.get_rank()} waited in vain for other ranks ({failure.splitlines()[0]}). Collectives match "
        "by order: all ranks must run the same units, micro-batches, clippings and optimizer steps in the same order"
    )


def explanation(difference: str) -> str:
    """A sentence on a difference of ranks, and what each of them did last, from the first difference on."""
    ranks = range(dist.get_world_size())
    programs = _programs_of(ranks)
    words = [f"{difference}; what they did last:"]
    first = first_difference({rank: program for rank, program in programs.items() if program})
    for rank in ranks:
        program = programs.get(rank)
        if program is None:
            words.append(f"rank {rank}: gives no answer, it has ended or waits elsewhere")
            continue
        shown = [(number, what) for number, what in program if first is None or number >= first - 1]
        shown = shown[:_SHOWN] if first is not None else shown[-_SHOWN:]
        ended = "" if shown and shown[-1] != program[-1] else ", then nothing more"
        words.append(f"rank {rank}: " + ", ".join(f"{number} {what}" for number, what in shown) + ended)
    return "\n  ".join(words)


def first_difference(programs: Mapping[int, list[tuple[int, str]]]) -> int | None:
    """Return the number of the first thing that not all ranks did, of what is known of all; None if there is none."""
    if len(programs) < 2:
        return None
    begin = max(program[0][0] for program in programs.values())
    lists = [[what for number, what in program if number >= begin] for program in programs.values()]
    for offset, things in enumerate(itertools.zip_longest(*lists)):
        if len(set(things)) > 1:
            return begin + offset
    return None


def _programs_of(ranks: range) -> dict[int, list[tuple[int, str]]]:
    """Return what each rank that answers did last, with running numbers."""
    programs = {dist.get_rank(): list(_done)}
    try:
        store = dist.distributed_c10d._get_default_store()
        ask = store.add("yafsdp/asks", 1)
    except RuntimeError:
        return programs
    pause, deadline = threading.Event(), itertools.count()
    while len(programs) < len(ranks) and next(deadline) * _POLL_S < _ANSWER_S:
        pause.wait(_POLL_S)
        for rank in ranks:
            if rank not in programs and (lines := _read(store, _key(ask, rank))) is not None:
                programs[rank] = [(int(number), what) for number, _, what in (line.partition(" ") for line in lines)]
    return programs


def _read(store: Any, key: str) -> list[str] | None:
    try:
        return store.get(key).decode().splitlines() if store.check([key]) else None
    except RuntimeError:
        return None


def waiting(start: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Run a collective of torch and wait for it: on a device, the stream waits."""
    work = start(*args, async_op=True, **options)
    if dist.get_backend(options.get("group")) == "gloo":
        wait_for(work)
    else:
        work.wait()
