"""The groups of a rank, and their creation by all ranks of the world or by their members alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import simparallel.comm.call_header as h
from simparallel.base.checks import is_integer
from simparallel.comm.group import Group, Medium
from simparallel.comm.mailbox import Mailbox
from simparallel.comm.p2p import Named, Receive
from simparallel.comm.plan import Settings
from simparallel.errors import CollectiveMismatchError, CommError, InputError

GROUP_TAG = -(2**62)  # used by no other message


class GroupRegistry:
    """The groups of one rank.

    Args:
        mailbox: the rank's messages.
        medium: how payloads travel.

    Attributes:
        world: the group of all ranks.
        made: all groups, the world first.
    """

    def __init__(self, mailbox: Mailbox, medium: Medium) -> None:
        self._mailbox, self._medium = mailbox, medium
        self.rank, self.world_size = mailbox.rank, mailbox.world_size
        self.world = Group(mailbox, medium, 0, tuple(range(self.world_size)))
        self.made = [self.world]
        self._num_groups = 1  # groups created by all ranks, the world included
        self._num_local = 0  # this rank's slots taken by groups that their members created alone
        self._of_node: Group | None = None

    def new(self, ranks: Sequence[int], purpose: str, use_local_synchronization: bool) -> Group:
        """Create a group, as `Communicator.new_group`."""
        members = tuple(ranks)
        outside = [rank for rank in members if not is_integer(rank) or not 0 <= rank < self.world_size]
        if not members or outside or len(set(members)) != len(members):
            raise InputError(
                f"new_group: ranks={members} must be at least one rank of 0 … {self.world_size - 1}, each once."
            )
        members = tuple(int(rank) for rank in members)  # NumPy integers have another repr
        if self._mailbox.recorder:
            self._mailbox.recorder.cluster.check_group(members)
        if use_local_synchronization:
            return self._local_group(members, purpose)
        number = self._num_groups
        most = self._mailbox.transport.segment.map.max_world_groups
        if number == most:
            raise CommError(
                f"new_group: a world of {self.world_size} ranks has at most {most} groups, and all are taken. Keep and "
                "reuse the groups; sharded ops create one for each group of ranks that their strategies and Layouts "
                "name, so fewer device matrices need fewer. A new run starts without groups."
            )
        # Reserves its memory before any member uses it.
        group = Group(self._mailbox, self._medium, number, members)
        self._announce(self.world, members, purpose)
        self._num_groups += 1
        self.made.append(group)
        return group

    def _announce(self, group: Group, members: tuple[int, ...], purpose: str) -> None:
        """Run a collective in which all ranks of `group` compare `members`, those of the group that they create."""
        # A plan of its own for each list of members: the header has them, and all ranks compare it.
        key, header = ("new_group", members, purpose), h.encode("new_group", shape=members)
        plan = group.direct.add_plan(key, header, Settings(), purpose=purpose)
        # No other call uses it, and it has bytes for each member of the group.
        del group.direct.plans[key]
        group.run(plan, None)

    def _local_group(self, members: tuple[int, ...], purpose: str) -> Group:
        """Create a group by its members alone: the lowest rank collects their lists and sends the decision to all.

        Each rank owns some slots for such groups. A new group takes a slot of the member that has used the fewest. In a
        folded dry run, these are the members that run.
        """
        if self.rank not in members:
            raise InputError(
                f"new_group: rank {self.rank} is not one of ranks={members}; with use_local_synchronization only the "
                "members may call it."
            )
        control, size = self._mailbox.transport.segment.map, self.world_size
        running = control.running(members)
        call = f"new_group({list(members)}, use_local_synchronization=True)"
        # [local slots used, number of members, members …], padded to the longest possible list, because a receiver
        # must know the size.
        words = np.full(size + 2, -1)
        words[: 2 + len(members)] = self._num_local, len(members), *members
        leader = min(running)
        if self.rank == leader:
            everyone = {rank: words if rank == leader else self._receive(rank, call) for rank in running}
            # Only the leader has seen all lists, so it decides for all, also whether to raise.
            words = self._decided(members, everyone)
            for rank in running:
                if rank != leader:
                    self._send(rank, words, call)
        else:
            self._send(leader, words, call)
            words = self._receive(leader, call)
        owner, used, *others = words.tolist()
        # A negative owner reports lists that differ, so every member raises the same error.
        if owner < 0:
            other, named = -1 - owner, [rank for rank in others if rank >= 0]
            raise CollectiveMismatchError(
                f"rank {self.rank}: {call}, but rank {other} names the ranks {named}, rank {leader} others. All "
                "members must name the same ranks in the same order.",
                group=call,
                seq=0,
                calls={self.rank: call, other: f"new_group({named})"},
            )
        if used == control.local_groups:
            raise CommError(
                f"{call}: all {used} groups that a rank can create without the others are taken. Keep and "
                "reuse the groups, or let every rank of the world call new_group."
            )
        # Only the owner counts its slot; the other members learn of it here and never need it again.
        self._num_local += owner == self.rank
        group = Group(
            self._mailbox,
            self._medium,
            # Slots of groups made by the whole world come first, then slots of rank 0, of rank 1, …
            control.max_world_groups + control.place(owner) * control.local_groups + used,
            members,
        )
        self.made.append(group)
        # Compare the lists again as the first collective of the new group.
        self._announce(group, members, purpose)
        return group

    def _decided(self, members: tuple[int, ...], everyone: dict[int, np.ndarray]) -> np.ndarray:
        """Return the slot's owner and number; or -1 - r and the list of the first rank r whose list differs."""
        named = {rank: tuple(words[2 : 2 + words[1]].tolist()) for rank, words in everyone.items()}
        result = np.full(self.world_size + 2, -1)
        wrong = next((rank for rank in everyone if named[rank] != members), None)
        if wrong is None:
            owner = min(everyone, key=lambda rank: everyone[rank][0])
            result[:2] = owner, everyone[owner][0]
        else:
            result[0] = -1 - wrong
            result[2 : 2 + len(named[wrong])] = named[wrong]
        return result

    def _send(self, rank: int, words: np.ndarray, call: str) -> None:
        self._mailbox.outbox(rank).send(words, GROUP_TAG, self._mailbox.transport.call_site()).wait()

    def _receive(self, rank: int, call: str) -> np.ndarray:
        """Return the words that `rank` has sent about the group `call`; see `_local_group` for what they are."""
        x, inbox = np.empty(self.world_size + 2, np.int64), self._mailbox.inbox(rank)
        named = Named("recv", x.dtype, x.shape, "src", rank, GROUP_TAG, self._mailbox.transport.call_site(), call)
        # A receive that fails is withdrawn, so that its buffer is not filled later.
        Receive([inbox], x, GROUP_TAG, named, 0, None).begin().wait_or_withdraw()
        return x

    def of_node(self, new: Callable[[Sequence[int]], Group]) -> Group:
        """Return the group of this rank's node, as `Communicator.node_group`; `new` creates the groups."""
        if self._of_node is None:
            recorder = self._mailbox.recorder
            nodes = recorder.cluster.nodes if recorder else (self.world.ranks,)
            # `new_group` is collective over the world, so every rank creates the groups of all nodes.
            groups = [self.world if node == self.world.ranks else new(node) for node in nodes]
            self._of_node = next(group for group in groups if self.rank in group.ranks)
        return self._of_node

    def release(self) -> None:
        """Return the staging memory of all groups to the arena."""
        for group in self.made:
            if group.rank is not None:
                group.views.staging.release()
