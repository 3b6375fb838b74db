"""When a member may believe that its coordinator is dead."""

from __future__ import annotations

import pytest

from muster.core.member.verdict import Contact, Listener, is_dead

OURS, RESTARTED, SOMEBODYS = Listener(1000, 1), Listener(1000, 2), Listener(1001, 3)
NEAR = Contact(near=True, before=OURS)


@pytest.mark.parametrize(
    ("what", "attempt", "dead"),
    [
        ("it had proved itself and closed", Contact(proved=True, closed=True), True),
        ("it had proved itself, and has given us up", Contact(proved=True, closed=True, turned_away=True), False),
        ("it has proved itself and says nothing more", Contact(proved=True), False),
        ("somebody on the way says what he likes", Contact(another=True, before=OURS), False),
        ("somebody on the way closes", Contact(closed=True, before=OURS), False),
        ("somebody else speaks on this machine", NEAR._replace(another=True, now=RESTARTED), True),
        ("nobody listens any more", NEAR._replace(closed=True, now=None), True),
        ("it is stopped", NEAR._replace(now=OURS), False),
        ("it has no room, and closes", NEAR._replace(closed=True, now=OURS), False),
        ("it has no room, and says so", NEAR._replace(turned_away=True, now=OURS), False),
        ("it was started again and has no room", NEAR._replace(turned_away=True, now=RESTARTED), False),
        ("somebody else says that he has no room", NEAR._replace(turned_away=True, now=SOMEBODYS), True),
        ("somebody else says nothing", NEAR._replace(now=SOMEBODYS), True),
        ("somebody else closes", NEAR._replace(closed=True, now=SOMEBODYS), True),
        ("it was started again and stands still", NEAR._replace(now=RESTARTED), True),
        ("whoever listens cannot be known", NEAR._replace(closed=True, known=False), False),
        ("it never proved itself here", Contact(near=True, closed=True, now=SOMEBODYS), False),
    ],
)
def test_it_is_dead_only_if_that_is_certain(what: str, attempt: Contact, dead: bool) -> None:
    assert is_dead(attempt) is dead, what
