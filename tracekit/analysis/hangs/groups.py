"""The process groups of a job and their ranks, by the dumps of all ranks."""

from collections import defaultdict
from dataclasses import dataclass

from tracekit.model.hang_dump import Call, HangDumps, RankDump

_WORLD = ("default_pg", "default")


@dataclass(frozen=True)
class Group:
    """One process group. Several may have one name, each with other ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the ranks in the group."""
    is_inferred: bool = False
    """Whether the dumps do not state the ranks: they are those that called something in the group."""

    def __str__(self) -> str:
        """Return the group for a message."""
        described = self.description if self.description not in ("", "undefined") else ""
        return f'group "{self.name}"' + (f" ({described})" if described else "")


class Groups:
    """The groups of a job, found by a rank and the name that the rank has for the group."""

    def __init__(self, dumps: HangDumps) -> None:
        self._stated: dict[tuple[int, str], Group] = {}
        self._by_name: dict[str, list[Group]] = defaultdict(list)
        self._inferred: dict[str, Group] = {}
        for rank, dump in dumps.ranks.items():
            self._add_stated(rank, dump)
        self.world_size = _world_size(dumps)
        self._infer(dumps)

    def of(self, call: Call) -> Group:
        """Return the group of a call."""
        stated = self._stated.get((call.rank, call.group))
        if stated is not None:
            return stated
        candidates = [group for group in self._by_name[call.group] if call.rank in group.ranks]
        return candidates[0] if candidates else self._inferred[call.group]

    def _add_stated(self, rank: int, dump: RankDump) -> None:
        for name, (description, ranks) in dump.groups.items():
            if ranks is None:
                continue
            existing = next((group for group in self._by_name[name] if set(group.ranks) == set(ranks)), None)
            group = existing or Group(name, description, ranks)
            if existing is None:
                self._by_name[name].append(group)
            self._stated[rank, name] = group

    def _infer(self, dumps: HangDumps) -> None:
        callers: dict[str, set[int]] = defaultdict(set)
        descriptions: dict[str, str] = {}
        for dump in dumps.ranks.values():
            for call in dump.calls:
                callers[call.group].add(call.rank)
                descriptions.setdefault(call.group, call.description)
        for name, ranks in callers.items():
            description = descriptions[name]
            of_world = description in _WORLD or (name == "0" and not description)
            members = range(self.world_size) if of_world else ranks
            self._inferred[name] = Group(name, description, tuple(sorted(members)), is_inferred=True)


def _world_size(dumps: HangDumps) -> int:
    sizes = [dump.world_size for dump in dumps.ranks.values() if dump.world_size]
    stated = [rank for dump in dumps.ranks.values() for _, ranks in dump.groups.values() for rank in ranks or ()]
    return max([*sizes, max(stated, default=-1) + 1, max(dumps.ranks, default=-1) + 1])
