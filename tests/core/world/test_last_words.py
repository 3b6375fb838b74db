"""The cause of a rank's end is read from what it printed."""

# ruff: noqa: RUF005  lists of lines are read one part at a time

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import last_words
from tests.core.builders import an_exit

HEAD = "Traceback (most recent call last):"
OWN = '  File "/home/me/my_train.py", line 71, in step'
TORCH = '  File "/env/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in nll_loss'
TRACE = [HEAD, '  File "train.py", line 3, in <module>', "    main()"]


@pytest.mark.parametrize(
    ("lines", "exception", "place"),
    [
        ([*TRACE, "ValueError: no data"], "ValueError: no data", "train.py:3"),
        ([*TRACE, "ValueError: no data", "in any of", "these folders"], "ValueError: no data", "train.py:3"),
        ([*TRACE, "KeyError: 1", "", "During handling of it:", "", *TRACE, "OSError: 2"], "OSError: 2", "train.py:3"),
        ([*TRACE, "RuntimeError: x", "[W ProcessGroup.cpp:1] Warning: was not destroyed"], "RuntimeError: x", None),
        ([f"[rank3]: {line}" for line in [*TRACE, "ValueError: no data"]], "ValueError: no data", None),
        ([HEAD, OWN, "    loss(x)", TORCH, "    raise", "IndexError: 7"], "IndexError: 7", "my_train.py:71"),
        ([HEAD, TORCH, "    raise", "IndexError: 7"], "IndexError: 7", ""),
        (
            ['  File "/a/data.py", line 1', "    f(", "     ^", "SyntaxError: never closed"],
            "SyntaxError: never closed",
            "data.py:1",
        ),
        (
            [HEAD, OWN, "    next(loader)", TORCH, "ValueError: Caught ValueError in DataLoader worker process 0."]
            + [f"Original {HEAD}", TORCH, '  File "/home/me/data.py", line 5, in __getitem__', "ValueError: label 7"],
            "ValueError: label 7",
            "data.py:5",
        ),
        (
            [f"  + Exception Group {HEAD}", '  |   File "train.py", line 2, in <module>', "  | ExceptionGroup: two (1)"]
            + ["  +-+---------------- 1 ----------------", f"    | {HEAD}", '    |   File "train.py", line 9, in f']
            + ["    | ValueError: label 7", "    +------------------------------------"],
            "ValueError: label 7",
            "train.py:9",
        ),
        (
            [*TRACE, "ValueError: label 7", "Exception ignored in: <function Loader.__del__ at 0x7f>"]
            + [HEAD, '  File "/home/me/loader.py", line 4, in __del__', "AttributeError: gone"],
            "ValueError: label 7",
            "train.py:3",
        ),
        (["Exception in thread Thread-1 (run):", *TRACE, "ValueError: in a thread", "stopping"], "", ""),
        (["2026-01-01 INFO saved checkpoint 7"], "", ""),
        (['  File "train.py", line 3 in wait'], "", ""),
        (TRACE, "", ""),
        ([], "", ""),
    ],
)
def test_the_last_traceback_names_the_exception_and_the_place_in_user_code(
    lines: list[str], exception: str, place: str | None
) -> None:
    assert last_words.exception(lines) == (exception, "train.py:3" if place is None else place)


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (["loading", "the data is  not there", "", "---"], "the data is not there"),
        (["usage: train.py", "train.py: error: --x"], "train.py: error: --x"),
        (["", "   ", "***"], ""),
        ([], ""),
        (["x" * 5000], "x" * 300),
        (["ERROR:my:data folder is empty", "INFO:my:saving", "INFO:my:bye"], "ERROR:my:data folder is empty"),
        (["2026-01-01 10:00:00,1 [ERROR] no data", "2026-01-01 10:00:00,2 [INFO] bye"],)
        + ("2026-01-01 10:00:00,1 [ERROR] no data",),
        (["E0101 10:00:00.1 a.cc:3] no data", "I0101 10:00:00.2 a.cc:4] bye"], "E0101 10:00:00.1 a.cc:3] no data"),
        (["warming up", "INFO saved step 7"], ""),
        (["my INFORMATION is old"], "my INFORMATION is old"),
        (["no such level: set NCCL_DEBUG=INFO"], "no such level: set NCCL_DEBUG=INFO"),
    ],
)
def test_the_last_output_is_the_last_line_with_a_word(lines: list[str], line: str) -> None:
    assert last_words.last_output(lines) == line


@given(st.lists(st.text(max_size=400) | st.sampled_from([HEAD, OWN, TORCH, "ValueError: x"]), max_size=30))
def test_whatever_a_rank_writes_gives_short_lines(lines: list[str]) -> None:
    for text in (*last_words.exception(lines), last_words.last_output(lines)):
        assert len(text) <= last_words.LONGEST and len(text.splitlines()) <= 1


def test_an_exception_comes_first_then_its_place_then_the_rank() -> None:
    raised = an_exit(1, 1, "a", exception="ValueError: label 7", place="my_train.py:71", stderr_tail=("bye",))
    assert last_words.report(raised, "round 0") == "ValueError: label 7 at my_train.py:71 (rank 1); worker a, round 0"


def test_an_exit_code_is_the_cause_where_no_exception_ended_the_program() -> None:
    left = an_exit(0, 3, "a", stderr_tail=("no data", "see --help"))
    assert last_words.report(left, "round 1") == (
        "exited with code 3 (rank 0); last output: see --help; worker a, round 1"
    )
    logged = an_exit(0, 3, "a", stderr_tail=("INFO saved step 7",))
    assert last_words.report(logged, "round 1") == "exited with code 3 (rank 0); worker a, round 1"
    caught = an_exit(0, 3, "a", exception="ValueError: label 7", place="t.py:1", stderr_tail=("INFO stopping",))
    assert last_words.report(caught) == (
        "exited with code 3 (rank 0); last traceback: ValueError: label 7 at t.py:1; worker a"
    )


def test_a_signal_and_a_hang_are_named_before_any_output() -> None:
    killed = an_exit(0, 137, "a", signal="SIGKILL", stderr_tail=("step 3",), memory="no sign of memory pressure")
    assert last_words.report(killed) == (
        "Signal SIGKILL (rank 0); no sign of memory pressure; last output: step 3; worker a"
    )
    crashed = an_exit(0, 139, "a", signal="SIGSEGV", stack="train.py:3 in f")
    assert last_words.report(crashed, "round 0") == "Signal SIGSEGV at train.py:3 in f (rank 0); worker a, round 0"
    hung = an_exit(0, 134, "a", signal="SIGABRT", hung=True, stack="train.py:3 in f", stderr_tail=("x",))
    assert last_words.report(hung) == "HangDetected at train.py:3 in f (rank 0); worker a"
