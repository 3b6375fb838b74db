"""One line of what a rank printed says what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import last_words
from tests.core.builders import an_exit

TRACE = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()"]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ([*TRACE, "ValueError: no data"], "ValueError: no data"),
        ([*TRACE, "ValueError: no data", "in any of", "these folders"], "ValueError: no data"),
        ([*TRACE, "KeyError: 1", "", "During handling of it:", *TRACE, "OSError: two"], "OSError: two"),
        ([*TRACE, "RuntimeError: x", "[W ProcessGroup.cpp:1] Warning: was not destroyed"], "RuntimeError: x"),
        ([f"[rank3]: {line}" for line in [*TRACE, "ValueError: no data"]], "ValueError: no data"),
        (
            [*TRACE, '  File "/a/data.py", line 1', "    f(", "     ^", "SyntaxError: never closed"],
            "SyntaxError: never closed (data.py, line 1)",
        ),
        ([*TRACE, "SyntaxError: of its own"], "SyntaxError: of its own"),
        (["loading", "the data is  not there", "", "---"], "the data is not there"),
        (
            ["usage: train.py", "train.py: error: unrecognized arguments: --x"],
            "train.py: error: unrecognized arguments: --x",
        ),
        (['  File "train.py", line 3 in wait'], 'File "train.py", line 3 in wait'),
        (["", "   ", "***"], ""),
        ([], ""),
        (["x" * 5000], "x" * 300),
    ],
)
def test_the_line_that_says_it(lines: list[str], line: str) -> None:
    assert last_words.line(lines) == line


@given(st.lists(st.text(max_size=400), max_size=30))
def test_whatever_a_rank_writes_gives_one_short_line(lines: list[str]) -> None:
    line = last_words.line(lines)
    assert len(line) <= last_words.LONGEST and len(line.splitlines()) <= 1


def test_one_that_ended_by_itself_says_why_first_and_one_that_was_killed_last() -> None:
    ended = an_exit(0, 3, "a", stderr_tail=("no data",))
    assert last_words.told(ended, " in round 1") == "no data (Exit 3 in round 1)"
    killed = an_exit(0, 137, "a", signal="SIGKILL", stderr_tail=("step 3",), memory="no sign of memory pressure")
    assert last_words.told(killed) == "Signal SIGKILL; no sign of memory pressure; its last line: step 3"
    crashed = an_exit(0, 139, "a", signal="SIGSEGV", stack="train.py:3 in f")
    assert last_words.told(crashed, " in round 0") == "Signal SIGSEGV at train.py:3 in f in round 0"
    hung = an_exit(0, 134, "a", signal="SIGABRT", hung=True, stack="train.py:3 in f", stderr_tail=("x",))
    assert last_words.told(hung) == "HangDetected at train.py:3 in f"
