from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.output import write_table, yaml_of
from tests.cli.stand_in import a_training

_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_values)
def test_yaml_is_read_back_as_it_was(value: Any) -> None:
    yaml = importlib.import_module("yaml")

    assert yaml.safe_load(yaml_of(value)) == value


@pytest.mark.parametrize(
    "text", ["yes", "no", "on", "null", "1e3", "12", "0x1f", "2026-01-01", "a: b", "- a", "~", "", "=", "<<", "#"]
)
def test_texts_that_yaml_would_take_for_something_else_are_quoted(text: str) -> None:
    yaml = importlib.import_module("yaml")

    assert yaml.safe_load(yaml_of({"key": text, text: "value"})) == {"key": text, text: "value"}


def test_a_whole_training_survives_yaml() -> None:
    yaml = importlib.import_module("yaml")
    wire = a_training(rank_exits=()).to_wire()

    assert yaml.safe_load(yaml_of(wire)) == wire


def test_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(("NAME", "NOTE"), [("a-long-name", "x"), ("b", None), ("c", "two\nlines")])

    assert capsys.readouterr().out.splitlines() == [
        "NAME          NOTE",
        "a-long-name   x",
        "b             -",
        "c             two lines",
    ]
