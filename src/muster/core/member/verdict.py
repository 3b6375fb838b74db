"""Is the coordinator dead, or only silent? From what one attempt to speak with it has shown.

Dead means that its process is gone, so nobody gives our ranks away and they may go on. It has to be certain: one that
lives behind a partition, is stopped, or has no room for us may start the next round without us.
"""

from __future__ import annotations

from typing import NamedTuple


class Listener(NamedTuple):
    """A listening socket of this machine, and whose it is."""

    uid: int
    inode: int


class Contact(NamedTuple):
    """A connection, as far as it has gone."""

    proved: bool = False  # whoever is there is the coordinator, or nothing can be proved for want of a token
    closed: bool = False  # by the other end
    near: bool = False  # the other end is on this machine
    another: bool = False  # whoever is there said what our coordinator never says
    turned_away: bool = False  # it said what our coordinator says to those whom it cannot let in
    before: Listener | None = None  # the socket behind which the coordinator last proved itself
    now: Listener | None = None  # the one that listens there now
    known: bool = True  # that can be known


def is_dead(contact: Contact) -> bool:
    if contact.proved:
        return contact.closed and not contact.turned_away  # one that has given us up says so, and goes on without us
    if not contact.near:
        return False  # whoever is between us can say anything
    if contact.another:
        return True  # two cannot listen at once
    if contact.before is None or not contact.known:
        return False
    if contact.now is None:
        return True
    if contact.now.inode == contact.before.inode:
        return False  # the very same: it is stopped, or has no room
    # It was started again, or somebody else took its place. A new one that turns us away may go on without us; one that
    # says nothing at all stands still, and gives nothing away.
    return contact.now.uid != contact.before.uid or not contact.turned_away
