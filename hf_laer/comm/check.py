"""The debug switch ``check_collectives``: ranks compare what they are about to do before they do it.

Each collective is announced in the process group's store, under its communicator and its number there, and a rank
goes on once all ranks of the communicator have announced the same. Ranks that part are told so while they can still
be told: in the real collective they would wait for each other, or take each other's bytes for something else.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hf_laer.comm.base import Communicator, Pending, Picked
from hf_laer.comm.messages import ByMessages
from hf_laer.comm.watch import CollectiveError, Watch, Where

_SHORTEST, _LONGEST = 0.0005, 0.05


@dataclass(frozen=True)
class Announcement:
    """One collective of one rank.

    Args:
        collective: Its kind.
        purpose: What travels on its communicator.
        ranks: The communicator's, of the world.
        number: How many it had before.
        where: Who issues it.
        alike: What must be alike on all ranks: shape, dtype, parts of a plan.
        send: Rows to each rank.
        receive: Rows from each rank.
    """

    collective: str
    purpose: str
    ranks: tuple[int, ...]
    number: int
    where: Where
    alike: Mapping[str, str] = field(default_factory=dict)
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The communicator's name and the collective's number."""
        return f"{self.purpose}-{'.'.join(map(str, self.ranks))}/{self.number}"

    def compared(self) -> dict[str, str]:
        """What must be alike."""
        return {"collective": f"{self.collective} of {self.purpose}", "number": str(self.number)} | {
            **{name: str(value) for name, value in asdict(self.where).items()},
            **self.alike,
        }

    def __str__(self) -> str:
        return f"the {self.collective} of {self.purpose}, number {self.number} there, in {self.where}"

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> Announcement:
        """From JSON."""
        values = json.loads(text)
        values |= {name: tuple(values[name]) for name in ("ranks", "send", "receive")}
        return cls(**values | {"where": Where(**values["where"])})


class Check:
    """Compares the announcements of all communicators of an engine.

    Args:
        store: The ranks' store, under a prefix of this engine's own.
        watch: This rank, its place, and the limit after which a rank that does not come is given up.
    """

    def __init__(self, store: dist.Store, watch: Watch) -> None:
        self._store, self._watch = store, watch
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        self._old: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)

    def __call__(
        self,
        collective: str,
        purpose: str,
        ranks: tuple[int, ...],
        alike: Mapping[str, str],
        send: Sequence[int] = (),
        receive: Sequence[int] = (),
    ) -> None:
        """Announces a collective and waits until all its ranks have announced theirs.

        Raises:
            CollectiveError: They differ, or one has not come within the limit; the message says who, where and what.
        """
        group = purpose, ranks
        number = self._numbers[group]
        self._numbers[group] += 1
        mine = Announcement(
            collective,
            purpose,
            ranks,
            number,
            self._watch.where,
            alike,
            tuple(map(int, send)),
            tuple(map(int, receive)),
        )
        with self._watch.waits(f"other ranks to come to {mine.collective} of {purpose}", mine.where):
            found = self._exchange(mine)
        if complaint := _difference(found) or _mismatch(found):
            raise self._error(mine, complaint)
        self._forget(group, mine.key)

    def _exchange(self, mine: Announcement) -> dict[int, Announcement]:
        """Every rank's announcement, or those of ranks that wait for each other in different places."""
        me = self._watch.rank
        keys = {rank: f"{mine.key}/{rank}" for rank in mine.ranks}
        self._store.set(keys[me], mine.dump())
        self._store.set(f"last/{me}", mine.dump())
        deadline, pause = time.monotonic() + self._watch.limit, _SHORTEST
        while True:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if not missing:
                return {rank: Announcement.load(self._store.get(key)) for rank, key in keys.items()}
            if pause >= _LONGEST and (elsewhere := self._waiting_for_me(missing, keys)):
                return {me: mine, **elsewhere}
            if time.monotonic() > deadline:
                raise self._error(mine, self._absent(missing))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _waiting_for_me(self, missing: list[int], keys: dict[int, str]) -> dict[int, Announcement]:
        """Missing ranks that wait for this one in another place: neither can ever go on."""
        found = {}
        for rank in missing:
            last = self._last(rank)
            if last is None or self._watch.rank not in last.ranks or self._store.check([keys[rank]]):
                continue
            if self._numbers[last.purpose, last.ranks] <= last.number:
                found[rank] = last
        return found

    def _last(self, rank: int) -> Announcement | None:
        key = f"last/{rank}"
        return Announcement.load(self._store.get(key)) if self._store.check([key]) else None

    def _absent(self, missing: list[int]) -> str:
        lines = []
        for rank in missing:
            last = self._last(rank)
            lines.append(f"rank {rank} has not come in {self._watch.limit:.0f} s; its last was {last or 'nothing'}")
        return "; ".join(lines)

    def _error(self, mine: Announcement, complaint: str) -> CollectiveError:
        rank = self._watch.rank
        message = f"check_collectives, rank {rank}, before {mine}: {complaint}"
        return CollectiveError(message, rank, f"{mine.collective} of {mine.purpose}", mine.where)

    def _forget(self, group: tuple[str, tuple[int, ...]], key: str) -> None:
        """Deletes an announcement that all have read: they have all come to the one after it."""
        old = self._old[group]
        old.append(f"{key}/{self._watch.rank}")
        if len(old) > 2:
            self._store.delete_key(old.pop(0))


def _difference(found: dict[int, Announcement]) -> str:
    """Says which ranks part from most (or from the lowest, where there is no most), and in what."""
    compared = {rank: one.compared() for rank, one in found.items()}
    texts = {rank: json.dumps(values, sort_keys=True) for rank, values in compared.items()}
    usual = Counter(texts[rank] for rank in sorted(texts)).most_common(1)[0][0]
    others = [rank for rank in sorted(texts) if texts[rank] == usual]
    odd = [rank for rank in sorted(texts) if texts[rank] != usual]
    complaints = []
    for rank in odd:
        ours, theirs = compared[rank], compared[others[0]]
        names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
        what = ", ".join(f"{name} ({ours.get(name)} there, {theirs.get(name)} here)" for name in names)
        complaints.append(f"rank {rank} is at {found[rank]}, and differs in {what.replace('_', '-')}")
    if not odd:
        return ""
    return f"{_named(others)} at {found[others[0]]}; {'; '.join(complaints)}"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _mismatch(found: dict[int, Announcement]) -> str:
    """Says which rank sends more or less than the other expects."""
    for i, source in found.items():
        for j, target in found.items():
            if not source.send:
                continue
            sent, expected = source.send[source.ranks.index(j)], target.receive[target.ranks.index(i)]
            if sent != expected:
                return f"rank {i} sends {sent} rows to rank {j}, which expects {expected}"
    return ""


class CheckedCommunicator(ByMessages):
    """A communicator whose every collective is announced first.

    Args:
        comm: The real one.
        purpose: What travels on it.
        ranks: Its ranks, of the world.
        check: The engine's.
    """

    def __init__(self, comm: Communicator, purpose: str, ranks: tuple[int, ...], check: Check) -> None:
        self.size, self.rank = comm.size, comm.rank
        self._comm, self._purpose, self._ranks, self._check = comm, purpose, ranks, check

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the real one's."""
        self._check("all-gather", self._purpose, self._ranks, _like(tensor, tensor.shape))
        return self._comm.all_gather(tensor)

    def all_to_all(self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """As the real one's."""
        return self.start_all_to_all(tensor, send, receive).wait()

    def start_all_to_all(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], picked: Picked | None = None
    ) -> Pending:
        """As the real one's."""
        self._check("all-to-all", self._purpose, self._ranks, _like(tensor, tensor.shape[1:]), send, receive)
        return self._comm.start_all_to_all(tensor, send, receive, picked)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the real one's."""
        self._check("all-reduce", self._purpose, self._ranks, _like(tensor, tensor.shape))
        return self._comm.all_reduce(tensor)

    def to_host(self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        """As the real one's."""
        return self._comm.to_host(tensor, meanwhile)

    def agree(self, what: str, parts: Mapping[str, Any]) -> None:
        """Compares ``parts`` over the ranks."""
        self._check(what, self._purpose, self._ranks, {name: str(part) for name, part in parts.items()})


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> dict[str, str]:
    return {"shape": str(list(shape)), "dtype": str(tensor.dtype)}
