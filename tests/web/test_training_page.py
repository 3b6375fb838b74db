"""The page of one training: curves, lanes, logs, its spec. In a real browser, over a real control plane."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from playwright.sync_api import Route, expect

from muster import DistributedTraining
from muster.server.auth import Tokens
from tests.fleet import PROGRAMS, eventually, free_port
from tests.plane import Plane, fresh
from tests.web.pages import Visitor

STEPPER = str(PROGRAMS / "stepper.py")
ONE = "#/trainings/default/demo"
METRICS = "/trainings/demo/metrics"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    made.port = free_port()
    made.serve("--listen", f"127.0.0.1:{made.port}")
    yield made
    made.close()


def stepping(plane: Plane, name: str = "demo", **more: Any) -> DistributedTraining:
    given: dict[str, Any] = {"script": STEPPER, "args": ["0.02"], "world": (2, 2, 4), "spares": 1}
    training = plane.train(name, **(given | more))
    training.wait_until_target_world(timeout=60)
    return training


def measured(now: float, workers: list[str]) -> dict[str, Any]:
    """As the control plane tells it: a loss that falls, and a world that loses a worker for a while."""
    times = [now - 600 + at for at in range(600)]
    world = [[None, time, 1 if 200 < at < 230 else 2] for at, time in enumerate(times)]
    series = {
        "loss": [[at, time, 2.0 / (1 + at / 50)] for at, time in enumerate(times)],
        "steps_per_second": [[at, time, 9.5 + at % 3] for at, time in enumerate(times)],
        "world_size": world,
        "step": [[at, time, at] for at, time in enumerate(times)],
        "lr": [],
    }
    use = [
        {
            "name": name,
            "cpuPercent": 93.1,
            "memoryBytes": 3 << 29,
            "gpuPercent": None,
            "gpuMemoryBytes": None,
            "at": now,
        }
        for name in workers
    ]
    return {"series": [{"name": name, "points": points} for name, points in series.items()], "workers": use}


def test_curves_and_the_use_of_each_worker_are_shown(plane: Plane, visitor: Visitor) -> None:
    stepping(plane)
    visitor.answer(METRICS, measured(time.time(), ["demo-0", "demo-1", "demo-2"]))
    visitor.sign_in(plane.url, plane.api_token, ONE)
    curves = visitor.card("Curves")
    loss = curves.get_by_role("slider", name="loss over time")
    expect(loss).to_have_attribute("aria-valuetext", re.compile("^0.1541 at "))
    for name in ("steps/s", "world size"):
        expect(curves.get_by_role("slider", name=f"{name} over time")).to_be_visible()
    expect(curves.get_by_role("slider")).to_have_count(3)  # step is what they are drawn over, and lr has no value
    loss.focus()
    visitor.page.keyboard.press("Home")
    expect(loss).to_have_attribute("aria-valuetext", re.compile("^2 at "))
    visitor.page.keyboard.press("ArrowRight")
    expect(loss).to_have_attribute("aria-valuenow", "1")
    curves.get_by_text("loss: 600 values").click()
    expect(curves.get_by_role("table").get_by_role("row")).to_have_count(21)
    use = visitor.card("Use of workers")
    expect(use.get_by_role("row").nth(1)).to_contain_text("93 %")
    expect(use.get_by_role("row").nth(1)).to_contain_text("1.5 GiB")
    expect(use.get_by_role("row").filter(has_text="spare")).to_have_count(1)
    visitor.picture("curves")
    assert visitor.faults() == []


def test_lanes_tell_of_a_loss_its_downtime_and_the_spare_that_steps_in(plane: Plane, visitor: Visitor) -> None:
    training = stepping(plane)
    seated = {rank.rank: rank.worker for rank in fresh(training).ranks}
    (spare,) = {"demo-0", "demo-1", "demo-2"} - set(seated.values())
    visitor.sign_in(plane.url, plane.api_token, ONE)
    lanes = visitor.card("Workers over time")
    told = lanes.locator("svg title")
    expect(told.filter(has_text=f"{spare}: a spare")).to_have_count(1)
    expect(told.filter(has_text=f"{seated[1]}: rank 1")).to_have_count(1)
    plane.kill_worker(seated[1])
    expect(told.filter(has_text=re.compile(f"{spare}: rank 1, .* still there"))).to_have_count(1)
    expect(told.filter(has_text=re.compile(f"{seated[1]}: trained, .* lost: "))).to_have_count(1)
    expect(
        told.filter(has_text=re.compile(r"Nobody trained for \d+(\.\d+)? m?s from \d\d:\d\d:\d\d\.\d{3}"))
    ).to_have_count(1)
    lanes.get_by_text("Rounds: 2").click()
    row = lanes.get_by_role("row").nth(1)
    expect(row).to_contain_text(re.compile(rf"\d m?s.*{spare} takes rank 1"))
    visitor.picture("lanes")
    assert visitor.faults() == []


def test_of_a_long_journal_the_newest_entries_are_loaded_and_older_ones_on_demand(
    plane: Plane, visitor: Visitor
) -> None:
    training = stepping(plane, spares=0)
    newest = training.events()[-1].id  # what is written from now on has to be newer than all that is shown

    def journal(route: Route) -> None:
        asked = {name: int(values[0]) for name, values in parse_qs(urlsplit(route.request.url).query).items()}
        before = asked.get("before", newest + 1)
        oldest = newest - 899
        first = max(oldest, before - asked["limit"], asked["after"] + 1 if asked.get("after") else oldest)
        about = {
            "type": "Normal",
            "actor": "muster",
            "uid": training.training.uid,
            "data": {},
            "at": "2026-01-31T12:00:00.054Z",
        }
        items = [
            about | {"id": number, "reason": "TargetChanged", "message": f"entry {number - oldest + 1}"}
            for number in range(first, before)
        ]
        route.fulfill(json={"items": items})

    visitor.page.route(lambda url: urlsplit(url).path.endswith("/demo/events"), journal)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    card = visitor.card("Timeline")
    expect(card.get_by_role("listitem").first).to_contain_text(re.compile(r"\d\d:00:00\.054.*entry 900"))
    expect(card.get_by_role("listitem")).to_have_count(60)
    asked = [request.url for request in visitor.requests if "/demo/events" in request.url]
    assert asked[0].endswith("/events?after=0&limit=200")
    assert all(url.endswith("&limit=200") for url in asked), "once, and again for each connection that was lost"
    expect(visitor.card("Workers over time")).to_contain_text("From the newest 200 entries")
    card.get_by_role("button", name="Show older").click()
    expect(card.get_by_role("listitem")).to_have_count(200)
    card.get_by_role("button", name="Show older").click()
    expect(card.get_by_role("listitem").last).to_contain_text("entry 1")
    expect(card.get_by_role("listitem")).to_have_count(900)
    expect(card.get_by_role("button", name="Show older")).to_have_count(0)
    training.scale(3)  # what is written from now on comes by itself
    expect(card.get_by_role("listitem").filter(has_text="instead of 2")).to_have_count(1)


def test_a_log_is_searched_narrowed_and_taken_away(plane: Plane, visitor: Visitor) -> None:
    training = stepping(plane, args=["0.01"])
    plane.kill_worker(next(rank.worker for rank in fresh(training).ranks if rank.rank == 1))
    eventually(lambda: fresh(training).training.status.round == 1, "another round")
    visitor.sign_in(plane.url, plane.api_token, ONE)
    card = visitor.card("Log")
    card.get_by_text("begins round 1").first.wait_for()
    expect(card.locator(".round-mark").filter(has_text="Round 1")).to_have_count(1)
    card.get_by_label("Round", exact=True).fill("0")
    expect(card.get_by_role("log")).to_contain_text("step ")
    expect(card.locator(".round-mark")).to_have_text(["Round 0"])
    card.get_by_label("Rank", exact=True).fill("1")
    expect(card.get_by_role("log")).not_to_contain_text("[0]")
    card.get_by_role("searchbox").fill("BEGINS round")
    expect(card.get_by_role("status")).to_contain_text("1 line with “BEGINS round”")
    expect(card.locator("mark")).to_have_text(["begins round"])
    card.get_by_label("Round", exact=True).fill("")
    card.get_by_label("Rank", exact=True).fill("")
    expect(card.get_by_role("status")).to_contain_text("4 lines with")
    visitor.picture("search")
    assert visitor.faults() == []
    with visitor.page.expect_download() as taking:
        card.get_by_role("button", name="Download").click()
    saved = Path(taking.value.path()).read_text().splitlines()
    assert taking.value.suggested_filename == "demo.log"
    assert len(saved) == 4 and all("begins round" in line for line in saved)
    card.get_by_label("Times").check()
    expect(card.get_by_role("log")).to_contain_text(
        re.compile(r"\d\d:\d\d:\d\d\.\d{3} \[\d\] rank \d of 2 begins round")
    )
    with visitor.page.expect_download() as taking:
        card.get_by_role("button", name="Download").click()
    dated = Path(taking.value.path()).read_text().splitlines()
    assert len(dated) == 4 and all(re.match(r"\d{4}-\d\d-\d\dT[0-9:]{8}\.\d{3}Z \[\d\] ", line) for line in dated)
    card.get_by_role("searchbox").fill("")
    expect(card.get_by_role("log")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d\.\d{3} \[\d\] step"))
    lines = [line for block in card.locator("pre").all_inner_texts() for line in block.splitlines()]
    assert len(lines) > 4 and all(re.match(r"\d\d:\d\d:\d\d\.\d{3} \[\d\] ", line) for line in lines)
    card.get_by_role("log").scroll_into_view_if_needed()
    visitor.picture("times")
    assert visitor.faults() == []
    card.get_by_label("Times").uncheck()
    expect(card.get_by_role("log")).not_to_contain_text(re.compile(r"\d\d:\d\d:\d\d\.\d{3} \["))


def test_the_spec_is_read_copied_and_run_again_under_another_name(plane: Plane, visitor: Visitor) -> None:
    stepping(plane, env={"COLOUR": "no", "RATE": ".5", "KEY": "hunter2"}, secret_env=["KEY"], labels={"team": "vision"})
    visitor.sign_in(plane.url, plane.api_token, ONE)
    page = visitor.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.button("Spec").click()
    dialog = page.get_by_role("dialog")
    visitor.picture("spec")
    assert visitor.faults() == []
    dialog.get_by_role("button", name="Copy").click()
    expect(dialog).to_contain_text("Copied.")
    copied = yaml.safe_load(page.evaluate("navigator.clipboard.readText()"))
    assert copied["metadata"] == {"name": "demo", "namespace": "default", "labels": {"team": "vision"}}
    assert copied["spec"]["worldSize"] == {"min": 2, "target": 2, "max": 4}
    assert copied["spec"]["args"] == ["0.02"]
    assert (copied["spec"]["env"]["COLOUR"], copied["spec"]["env"]["RATE"]) == ("no", ".5")
    assert "hunter2" not in page.content()
    page.keyboard.press("Escape")
    visitor.button("Run again").click()
    expect(dialog.get_by_label("Name")).to_have_value("demo-2")
    dialog.get_by_label("Name").fill("demo-b")
    dialog.get_by_label("KEY").fill("hunter3")
    visitor.picture("run-again")
    assert visitor.faults() == []
    dialog.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="demo-b").wait_for()
    again = plane.client.get("demo-b").training
    first = plane.client.get("demo").training
    assert again.spec.args == first.spec.args and again.metadata.labels == {"team": "vision"}
    assert again.spec.secret_env == ("KEY",) and again.spec.cancel is None


def test_a_viewer_reads_the_spec_and_cannot_run_it_again(plane: Plane, visitor: Visitor) -> None:
    stepping(plane)
    visitor.sign_in(plane.url, Tokens(plane.home).create("vera", "viewer"), ONE)
    expect(visitor.button("Spec")).to_be_visible()
    expect(visitor.button("Run again")).to_have_count(0)


def test_all_of_an_exception_is_on_the_page_and_its_first_line_in_the_list(plane: Plane, visitor: Visitor) -> None:
    failed = plane.train("sweep", script=STEPPER, args=["0.01", "5", "3"], world=(1, 1, 1), max_restarts=0)
    visitor.sign_in(plane.url, plane.api_token)
    row = visitor.page.get_by_role("row").filter(has_text="sweep")
    row.get_by_text("failed", exact=True).wait_for()
    told = fresh(failed).training.status.outcome
    assert told is not None
    first, *more = told.message.strip().splitlines()
    reason = row.locator(".at-reason")
    expect(reason).to_have_text(first.strip())
    expect(reason).to_have_attribute("title", told.message.strip())
    visitor.go("#/trainings/default/sweep")
    visitor.see("sweep failed")
    for line in filter(None, map(str.strip, more)):
        expect(visitor.card("How it ended")).to_contain_text(line)


def test_what_happens_to_any_training_is_among_the_events(plane: Plane, visitor: Visitor) -> None:
    visitor.sign_in(plane.url, plane.api_token, "#/events")
    visitor.see("Nothing has happened yet")
    for name in ("one", "two"):
        stepping(plane, name, world=(1, 1, 1), spares=0)
    events = visitor.card("Events of all trainings")
    for name in ("one", "two"):
        expect(
            events.get_by_role("listitem").filter(has=visitor.page.get_by_role("link", name=name)).first
        ).to_be_visible()
    visitor.picture("events")
    assert visitor.faults() == []
    visitor.page.get_by_role("searchbox").fill("two round begins")
    expect(events.get_by_role("listitem")).to_have_count(1)
    events.get_by_role("link", name="two").press("Enter")
    visitor.see("two is ready")


def test_trainings_are_sorted_by_click_and_key_and_stay_so(plane: Plane, visitor: Visitor) -> None:
    for name in ("b", "a", "c"):
        stepping(plane, name, world=(1, 1, 1), spares=0)
    visitor.sign_in(plane.url, plane.api_token)
    page = visitor.page
    names = page.locator(".rows .at-training a")
    expect(names).to_have_text(["c", "a", "b"])  # the newest first
    expect(page.get_by_role("columnheader", name="Age")).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("button", name="Training", exact=True).click()
    expect(names).to_have_text(["a", "b", "c"])
    page.keyboard.press("Enter")
    expect(names).to_have_text(["c", "b", "a"])
    expect(page.get_by_role("columnheader", name="Training")).to_have_attribute("aria-sort", "descending")
    expect(page.get_by_role("columnheader", name="Age")).to_have_attribute("aria-sort", "none")
    page.reload()
    expect(names).to_have_text(["c", "b", "a"])
    page.set_viewport_size({"width": 400, "height": 860})
    page.get_by_label("Order").select_option("Age")
    expect(names).to_have_text(["c", "a", "b"])
    visitor.picture("sorted")
    assert visitor.faults() == []


LABELS = """import os, sys, time
print("begins", flush=True)
def loss(label):
    raise ValueError(f"label {label} is out of range")
if os.environ["RANK"] == "1":
    try:
        loss(7)
    finally:
        for line in range(300):
            print("cleaning", line)
        sys.stdout.flush()
        import atexit
        atexit.register(lambda: [print("after", line, file=sys.stderr) for line in range(300)])
time.sleep(600)
"""


def test_a_failed_training_opens_its_log_at_the_traceback_that_caused_it(plane: Plane, visitor: Visitor) -> None:
    script = plane.folder / "labels.py"
    script.write_text(LABELS)
    training = plane.train("demo", script=str(script), world=(2, 2, 2), max_restarts=0)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    eventually(lambda: fresh(training).is_terminal, "the end", 60)
    page = visitor.page
    expect(page.locator("p.why")).to_contain_text("ValueError: label 7 is out of range at labels.py:4 (rank 1)")
    log = visitor.card("Log")
    for _ in range(2):  # while the page is open, and after it was opened again
        expect(log.get_by_label("Rank")).to_have_value("1")
        expect(log.get_by_label("Round")).to_have_value("0")
        mark, marks = log.locator("mark").first, log.locator("mark")  # two: lines are drawn in blocks
        expect(mark).to_contain_text("Traceback (most recent call last)")
        expect(marks.last).to_contain_text("ValueError: label 7 is out of range")
        expect(marks.filter(has_text="after 0")).to_have_count(0)
        box = page.get_by_role("log", name="Log", exact=True)
        eventually(functools.partial(is_inside, mark, box), "the traceback in sight", 30)
        page.reload()
        page.get_by_role("navigation", name="Views").wait_for()
    assert visitor.faults() == []


def is_inside(part: Any, box: Any) -> bool:
    script = """([part, box]) => {
        const [inner, outer] = [part, box].map((one) => one.getBoundingClientRect());
        return inner.top >= outer.top - 1 && inner.top < outer.bottom - 10;
    }"""
    return bool(part.page.evaluate(script, [part.element_handle(), box.element_handle()]))


def test_a_spare_that_still_imports_is_shown_as_warming(plane: Plane, visitor: Visitor) -> None:
    gate = plane.folder / "gate"
    module = f"import os, time\nwhile os.path.exists({str(gate)!r}):\n    time.sleep(0.05)\n"
    (plane.folder / "slow_to_import.py").write_text(module)
    env = {"PYTHONPATH": str(plane.folder)}
    training = stepping(plane, spares=1, preload=["slow_to_import"], env=env)
    eventually(lambda: fresh(training).training.status.spares.ready == 1, "a spare", 60)
    gate.touch()
    [spare] = [worker.name for worker in training.training.status.workers if worker.role == "spare"]
    plane.kill_worker(spare)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    visitor.page.get_by_role("img", name="warming: importing its modules").wait_for()
    gate.unlink()
    visitor.page.get_by_role("img", name="A spare is ready").wait_for()
    assert visitor.faults() == []
