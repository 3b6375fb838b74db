"""Names of modules come from users' processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.types.modules import LONGEST, MAX_BYTES, MAX_NAMES, joined

NAMES = st.from_regex(r"[a-z_]{1,4}(\.[a-z]{1,4}){0,3}", fullmatch=True) | st.text()


@given(st.lists(NAMES), st.lists(NAMES))
def test_what_is_known_stays_in_front_and_no_name_comes_twice(known: list[str], more: list[str]) -> None:
    first = joined(known)
    both = joined(first, more)
    assert both[: len(first)] == first and len(set(both)) == len(both)
    assert joined(both, known, more) == both
    assert all(name.isascii() and name.replace(".", "").isidentifier() for name in both)


def test_names_are_checked_and_bounded() -> None:
    assert joined(["a.b", "os.path", "muster.node", "__main__", "a b", "../x", "1", "", "a..b", "ä", "a\n"]) == ("a.b",)
    assert joined(["x" * (LONGEST + 1)]) == ()
    many = joined(f"m{number}" for number in range(2 * MAX_NAMES))
    assert len(many) == MAX_NAMES
    long = joined(f"{'m' * 190}{number}" for number in range(MAX_NAMES))
    assert sum(map(len, long)) < MAX_BYTES and len(long) > 300
