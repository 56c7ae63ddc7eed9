"""Unsharding ahead of need: what the next layer will want travels while this one computes.

One thing at a time is on its way, and one is kept in the slots, or one of each layer. They are told apart by layer,
slot table, the parameters' versions and the pass, which change alike on all ranks: so every rank starts, uses and drops
the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hf_laer.comm.arena import Arena
from hf_laer.comm.base import Communicator
from hf_laer.shard.exchange import SlotTable, Unshard, beyond_own, is_local, start_unshard
from hf_laer.shard.home import Home
from hf_laer.shard.nodes import Nodes
from hf_laer.shard.pull import Pull, staged_bytes, start_pull
from hf_laer.shard.slots import SlotPool

# The slots that messages fill; pulls fill two other sets in turn, one of which the device uses meanwhile.
_OF_MESSAGES = 2
Stacks = dict[str, tuple[torch.Tensor, ...]]
# The forward pass or the backward that wants something, by kind and number.
Era = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Want:
    """What is wanted, and when it holds.

    Args:
        layer: The layer's name.
        homes: Its parameters by name.
        table: Per rank that shards them, the experts in its slots.
        dtype: Dtype of the slots.
        device: Their device.
        versions: Of the parameters: which ones, and their changes in place as autograd counts them.
        era: Who wants it; nothing is used in another era.
    """

    layer: str
    homes: dict[str, Home]
    table: SlotTable
    dtype: torch.dtype
    device: torch.device
    versions: tuple[tuple[int, int], ...]
    era: Era

    @cached_property
    def beyond(self) -> SlotTable | None:
        """What must be fetched, where own experts are used where they live."""
        return beyond_own(self.homes, self.table)

    @property
    def fetched(self) -> SlotTable:
        """What must be fetched: all, or what is not used where it lives."""
        return self.table if self.beyond is None else self.beyond

    @property
    def is_at_home(self) -> bool:
        """Whether no rank fetches anything; the same answer on all ranks."""
        return self.beyond is not None and not any(self.beyond)

    def serves(self, other: Want) -> bool:
        """Whether slots filled for this are the first ones of ``other``."""
        same = self.is_of(other)
        return same and all(row[: len(mine)] == mine for mine, row in zip(self.fetched, other.fetched, strict=True))

    def is_of(self, other: Want) -> bool:
        """Whether this is of the same parameters, as they are then, for the same use."""
        return (self.layer, self.dtype, self.device, self.versions, self.era) == (
            other.layer,
            other.dtype,
            other.device,
            other.versions,
            other.era,
        )


@dataclass
class Coming:
    """A layer's weights, begun; :meth:`Unsharder.finish` gives them.

    Args:
        want: What they are.
        parts: On their way, one after the other.
        filled: How many of the parts are in the slots.
        own: Name to this rank's own experts, where they are used where they live.
    """

    want: Want
    parts: list[Unshard | Pull]
    filled: int = 0
    own: dict[str, torch.Tensor] | None = None


class Kept(NamedTuple):
    """A layer's weights that are here still.

    Args:
        want: What they are.
        slots: Name to this rank's slots; none where nothing was fetched.
        own: Name to its own experts, where they stay from forward to backward.
    """

    want: Want
    slots: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor] | None


class Unsharder:
    """Brings experts to this rank's slots, ahead of time where the next need is known.

    Args:
        pool: Where the slots are; they hold until the next :meth:`finish`, of the same layer where it keeps them.

    Attributes:
        nodes: Of the ranks over which homes are sharded, where there are several.
        arena: Memory of these ranks that each can read, if they can.
        keeps: Whether each layer has slots of its own, which stay from its forward to its backward.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.nodes: Nodes | None = None
        self.arena: Arena | None = None
        self.keeps = False
        # Of the sets that pulls fill, the one in use; and when it came to be, in which era.
        self._side = 0
        self._since: tuple[Era, Any] | None = None
        self._ahead: Coming | None = None
        # By layer.
        self._kept: dict[str, Kept] = {}
        self._converted: tuple[Want, dict[str, torch.Tensor]] | None = None

    def expect(self, want: Want, comm: Communicator, forward: Era | None = None) -> None:
        """Starts on what is likely to be wanted next, if it must travel. Collective over ``comm``.

        For arguments see :meth:`begin`.
        """
        self.drop()
        if is_local(want.homes, want.fetched) or self._kept_of(want, forward) is not None:
            return
        self._ahead = Coming(want, [self._start(want, comm, ahead=True)])

    def convert(self, want: Want) -> None:
        """Converts a layer's own experts before its plan is known, where all plans use them where they live.

        The device has nothing else to do while the host plans.

        Args:
            want: Of any table.
        """
        self._converted = None
        homes = want.homes.values()
        whole_and_here = all(home.layout.is_whole and home.local.device == want.device for home in homes)
        if whole_and_here and any(home.local.dtype != want.dtype for home in homes):
            self._converted = want, _blocks(want)

    def begin(self, want: Want, comm: Communicator, forward: Era | None = None) -> Coming:
        """Starts what has not been started ahead and is not in the slots still. Collective over ``comm``.

        Args:
            want: What is needed now.
            comm: The ranks that shard the experts.
            forward: In a backward, the pass that it belongs to.
        """
        converted, self._converted = self._converted, None
        own = converted[1] if converted is not None and converted[0].is_of(want) else None
        kept = self._kept_of(want, forward)
        if kept is not None and kept.own is not None:
            own = kept.own
        if want.is_at_home:
            # Neither slots nor messages; what is in the slots stays there.
            self.drop()
            return Coming(want, [], own=own or _blocks(want))
        coming = Coming(want, []) if kept is not None else self._begun(want, comm)
        if want.beyond is not None:
            # Once what travels has set out, and not ahead of need: while tokens travel the device has little to do.
            coming.own = own or _own(coming)
        return coming

    def _begun(self, want: Want, comm: Communicator) -> Coming:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.want.serves(want):
            rest = tuple(row[len(mine) :] for mine, row in zip(ahead.want.fetched, want.fetched, strict=True))
            if any(rest):
                ahead.parts.append(self._start_rest(want, rest, comm, ahead))
            return Coming(want, ahead.parts, ahead.filled)
        _wait(ahead)
        return Coming(want, [self._start(want, comm)])

    def _start(self, want: Want, comm: Communicator, ahead: bool = False) -> Unshard | Pull:
        if self.arena is not None and self._pulls(want, self.arena):
            return self._pull(want, want.fetched, comm, self.arena, ahead)
        whole = want.beyond is not None
        return start_unshard(want.homes, want.fetched, comm, want.dtype, want.device, (), self.nodes, whole)

    def _start_rest(self, want: Want, table: SlotTable, comm: Communicator, ahead: Coming) -> Unshard | Pull:
        """What comes behind that which was sent ahead."""
        if isinstance(ahead.parts[0], Pull):
            return self._pull(want, table, comm, ahead.parts[0].arena, False)
        return start_unshard(want.homes, table, comm, want.dtype, want.device, ahead.want.fetched, self.nodes)

    def _pulls(self, want: Want, arena: Arena) -> bool:
        """Whether experts are read from memory; the same answer on all ranks."""
        slots, ranks = max(map(len, want.fetched)), len(want.fetched)
        return 0 < staged_bytes(want.homes, slots, ranks, want.dtype) <= arena.nbytes

    def _pull(self, want: Want, table: SlotTable, comm: Communicator, arena: Arena, ahead: bool) -> Pull:
        if self.keeps:
            # They are written to from here on.
            self._kept.pop(want.layer, None)
        keep = len(want.fetched[comm.rank]) - len(table[comm.rank])
        slots = self._room(want, comm.rank, keep, self._set(want, 1 - self._side))
        since = self._since
        # Without a mark of this era, or in a new buffer, they may have been in use until now.
        after = since[1] if ahead and since is not None and since[0] == want.era else arena.mark()
        return start_pull(want.homes, table, comm, arena, slots, after)

    def finish(self, coming: Coming) -> Stacks:
        """Name to stacks ``[S', D, …]``, together the slots of this rank; own experts apart where they live.

        As :func:`~hf_laer.shard.exchange.stacks_of` says it.
        """
        want, own = coming.want, coming.own if self.keeps else None
        if want.is_at_home:
            if own is not None:
                self._kept[want.layer] = Kept(want, {}, own)
            return {name: (block,) for name, block in (coming.own or _blocks(want)).items()}
        if not coming.parts:
            slots = self._kept[want.layer].slots
        else:
            slots = self._filled(coming)
            self._kept[want.layer] = Kept(want, slots, own)
        if self.arena is not None:
            self._since = want.era, self.arena.mark()
        if want.beyond is None:
            return {name: (stack,) for name, stack in slots.items()}
        mine = coming.own or _own(coming)
        return {name: (mine[name], slots[name]) if len(slots[name]) else (mine[name],) for name in want.homes}

    def settle(self, layer: str, era: Era) -> None:
        """Puts what was sent ahead for a layer into its slots, before its plan is known.

        The device has nothing else to do then, and the host is ahead of it.
        """
        ahead = self._ahead
        # What is pulled comes without the device's doing.
        if ahead is None or isinstance(ahead.parts[0], Pull):
            return
        if (ahead.want.layer, ahead.want.era) == (layer, era):
            self._filled(ahead)

    def drop(self) -> None:
        """Forgets what was started ahead, once it has arrived."""
        ahead, self._ahead = self._ahead, None
        _wait(ahead)

    def release(self, layer: str) -> None:
        """After a layer's backward, or if there is none: lets its own experts go. Slots stay for the next pass."""
        kept = self._kept.get(layer)
        if kept is not None and kept.own is not None:
            self._kept[layer] = kept._replace(own=None)
            if kept.want.is_at_home:
                del self._kept[layer]

    def _kept_of(self, want: Want, forward: Era | None) -> Kept | None:
        """What is here of it still, which is asked only in a backward.

        It may come from a recompute, from the forward of a pass's last layer, whose backward is the first, or from its
        own forward, if layers keep theirs. Elsewhere, and in another pass (an evaluation of averaged weights), a
        parameter may have been changed through ``.data``, which nothing counts.
        """
        kept = self._kept.get(want.layer)
        if kept is None or want.era[0] != "backward":
            return None
        if kept.want.era == forward:
            want = replace(want, era=kept.want.era)
        return kept if kept.want.serves(want) and want.serves(kept.want) else None

    def _set(self, want: Want, shared: int) -> int | str:
        """The set of slots for it."""
        return want.layer if self.keeps else shared

    def _filled(self, coming: Coming) -> dict[str, torch.Tensor]:
        # Nothing may keep the pool's buffers from being replaced by larger ones.
        self._kept.pop(coming.want.layer, None)
        if not self.keeps:
            self._kept.clear()
        rank, want, done = coming.parts[0].comm.rank, coming.want, coming.parts[: coming.filled]
        if isinstance(coming.parts[0], Pull):
            self._side = 1 - self._side
            slots = self._room(want, rank, len(want.fetched[rank]), self._set(want, self._side))
        else:
            keep = sum(len(part.table[rank]) for part in done)
            slots = self._room(want, rank, keep, self._set(want, _OF_MESSAGES))
        for part in coming.parts[coming.filled :]:
            part.fill(slots)
        coming.filled = len(coming.parts)
        return slots

    def _room(self, want: Want, rank: int, keep: int, which: int | str) -> dict[str, torch.Tensor]:
        """The pool's slots for what must be fetched; the first ``keep`` of them as they are."""
        count, kind = len(want.fetched[rank]), (want.dtype, want.device)
        shapes = {name: (count, *home.layout.shape[1:]) for name, home in want.homes.items()}
        if self.arena is not None and not all(self._pool.has(name, s, *kind, which) for name, s in shapes.items()):
            # The old buffer may be written to until now, and what is kept of it comes first.
            self.arena.join()
            self._since = None
        return {name: self._pool.take(name, shape, *kind, keep, which) for name, shape in shapes.items()}


def _wait(ahead: Coming | None) -> None:
    """Until it has arrived."""
    for part in ahead.parts[ahead.filled :] if ahead is not None else ():
        part.wait()


def _own(coming: Coming) -> dict[str, torch.Tensor]:
    """This rank's own experts, as they are wanted; from the device, if they came there to be sent."""
    first = coming.parts[0] if coming.parts else None
    if not isinstance(first, Unshard):
        return _blocks(coming.want)
    return {name: block.to(coming.want.dtype) for name, block in first.blocks.items()}


def _blocks(want: Want) -> dict[str, torch.Tensor]:
    kind = want.device, want.dtype
    return {name: home.local.to(*kind, non_blocking=True) for name, home in want.homes.items()}
