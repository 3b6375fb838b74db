"""The page of a training that failed or lost a worker shows nothing as well that is not. In a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from muster import TrainingFailed
from tests.fleet import PROGRAMS, eventually, family, free_port, kill_all
from tests.plane import Plane, fresh
from tests.web.pages import Visitor
from tests.web.test_training_page import METRICS, ONE, measured

GREENS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const isGreen = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = "transparent";
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return alpha > 0 && green > 1.25 * red && green > 1.15 * blue;
  };
  const names = ["color", "backgroundColor", "borderTopColor", "fill", "stroke"];
  return [...document.querySelectorAll("main *")].flatMap((element) => {
    const style = getComputedStyle(element);
    const found = names.filter((name) => isGreen(style[name]));
    return found.length ? [`${element.tagName}.${element.getAttribute("class")}: ${found}`] : [];
  });
}"""


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    made.port = free_port()
    made.serve("--listen", f"127.0.0.1:{made.port}")
    yield made
    made.close()


def test_nothing_is_green_on_the_page_of_a_training_that_failed_after_a_heal(plane: Plane, visitor: Visitor) -> None:
    stepper = str(PROGRAMS / "stepper.py")
    training = plane.train(script=stepper, args=["0.05", "150", "3"], world=(2, 2, 2), spares=1, max_restarts=0)
    training.wait_until_target_world(timeout=60)
    eventually(lambda: fresh(training).training.status.spares.ready, "a spare is there", 60)
    plane.kill_worker(next(rank.worker for rank in training.ranks if rank.rank == 1))
    eventually(lambda: any(event.reason == "Healed" for event in training.events()), "it has healed", 60)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    expect(visitor.page.locator(".healed")).to_contain_text("next step after")
    visitor.see("ranks run after")  # beside the round
    assert visitor.page.evaluate(GREENS), "the page of a training that is well has green parts"
    with pytest.raises(TrainingFailed):
        training.wait(timeout=120)
    visitor.see("demo failed")
    expect(visitor.card("Timeline")).to_contain_text("Healed")  # it was true then
    expect(visitor.page.locator(".healed")).to_have_count(0)
    for scheme in ("light", "dark"):
        visitor.page.emulate_media(color_scheme=scheme)
        assert visitor.page.evaluate(GREENS) == [], scheme
    visitor.picture("failed-after-a-heal")


def test_a_dead_worker_is_no_spare_in_the_use_of_workers(plane: Plane, visitor: Visitor) -> None:
    training = plane.train(script=str(PROGRAMS / "stepper.py"), args=["0.05"], world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=60)
    eventually(lambda: fresh(training).training.status.spares.ready, "a spare is there", 60)
    visitor.answer(METRICS, measured(time.time(), ["demo-0", "demo-1", "demo-2"]))  # it was heard of a moment ago
    spare = next(one.name for one in training.training.status.workers if one.role == "spare")
    visitor.sign_in(plane.url, plane.api_token, ONE)
    row = visitor.card("Use of workers").get_by_role("row").filter(has_text=spare)
    expect(row).to_contain_text("spare")
    plane.kill_worker(spare)
    expect(row).to_contain_text("dead", timeout=60_000)
    expect(row).not_to_contain_text("spare")


def test_steps_that_a_power_loss_cost_are_on_the_page_as_a_warning(plane: Plane, visitor: Visitor) -> None:
    args = [str(plane.notes), "100000", "pause=0.02"]
    training = plane.train(script=str(PROGRAMS / "kept.py"), args=args, world=(2, 2, 2))
    visitor.sign_in(plane.url, plane.api_token, ONE)

    def steps() -> int:
        state = fresh(training).training.status.kept_state
        return (state.newest_step or 0) if state is not None else 0

    eventually(lambda: steps() >= 30, "thirty steps are in memory", 60)
    kill_all([pid for agent in plane.worker_pids().values() for pid in family(agent)])
    words = re.compile(r"no copy of the state survived \(2 of 2 workers lost\); \d+ steps are lost; begins at step 0")
    expect(visitor.card("State").locator("li.worry").filter(has_text=words)).to_be_visible(timeout=60_000)
    expect(visitor.card("Timeline").locator("li.worry").filter(has_text=words)).to_be_visible(timeout=60_000)
    visitor.picture("state-lost")
