from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from muster.cli import board, choosing
from muster.cli.board import Board
from muster.cli.choosing import Choice, Order
from muster.types.training import Training
from tests.cli.stand_in import a_training

NOW = datetime.now(UTC)
A, B, ENDED = a_training("a"), a_training("b"), a_training("c", phase="failed")
ALL = (A, B, ENDED)


def after(typed: str, choice: Choice | None = None, shown: tuple[Training, ...] = ALL) -> tuple[Choice, list[Order]]:
    choice, orders = choice or Choice(), []
    for key in choosing.keys(typed):
        choice, order = choosing.press(choice, key, shown)
        orders += [order] if order is not None else []
    return choice, orders


def test_arrows_and_letters_choose_and_stop_at_both_ends() -> None:
    for typed, uid in (
        ("j", A.uid),
        ("jj", B.uid),
        ("\x1b[B\x1b[B\x1b[A", A.uid),
        ("jjjjj", ENDED.uid),
        ("jkkk", A.uid),
    ):
        assert after(typed)[0].uid == uid
    assert after("k")[0].uid == ENDED.uid
    assert after("jk", shown=())[0] == Choice()


def test_plus_and_minus_scale_within_bounds() -> None:
    assert after("j+")[1] == [Order("scale", A, 3)]
    low, orders = after("j-")
    assert orders == [] and low.said == "a has 2 workers at least"
    assert after("jjj+")[0].said == "c has already ended: failed"


def test_cancelling_asks_first_and_any_other_key_is_a_no() -> None:
    asked, orders = after("jx")
    assert (asked.asks, asked.said, orders) == (True, "cancel a? y, or any other key", [])
    assert after("y", asked)[1] == [Order("cancel", A)]
    for key in ("n", "q", "x", "\x1b", "\n", "j"):
        left, orders = after(key, asked)
        assert (left.said, left.asks, left.quits, orders) == ("not cancelled", False, False, [])
    assert after("y", asked, shown=(B,))[1] == []  # it is gone, and nobody else is meant


def test_the_log_is_opened_and_left_and_q_quits_everywhere() -> None:
    opened, _ = after("jl")
    assert opened.log and opened.uid == A.uid
    assert not after("\x1b", opened)[0].quits and not after("\x1b", opened)[0].log
    assert after("q", opened)[0].quits and after("q")[0].quits and after("\x1b")[0].quits
    assert after("x", opened) == (opened, [])
    assert after("l")[0].said.startswith("choose a training first")


@given(st.text(st.sampled_from("jklehxyYn+-=q\x1b\n[AB"), max_size=30))
def test_nothing_is_cancelled_but_by_x_and_then_y(typed: str) -> None:
    _, orders = after(typed)
    if any(order.verb == "cancel" for order in orders):
        assert "xy" in typed.replace("Y", "y")


def test_the_chosen_row_is_marked_and_kept_in_sight() -> None:
    many = tuple(a_training(f"t{number:02}") for number in range(40))
    lines = board.lines(Board(many, chosen=many[35].uid), NOW, 80, 12)
    (marked,) = [line for line in lines if line and line[0].style == "reverse"]
    assert marked[0].text.startswith("t35") and len(lines) <= 12
    assert "enter log" in board.text_of(lines[1])


def test_what_has_ended_can_be_hidden() -> None:
    choice, _ = after("e")
    shown = Board(ALL, without_ended=choice.without_ended)
    assert [one.metadata.name for one in board.in_order(shown)] == ["a", "b"]
    assert after("ee")[0].without_ended is False


def test_the_end_of_a_log_fits_the_screen() -> None:
    lines = board.logged("a", [f"line {number} {'x' * 200}" for number in range(50)], 40, 10)
    texts = [board.text_of(line) for line in lines]
    assert len(texts) == 10 and all(len(text) <= 40 for text in texts)
    assert texts[-1].startswith("line 49") and "log of a" in texts[0]
