"""The page in a real browser, over a real control plane."""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import expect

from muster import DistributedTraining
from muster.ports import Write
from muster.server.auth import Role, Tokens
from muster.store.sqlite import SqliteStore
from muster.types.training import Outcome, Status, Training
from tests.fleet import PROGRAMS, free_port
from tests.plane import Plane, fresh
from tests.training_builders import a_training
from tests.web.pages import Visitor

STEPPER = str(PROGRAMS / "stepper.py")
ONE = "#/trainings/default/demo"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """A control plane that comes back at the same address after a crash."""
    made = Plane(tmp_path)
    made.port = free_port()
    yield made
    made.close()


def serve(plane: Plane, **env: str) -> None:
    plane.serve("--listen", f"127.0.0.1:{plane.port}", **env)


def stepping(plane: Plane, name: str = "demo", *words: str, spares: int = 1) -> DistributedTraining:
    return plane.train(name, script=STEPPER, args=list(words), world=(2, 2, 4), spares=spares)


def token_of(plane: Plane, name: str, role: Role) -> str:
    return Tokens(plane.home).create(name, role)


def test_the_dashboard_s_address_signs_in_once_and_nothing_of_it_stays(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    page = visitor.page
    address = plane.muster("dashboard", "--no-browser").expect(r"http://\S+/#/sign-in/\S+")[0]
    page.goto(address)
    visitor.button("Sign in as embedded").click()
    page.get_by_role("navigation", name="Views").wait_for()
    assert page.evaluate("location.hash") == "#/trainings"
    assert page.evaluate("history.length") <= 2
    page.reload()  # the token is kept for the tab
    page.get_by_role("navigation", name="Views").wait_for()
    visitor.button("Sign out").click()
    visitor.may_fail = True  # the browser notes the 401
    page.evaluate("address => { location.hash = new URL(address).hash }", address)
    visitor.see("the code was used already")
    visitor.may_fail = False
    assert page.evaluate("location.hash") == "#/trainings"


def test_a_link_with_somebody_elses_code_signs_in_only_at_a_click_that_names_the_user(
    plane: Plane, visitor: Visitor
) -> None:
    serve(plane)
    page = visitor.page
    mallory = {"Authorization": f"Bearer {token_of(plane, 'mallory', 'editor')}"}

    def link() -> str:
        return f"{plane.url}/#/sign-in/{httpx2.post(f'{plane.url}/v1/sign-in-codes', headers=mallory).json()['code']}"

    page.goto(link())
    visitor.see("This link signs you in as")
    assert visitor.faults() == []
    assert page.evaluate("sessionStorage.length") == 0
    visitor.button("Cancel").click()
    page.get_by_label("Token").wait_for()
    visitor.sign_in(plane.url, plane.api_token)
    page.evaluate("address => { location.hash = new URL(address).hash }", link())
    visitor.see("You are signed in as")
    page.reload()
    page.get_by_title("Signed in as embedded").wait_for()
    page.evaluate("address => { location.hash = new URL(address).hash }", link())
    visitor.button("Sign in as mallory").click()
    page.get_by_title("Signed in as mallory").wait_for()


def test_an_address_that_is_no_utf_8_does_not_break_the_page(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    visitor.sign_in(plane.url, plane.api_token)
    for address in ("#/%E0%A4%A", "#/trainings/default/%E0%A4%A", "#/%"):
        visitor.go(address)
        visitor.page.get_by_role("navigation", name="Views").wait_for()
        visitor.page.get_by_role("link", name="Events").click()
        expect(visitor.page).to_have_title("Events · muster")
    visitor.page.goto(f"{plane.url}/#/%E0%A4%A")
    visitor.page.reload()
    visitor.page.get_by_role("navigation", name="Views").wait_for()
    assert visitor.errors == []


def test_nothing_yet_says_what_to_run_and_a_wrong_token_is_told(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    page = visitor.page
    page.goto(plane.url)
    page.get_by_label("Token").wait_for()
    visitor.picture("sign-in")
    assert visitor.faults() == []
    visitor.may_fail = True  # the browser notes the 401
    page.get_by_label("Token").fill("mst_wrong")
    visitor.button("Sign in").click()
    visitor.see("the token is not known here")
    visitor.may_fail = False
    visitor.sign_in(plane.url, plane.api_token)
    visitor.see("muster run train.py --name first --workers 2 --spares 1")
    assert visitor.faults() == []
    visitor.picture("empty")
    for view, text in (("#/pool", "MUSTER_GPUS=4 muster server start"), ("#/usage", "Nothing was used")):
        visitor.go(view)
        visitor.see(text)
    page.reload()  # the token is kept for the tab
    visitor.see("Nothing was used")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # "Skip to the content" is the first stop
    assert page.evaluate("document.activeElement.id") == "main"
    visitor.button("Sign out").click()
    page.get_by_label("Token").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_killed_worker_is_seen_with_its_reason_and_its_successor_without_a_reload(
    plane: Plane, visitor: Visitor
) -> None:
    serve(plane)
    visitor.sign_in(plane.url, plane.api_token)
    page = visitor.page
    page.evaluate("window.notReloaded = true")
    training = stepping(plane, "demo", "0.02")
    failed = plane.train("sweep", script=STEPPER, args=["0.01", "5", "3"], world=(1, 1, 1), max_restarts=0)
    training.wait_until_target_world(timeout=30)
    row = page.get_by_role("row").filter(has_text="demo")
    expect(row).to_contain_text("ready")
    expect(row.get_by_role("img", name="2 of 2 workers ready, 2 to 4 allowed, 1 of 1 spares ready")).to_be_visible()
    expect(row).to_contain_text("2 of 2 workers train")
    sweep = page.get_by_role("row").filter(has_text="sweep")
    expect(sweep).to_contain_text(
        "exited with code 3 (rank 0); last output: rank 0 ends at step 5; worker sweep-0, round 0"
    )
    visitor.picture("trainings")
    assert visitor.faults() == []

    page.get_by_role("link", name="demo").click()
    visitor.card("Log").get_by_text("step 10 loss").first.wait_for()
    training.refresh()
    seated = [rank.worker for rank in training.ranks]
    (spare,) = {"demo-0", "demo-1", "demo-2"} - set(seated)
    plane.kill_worker(seated[1])
    why = re.compile(f"^lost {seated[1]}: its (connection closed|guard ended its ranks)$")  # whichever is heard first
    visitor.card("Timeline").get_by_text(why).wait_for()
    visitor.card("Timeline").get_by_text("Spare promoted").wait_for()
    visitor.card("Timeline").get_by_text(f"{spare} takes rank 1", exact=True).wait_for()
    page.get_by_role("button", name=f"Rank 1: running on {spare}").wait_for()
    times = r"ranks run after \S+ m?s, next step after \S+ m?s"
    healed = re.compile(rf"{seated[1]} lost; {spare} has rank 1; {times}; back at step 0, \d+ steps redone")
    visitor.card("Timeline").get_by_text(healed).wait_for()
    expect(page.get_by_role("status").filter(has_text="Healed at")).to_contain_text(healed)
    visitor.see("demo is ready: 2 of 2 workers train in round 1; ranks run after ")
    expect(page.get_by_role("definition").filter(has_text="/s")).to_be_visible()  # steps per second
    assert page.evaluate("window.notReloaded")

    page.get_by_role("button", name="Rank 1:").click()
    visitor.card("Rank 1").get_by_text("begins round 1").wait_for()
    expect(visitor.card("Rank 1")).to_contain_text("It has not exited.")
    visitor.card("Log").get_by_label("Rank").fill("0")
    expect(visitor.card("Log").get_by_role("log")).to_contain_text("rank 0 of 2 begins round 1")
    visitor.picture("training")
    assert visitor.faults() == []

    assert failed.namespace == "default"
    visitor.go("#/trainings/default/sweep")
    visitor.see("sweep failed")
    page.get_by_role("button", name="Rank 0: failed").press("Enter")
    expect(visitor.card("Rank 0")).to_contain_text("It ended with exit code 3")
    visitor.card("Rank 0").get_by_text("rank 0 ends at step 5").first.wait_for()
    visitor.picture("failed")
    assert visitor.faults() == []


def test_scale_cancel_and_delete_through_the_page(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    training = stepping(plane)
    training.wait_until_target_world(timeout=30)
    visitor.sign_in(plane.url, token_of(plane, "eddy", "editor"), ONE)
    page = visitor.page
    visitor.button("Scale").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Workers").fill("3")
    visitor.picture("scale")
    assert visitor.faults() == []
    dialog.get_by_role("button", name="Scale").click()
    dialog.wait_for(state="detached")
    visitor.card("Timeline").get_by_text("eddy asked for 3 workers instead of 2").wait_for()
    page.get_by_role("img", name="3 of 3 workers ready, 2 to 4 allowed").first.wait_for()
    training.refresh()
    assert training.world.target == 3

    visitor.button("Cancel").click()
    dialog.get_by_role("button", name="Keep it running").click()
    dialog.wait_for(state="detached")
    visitor.button("Cancel").press("Enter")
    dialog.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert page.evaluate("document.activeElement.textContent") == "Cancel"
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Cancel training").press("Enter")
    visitor.see("demo was cancelled")
    expect(visitor.button("Scale")).to_have_count(0)
    visitor.go("#/usage")
    visitor.card("By training").get_by_role("link", name="demo").click()
    visitor.see("demo was cancelled")
    training.refresh()
    assert training.phase == "cancelled"

    visitor.button("Delete").click()
    dialog.get_by_role("button", name="Delete training").click()
    visitor.see("It was deleted")
    visitor.go("#/usage")
    visitor.card("By training").get_by_text("default, deleted").first.wait_for()
    expect(visitor.card("By training").get_by_role("link", name="demo")).to_have_count(0)
    visitor.picture("usage")
    assert visitor.faults() == []


def test_a_viewer_sees_no_button_and_cannot_act_by_a_forged_request(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    training = stepping(plane, spares=0)
    training.wait_until_target_world(timeout=30)
    token = token_of(plane, "vera", "viewer")
    visitor.sign_in(plane.url, token, ONE)
    visitor.see("demo is ready")
    for name in ("Scale", "Cancel", "Delete"):
        expect(visitor.button(name)).to_have_count(0)
    visitor.may_fail = True
    forged = """async token => (await fetch("/v1/namespaces/default/trainings/demo/cancel", {
        method: "POST", headers: { Authorization: `Bearer ${token}` } })).status"""
    assert visitor.page.evaluate(forged, token) == 403
    address = f"{plane.url}/v1/namespaces/default/trainings/demo"
    foreign = {"Authorization": f"Bearer {plane.api_token}", "Origin": "https://elsewhere.example"}
    assert httpx2.delete(address, headers=foreign).status_code == 403
    training.refresh()
    assert training.training.spec.cancel is None
    assert training.phase == "ready"
    Tokens(plane.home).revoke("vera")
    training.scale(3)  # the next change is not told to a token that was revoked
    visitor.see("the token is not known here")


def test_the_banner_says_when_the_control_plane_is_away_and_goes_when_it_is_back(
    plane: Plane, visitor: Visitor
) -> None:
    serve(plane)
    training = stepping(plane)
    training.wait_until_target_world(timeout=30)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    page = visitor.page
    visitor.see("demo is ready")
    page.evaluate("window.notReloaded = true")
    visitor.may_fail = True  # the browser notes each connection that is refused
    plane.crash()
    visitor.see("Disconnected.")
    visitor.picture("disconnected")
    assert visitor.faults() == []
    serve(plane)
    page.get_by_text("Disconnected.").wait_for(state="detached")
    training.scale(3)
    page.get_by_role("img", name="3 of 3 workers ready").first.wait_for()
    visitor.card("Log").get_by_text("begins round 1").first.wait_for()
    assert page.evaluate("window.notReloaded")


def test_the_banner_says_what_the_control_plane_warns_of_for_as_long_as_it_does(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    stepping(plane).wait_until_target_world(timeout=30)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    visitor.see("demo is ready")
    assert plane.daemon is not None
    daemon, unlimited = plane.daemon.proc.pid, resource.RLIM_INFINITY
    resource.prlimit(daemon, resource.RLIMIT_FSIZE, (0, unlimited))  # its disk takes nothing any more
    banner = visitor.page.get_by_role("status").filter(has_text="the control plane cannot write since")
    banner.wait_for()
    expect(banner).to_contain_text("what is shown may be as old as that")
    visitor.picture("warned")
    assert visitor.faults() == []
    resource.prlimit(daemon, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    banner.wait_for(state="detached")


def test_a_hidden_page_keeps_no_connection_and_catches_up_when_it_is_seen(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    training = stepping(plane, spares=0)
    training.wait_until_target_world(timeout=30)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    visitor.see("demo is ready")
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    visitor.page.evaluate(hide, True)
    training.scale(3)
    training.wait_until_target_world(timeout=30)
    expect(visitor.page.get_by_role("img", name="2 of 2 workers ready").first).to_be_visible()
    expect(visitor.page.get_by_text("Disconnected.")).to_have_count(0)
    visitor.page.evaluate(hide, False)
    visitor.page.get_by_role("img", name="3 of 3 workers ready").first.wait_for()


def test_the_pool_shows_lanes_shares_and_waits(plane: Plane, visitor: Visitor) -> None:
    serve(plane, MUSTER_GPUS="4")
    sharer = (str(PROGRAMS / "sharer.py"), plane.url)
    env = {"MUSTER_TOKEN": plane.api_token}
    visitor.sign_in(plane.url, plane.api_token, "#/pool")
    visitor.see("Nobody takes part now.")
    for name in ("alpha", "beta"):
        plane.start(sys.executable, *sharer, name, "0,1", "0,1,2,3", "30", **env)
    shares = visitor.card("Shares")
    for name in ("alpha", "beta"):
        shares.get_by_text(name).wait_for()
    shares.get_by_role("img", name="due").first.wait_for()
    visitor.card("Decisions").get_by_text("due bundles").first.wait_for()
    lanes = visitor.card("GPUs").locator("svg")
    lanes.locator("title").filter(has_text="alpha train").first.wait_for(state="attached")
    lanes.locator("title").filter(has_text="beta generating").first.wait_for(state="attached")
    visitor.card("GPUs").get_by_text("What each GPU does now").click()
    visitor.card("GPUs").get_by_role("listitem").filter(has_text="GPU 3: ").wait_for()
    visitor.picture("pool")
    assert visitor.faults() == []


def test_the_pool_shows_trainings_as_holders_lent_gpus_and_who_of_them_waits(plane: Plane, visitor: Visitor) -> None:
    serve(plane, MUSTER_GPUS="4")
    words = [str(plane.folder), "0.05"]
    filler = plane.train(
        "filler",
        world=(1, 2, 4),
        script=str(PROGRAMS / "filler.py"),
        args=words,
        resources={"gpus": 1},
        elasticity="fill",
    )
    filler.wait_until_target_world(timeout=60)
    visitor.sign_in(plane.url, plane.api_token, "#/pool")
    visitor.card("GPUs").get_by_text("What each GPU does now").click()
    held = visitor.card("GPUs").get_by_role("listitem")
    held.filter(has_text=re.compile("GPU 3: training default/filler, filler-")).wait_for()
    sharer = (str(PROGRAMS / "sharer.py"), plane.url)
    plane.start(sys.executable, *sharer, "alpha", "3", "3", "1000", MUSTER_TOKEN=plane.api_token)
    held.filter(has_text=re.compile("GPU 3: alpha, .*; lent by default/filler")).wait_for()
    plane.train("large", world=(4, 4, 4), resources={"gpus": 1})
    queue = visitor.card("Queue")
    queue.get_by_text("training default/large", exact=True).wait_for()
    expect(queue).to_contain_text("0 of 4 workers")
    expect(queue).to_contain_text("needs 4 GPUs")
    expect(visitor.card("Used")).to_contain_text("training default/filler")
    lanes = visitor.card("GPUs").locator("svg")
    lanes.locator("title").filter(has_text="training default/filler workers").first.wait_for(state="attached")
    visitor.picture("pool-shared")
    assert visitor.faults() == []


def test_state_that_is_kept_is_shown_with_what_a_loss_would_cost(plane: Plane, visitor: Visitor) -> None:
    serve(plane)
    kept = plane.train("demo", script=str(PROGRAMS / "keeper.py"), args=["0.1", "100000"], spares=1)
    visitor.sign_in(plane.url, plane.api_token, ONE)
    visitor.see("Conditions")
    expect(visitor.card("State")).to_have_count(0)  # before the first commit it looks as any other
    kept.wait_until_target_world(timeout=60)
    state = visitor.card("State")
    expect(state).to_contain_text("survives the loss of any one worker")
    expect(state).to_contain_text("it goes on from step")
    expect(state).to_contain_text("2 of 2 ranks in the memory of their own worker")
    visitor.page.get_by_role("img", name="1 of 1 spares ready").first.wait_for()
    plane.kill_worker(next(rank.worker for rank in fresh(kept).ranks if rank.rank == 1))
    visitor.card("Timeline").get_by_text("State resumed").wait_for()
    expect(state).to_contain_text(re.compile(r"went on from step \d+ in memory"))
    visitor.picture("state")
    assert visitor.faults() == []


# A thousand ----------------------------------------------------------------------------------------

MANY = 1000
FRAMES = 60
_SCROLL = """async frames => {
    const most = document.documentElement.scrollHeight;
    let rows = 0;
    for (let at = 0; at < frames; at++) {
        scrollTo(0, (most * at) / frames);
        await new Promise(requestAnimationFrame);
        rows = Math.max(rows, document.querySelectorAll("[role=row]").length);
    }
    return rows;
}"""


def test_a_thousand_rows_stay_smooth_and_change_live(plane: Plane, visitor: Visitor) -> None:
    plane.home.mkdir()
    filling = threading.Thread(target=lambda: asyncio.run(fill(plane.home / "muster.db")))  # this one has a loop
    filling.start()
    filling.join()
    serve(plane)
    page = visitor.page
    visitor.sign_in(plane.url, plane.api_token)
    visitor.see("old-0000")
    expect(page.get_by_role("table")).to_have_attribute("aria-rowcount", str(MANY + 1))
    with visitor.working() as work:
        rows = page.evaluate(_SCROLL, FRAMES)
    assert work.seconds / FRAMES < 0.2  # every frame shows other rows; a thousand rows at once take far longer
    assert rows < 60
    visitor.see("old-0999")
    page.evaluate("scrollTo(0, 0)")
    stepping(plane, "alive", spares=0)
    expect(page.get_by_role("row").nth(1)).to_contain_text("alive")  # what runs comes first
    expect(page.get_by_role("row").nth(1)).to_contain_text("ready")
    page.get_by_role("searchbox").fill("old-0777")
    expect(page.get_by_role("table")).to_have_attribute("aria-rowcount", "2")
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="ready").click()
    expect(page.get_by_role("table")).to_have_attribute("aria-rowcount", "2")
    page.get_by_role("button", name="All").click()
    page.get_by_role("link", name="old-0000").focus()
    for _ in range(40):  # the keyboard reaches rows that did not exist
        page.keyboard.press("Tab")
        page.evaluate("() => new Promise(requestAnimationFrame)")
    assert page.evaluate("document.activeElement.textContent") == "old-0040"
    visitor.picture("thousand")
    assert visitor.faults() == []


async def fill(path: Path) -> None:
    store = SqliteStore.open(path, synchronous="NORMAL")
    await asyncio.gather(*(store.write(Write(put=old(index), expect=0)) for index in range(MANY)))
    await store.close()


def old(index: int) -> Training:
    now = datetime.now(UTC)
    outcome = Outcome("failed", "RankFailed", f"rank {index % 8} on worker {index}: Exit 1", None, now)
    status = Status(1, "failed", round=index % 5, restarts=index % 3, rank_exits=(), outcome=outcome, finished_at=now)
    return a_training(f"old-{index:04}", uid=f"uid-{index}", status=status, world=(2, 4, 8))
