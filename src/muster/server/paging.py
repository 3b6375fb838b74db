"""Which page comes next, and how does a client ask for it without learning what it may not see?

Only namespaces that the caller may see are looked at. Where the next page begins is sealed, and good for this caller,
these namespaces and this filter alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from muster.errors import InvalidRequest
from muster.ports import Filter, Page, Store, Stored
from muster.server.auth import Identity
from muster.server.sealing import NotSealedHere, PageSeal


def page(store: Store, seal: PageSeal, whose: Identity, which: Filter, limit: int, token: str) -> Page:
    """Of the namespace that the filter names, which the caller may read, or of all that the caller sees."""
    spaces = sorted(set(whose.namespaces)) if which.namespace is None and not whose.sees_all else [which.namespace]
    good_for = json.dumps([whose.name, spaces, which.namespace, which.phase, sorted(which.labels.items())])
    start, within = _opened(seal, token, good_for) if token else (0, "")
    found: list[Stored] = []
    for index, space in enumerate(spaces[start:], start):
        part = store.page(replace(which, namespace=space), limit=limit - len(found) or 1, token=within)
        if len(found) == limit:
            if not part.items:
                continue  # nothing there: perhaps in the next one
            return _page(store, found, seal.close(json.dumps([index, ""]), good_for))
        found += part.items
        within = ""
        if part.next:
            return _page(store, found, seal.close(json.dumps([index, part.next]), good_for))
    return _page(store, found, "")


def _page(store: Store, found: Sequence[Stored], token: str) -> Page:
    return Page(tuple(found), store.version, token)


def _opened(seal: PageSeal, token: str, good_for: str) -> tuple[int, str]:
    try:
        index, within = json.loads(seal.open(token, good_for))
    except NotSealedHere:
        raise InvalidRequest(
            "the continue token was not given by this server for this list", hint="start again from the first page"
        ) from None
    return int(index), str(within)
