"""Tables of README.md and docs/benchmarks.md, and the results that they are made from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import report, table
from bench.report import Goal

MEASURED = {"date": "2026-01-02", "hardware": "2 cores", "backend": "gloo", "environment": "torch 2.13"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of bench/results, with one figure in `world.json`."""
    figure = report.compared("a loss", [0.1] * 49 + [2.5], {"torchrun": ["never: it ended"]}, "ms", Goal(p50=50))
    record = {"part": "worker", **asdict(figure)}
    (tmp_path / "world.json").write_text(json.dumps({"measured": MEASURED, "figures": [record]}))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    table.stored.cache_clear()
    yield tmp_path
    table.stored.cache_clear()


@pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_that_its_results_give(page: Path) -> None:
    assert table.filled(page.read_text()) == page.read_text(), "python -m bench.table"


def test_the_readme_has_six_to_eight_rows_and_one_value_in_each_cell() -> None:
    head, _, *rows = table.summary_table().splitlines()
    assert 6 <= len(rows) <= 8
    lines = [dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True)) for row in rows]
    assert "**no**" in [cells["goal met"] for cells in lines], "missed goals are shown"
    for cells in lines:
        assert float(cells["muster"].replace(",", "")) > 0
        assert cells["fastest peer"] in ("never", "not measured") or float(cells["fastest peer"].replace(",", "")) > 0


def test_a_table_has_a_row_for_each_system_between_its_marks(results: Path) -> None:
    page = "before\n<!-- bench: world worker -->\nold\n<!-- /bench -->\nafter\n"
    assert table.filled(page).splitlines() == [
        "before",
        "<!-- bench: world worker -->",
        "",
        "*Measured on 2026-01-02: 2 cores; gloo; torch 2.13.*",
        "",
        "| what was done | system | median | p99 | worst | unit | samples | goal | met | remark |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a loss | muster | 100 | 2,500 | 2,500 | ms | 50 | p50 ≤ 50 ms | **no** | – |",
        "| the same | torchrun | never | – | – | ms | 1 | – | – | it ended |",
        "",
        "<!-- /bench -->",
        "after",
    ]


def test_a_page_that_differs_from_its_results_is_reported(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = results / "page.md"
    page.write_text("<!-- bench: world -->\n<!-- /bench -->\n")
    monkeypatch.setattr(table, "PAGES", (page,))
    assert table.main("--check") == 1
    assert "page.md differs from bench/results" in capsys.readouterr().err
    assert table.main() == 0 and table.main("--check") == 0


@pytest.mark.parametrize(
    ("peers", "best"),
    [
        ({}, ("–", "not measured")),
        ({"a": {"p50": None}, "b": {"p50": None}}, ("all 2 peers", "never")),
        ({"a": {"p50": 4.0, "instead": ""}, "b": {"p50": 1.5, "instead": "never (1 of 3)"}}, ("b", "1.5")),
    ],
)
def test_the_best_peer_is_the_fastest_one_that_healed(peers: dict[str, Any], best: tuple[str, str]) -> None:
    assert table.best_peer(peers) == best


def test_the_figures_of_a_gpu_are_read_from_what_its_benchmark_prints() -> None:
    kills = [{"first step": 2.5, "lost": 3}, {"first step": 1.5, "lost": 0}, {"first step": 1.0, "lost": 0}]
    cost = {kind: {"share, wall": 0.05, "steps": 16.0} for kind in ("synced", "unsynced")}
    result = {"machine": {"state of a rank, GB": 12.0}, "kills": {"kills": kills}, "cost": cost}
    time, lost, *shares = table.gpu_figures(result, {"s": 2.0, "steps": 1, "%": 3})
    assert (time["value"], time["worst"], time["samples"], time["ok"]) == (1.5, 2.5, 3, True)
    assert (lost["value"], lost["worst"], lost["ok"]) == (0, 3, False), "the worst kill counts"
    assert [(share["value"], share["ok"]) for share in shares] == [(5.0, False)] * 2


def test_a_run_says_on_what_it_was_made() -> None:
    measured = report.machine()
    assert measured.keys() >= MEASURED.keys() and "cores" in measured["hardware"] and "torch" in measured["environment"]


def test_a_caption_without_a_backend_says_only_why(results: Path) -> None:
    measured = MEASURED | {"backend": "none: no process group is formed"}
    (results / "world.json").write_text(json.dumps({"measured": measured, "figures": []}))
    assert table.caption("world") == "*Measured on 2026-01-02: 2 cores; no process group is formed; torch 2.13.*\n\n"
