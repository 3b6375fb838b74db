"""Logs and watches that outlive their connection, each both ways."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from muster.errors import NotFound, Unauthenticated, Unavailable, to_wire
from muster.sdk import streams
from muster.sdk.client import Client
from muster.types.event import Event
from muster.types.training import Training
from tests.sdk.scripted import Caller, Episode, House, Plane, a_training, ended, frames

GONE = Episode(json.dumps({"error": {"code": "compacted", "message": "too old"}}), status=410)


def at(version: int, training: Training) -> Training:
    return replace(training, metadata=replace(training.metadata, resource_version=str(version)))


# Logs --------------------------------------------------------------------------------------------


def test_logs_are_lines_of_text_and_only_a_newline_ends_one(caller: Caller, plane: Plane, client: Client) -> None:
    plane.play("logs", Episode("[0] eins\n[1] zwölf\rzw\u2028ei\n\nend"))
    lines = caller.take(99, client.get("demo"), "logs", rank=1, round=2, tail=5)
    assert lines == ["[0] eins", "[1] zwölf\rzw\u2028ei", "", "end"]
    assert plane.asked[-1].params == {"rank": "1", "round": "2", "tail": "5"}


def test_logs_of_nobody_are_not_found(caller: Caller, plane: Plane, client: Client) -> None:
    handle = client.get("demo")
    body = to_wire(NotFound("there is no training 'demo'"), "")
    plane.play("logs", Episode(json.dumps(body), status=404))
    with pytest.raises(NotFound):
        caller.take(1, handle, "logs")


def test_following_goes_on_where_it_was_when_the_connection_breaks(
    caller: Caller, plane: Plane, client: Client
) -> None:
    handle = client.get("demo")
    plane.play(
        "logs", Episode("[0] a\n[1] a\n[0] a\n[1] hal", breaks=True), Episode("[0] a\n[0] a\n[0] b\n", breaks=True)
    )
    plane.play("logs", Episode("[0] a\n[0] a\n[0] b\n[1] a\n[1] half\n", before=lambda: finish(plane)))
    lines = caller.take(99, handle, "logs", follow=True)
    assert lines == ["[0] a", "[1] a", "[0] a", "[0] b", "[1] half"]
    assert plane.asked[-2].params == {"follow": "true"}


def test_following_a_tail_does_not_show_what_came_before_it(caller: Caller, plane: Plane, client: Client) -> None:
    plane.play("logs", Episode("[0] c\n[1] y\n", breaks=True))
    plane.play("logs", Episode("[0] a\n[0] b\n[0] c\n[0] d\n[1] x\n[1] y\n[1] z\n", before=lambda: finish(plane)))
    lines = caller.take(99, client.get("demo"), "logs", follow=True, tail=1)
    assert lines == ["[0] c", "[1] y", "[0] d", "[1] z"]


def test_a_time_that_is_known_better_later_makes_no_line_come_twice(
    caller: Caller, plane: Plane, client: Client
) -> None:
    text = "{0}.054Z [0] a\n{0}.060Z [1] a\n- [0] a\n"
    again = Episode(text.format("12:00:01") + "12:00:02.000Z [1] b\n", before=lambda: finish(plane))
    plane.play("logs", Episode(text.format("12:00:00"), breaks=True), again)
    lines = caller.take(99, client.get("demo"), "logs", follow=True, timestamps=True)
    assert lines == ["12:00:00.054Z [0] a", "12:00:00.060Z [1] a", "- [0] a", "12:00:02.000Z [1] b"]
    assert plane.asked[-2].params == {"follow": "true", "timestamps": "true"}


def test_a_stream_of_ranks_can_say_when(caller: Caller, plane: Plane, client: Client) -> None:
    plane.play("logs", Episode("12:00Z [0] a\n- [12] b c\n12:01Z nobody\n", before=lambda: finish(plane)))
    assert caller.take(99, client.get("demo"), "stream_logs", timestamps=True) == [(0, "12:00Z a"), (12, "- b c")]


def test_a_stream_of_ranks_names_who_wrote_each_line(caller: Caller, plane: Plane, client: Client) -> None:
    handle = client.get("demo")
    text = "[0] a\n[12] [0] b\nno rank wrote this\n[x] nor this\n[1] \n"
    plane.play("logs", Episode(text, breaks=True), Episode(f"{text}[0] c\n", before=lambda: finish(plane)))
    lines = caller.take(99, handle, "stream_logs")
    assert lines == [(0, "a"), (12, "[0] b"), (1, ""), (0, "c")]
    assert plane.asked[-2].params == {"follow": "true"}


def test_a_stream_of_some_ranks_leaves_out_the_others(caller: Caller, plane: Plane, client: Client) -> None:
    plane.play("logs", Episode("[0] a\n[1] b\n[2] c\n", before=lambda: finish(plane)))
    assert caller.take(99, client.get("demo"), "stream_logs", ranks=[2, 0]) == [(0, "a"), (2, "c")]


def test_a_stream_that_a_stopping_server_closed_is_taken_up_again(
    caller: Caller, plane: Plane, house: House, client: Client
) -> None:
    handle = client.get("demo")
    plane.play("logs", Episode("a\n"), Episode("a\nb\n", before=lambda: finish(plane)))
    assert caller.take(99, handle, "logs", follow=True) == ["a", "b"]


def test_logs_that_are_not_followed_are_asked_for_once_more_and_no_more(
    caller: Caller, plane: Plane, client: Client
) -> None:
    handle = client.get("demo")
    plane.play("logs", Episode("a\nb\n", breaks=True), Episode("a\nb\nc\n"))
    assert caller.take(99, handle, "logs") == ["a", "b", "c"]
    plane.play("logs", *(Episode("", breaks=True) for _ in range(3)))
    with pytest.raises(Unavailable):
        caller.take(99, handle, "logs")
    assert len(plane.streams["logs"]) == 1


def finish(plane: Plane) -> None:
    plane.change(lambda one: ended(one, "succeeded"))


# Watches -----------------------------------------------------------------------------------------


def test_a_watch_shows_what_is_there_and_then_each_change(caller: Caller, plane: Plane, client: Client) -> None:
    first, then = a_training(), at(9, a_training(ready=1))
    plane.play("watch", Episode(frames([("MODIFIED", then), ("DELETED", at(10, first))])))
    seen = caller.take(3, client, "watch")
    assert [(kind, one.name, one.world.ready) for kind, one in seen] == [
        ("ADDED", "demo", 2),
        ("MODIFIED", "demo", 1),
        ("DELETED", "demo", 2),
    ]
    assert plane.asked[1].params == {"resourceVersion": "2", "namespace": "default"}


def test_a_watch_resumes_after_the_last_change_that_it_saw(caller: Caller, plane: Plane, client: Client) -> None:
    half = frames([("MODIFIED", at(7, a_training(ready=0)))])[:-20]
    plane.play("watch", Episode(frames([("MODIFIED", at(6, a_training(ready=1)))]) + half, breaks=True))
    plane.play("watch", Episode(frames([("MODIFIED", at(7, a_training(ready=0)))])))
    seen = caller.take(2, client, "watch", "5")
    assert [one.world.ready for _, one in seen] == [1, 0]
    assert [one.headers["last-event-id"] for one in plane.asked] == ["5", "6"]


def test_a_watch_whose_history_is_gone_shows_the_difference_to_a_new_list(
    caller: Caller, plane: Plane, client: Client
) -> None:
    plane.put(a_training("stays"))

    def meanwhile() -> None:
        plane.remove("demo")
        plane.put(a_training("new"))
        plane.put(a_training("stays", ready=1))

    plane.play("watch", Episode("", breaks=True), replace(GONE, before=meanwhile))
    seen = caller.take(5, client, "watch")
    assert [(kind, one.name) for kind, one in seen] == [
        ("ADDED", "demo"),
        ("ADDED", "stays"),
        ("DELETED", "demo"),
        ("MODIFIED", "stays"),
        ("ADDED", "new"),
    ]


def test_an_error_in_the_middle_of_a_watch_is_raised_or_mended(caller: Caller, plane: Plane, client: Client) -> None:
    told = "event: error\ndata: " + json.dumps({"error": {"code": "compacted", "message": "too old"}}) + "\n\n"
    revoked = "event: error\ndata: " + json.dumps(to_wire(Unauthenticated("the token was revoked"), "")) + "\n\n"
    plane.play("watch", Episode(told), Episode(revoked))
    with pytest.raises(Unauthenticated, match="revoked"):
        caller.take(99, client, "watch", "1")
    assert [one.path.rpartition("/")[2] for one in plane.asked] == ["watch", "trainings", "watch"]


def test_a_watch_finds_a_server_that_has_moved(caller: Caller, plane: Plane, house: House, client: Client) -> None:
    plane.play("watch", Episode("", breaks=True, before=house.move))
    plane.play("watch", Episode(frames([("MODIFIED", at(6, a_training(ready=1)))])))
    assert caller.take(1, client, "watch", "5")[0].training.world.ready == 1


def test_changes_of_other_namespaces_are_not_shown(caller: Caller, plane: Plane, client: Client) -> None:
    foreign = at(6, a_training("foreign"))
    foreign = replace(foreign, metadata=replace(foreign.metadata, namespace="theirs"))
    plane.play("watch", Episode(frames([("ADDED", foreign), ("ADDED", at(7, a_training("ours")))])))
    assert [one.training.name for one in caller.take(1, client, "watch", "5")] == ["ours"]


def test_entries_of_the_journal_come_where_they_are_asked_for(caller: Caller, plane: Plane, client: Client) -> None:
    entry = {"reason": "Healed", "message": "a lost", "uid": "u", "training": "demo", "id": 4, "data": {"step": 7}}
    told = f"event: EVENT\ndata: {json.dumps({'type': 'EVENT', 'object': entry})}\n\n"
    plane.play("watch", Episode(told + frames([("MODIFIED", at(6, a_training(ready=1)))])))
    flow = streams.watch("default", "5", events=True)
    seen = list(itertools.islice(client.iterate(flow), 2))
    assert isinstance(seen[0], Event) and (seen[0].message, seen[0].data) == ("a lost", {"step": 7})
    assert isinstance(seen[1], streams.Seen)
    assert plane.asked[-1].params["events"] == "true"


def test_whoever_asks_for_no_entries_gets_none(caller: Caller, plane: Plane, client: Client) -> None:
    plane.play("watch", Episode(frames([("MODIFIED", at(6, a_training(ready=1)))])))
    assert len(caller.take(1, client, "watch", "5")) == 1
    assert "events" not in plane.asked[-1].params
