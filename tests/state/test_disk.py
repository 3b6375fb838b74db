"""Is a file in the durable folder ever taken for what it is not? Flipped, torn, moved, mixed, made up, left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muster
from muster.errors import InvalidRequest, StateUnusable
from muster.state import careful, disk, layout, leaves
from muster.state.layout import Manifest, Piece
from tests.state.kept import ALWAYS, commit, keep, restored


def things(value: int = 0) -> dict[str, Any]:
    flags = torch.tensor([bool(value), True, False])
    return {"flags": flags, "numbers": torch.full((3,), float(value)), "table": {"x": value}}


def the_file(folder: Path) -> Path:
    [paths] = disk.steps(folder).values()
    return paths[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    keep(folder, **things(7))
    return the_file(folder)


def tried(file: Path, data: bytes) -> dict[str, Any] | None:
    """What comes back of a folder with such a file, or None if it is refused. Anything else fails the test."""
    folder = file.parent.parent / "tried"
    shutil.rmtree(folder, ignore_errors=True)
    place = folder / file.parent.name / file.name
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    now = things()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert muster.State(durable=folder, **now).restore() == 1
        except (StateUnusable, InvalidRequest):
            assert str(now) == str(things()), "what was refused has changed nothing"
            return None
    return now


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_is_never_restored(small: Path, place: float, bit: int) -> None:
    data = bytearray(small.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    assert tried(small, bytes(data)) is None


@given(place=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40, deadline=None)
def test_a_torn_file_is_never_restored(small: Path, place: float) -> None:
    data = small.read_bytes()
    assert tried(small, data[: int(place * len(data))]) is None
    assert tried(small, data + b"\0") is None
    assert str(tried(small, data)) == str(things(7))


@given(
    data=st.binary(max_size=200)
    | st.recursive(st.none(), lambda one: st.lists(one)).map(lambda v: json.dumps(v).encode())
)
@settings(max_examples=40, deadline=None)
def test_anything_else_is_refused(small: Path, data: bytes) -> None:
    for made in (data, struct.pack("<Q", len(data)) + data, struct.pack("<Q", 1 << 60) + data):
        assert tried(small, made) is None
    deep = b"[" * 200_000
    assert tried(small, struct.pack("<Q", len(deep)) + deep) is None


def forged(rest: bytes, pieces: list[Piece] | None = None) -> bytes:
    """Return the bytes of a file with correct hashes."""
    from muster.state import content_hash

    placed, last = layout.placed(pieces or [], len(rest))
    made = [content_hash.of(torch.zeros(piece.length, dtype=torch.uint8)) for piece in placed]
    manifest = Manifest(0, 1, 0, 1, placed, last, attempt="abc").with_hashes(
        [*made, content_hash.of(torch.tensor(list(rest), dtype=torch.uint8))]
    )
    zeros = b"".join(bytes(piece.length) for piece in placed)
    return disk._header(manifest) + zeros + rest


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


class Pid:
    def __init__(self, pid: Any) -> None:
        self.pid = pid


def pickled(value: Any, protocol: int = 5) -> bytes:
    import io

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj.pid if isinstance(obj, Pid) else None

    out = io.BytesIO()
    Pickler(out, protocol).dump(value)
    return out.getvalue()


@pytest.mark.parametrize(
    "rest",
    [
        pickled(Evil(os.system, ("touch evil",))),
        pickled(Evil(eval, ("1",))),
        pickled(Evil(getattr, ({}, "keys"))),
        pickled(Evil(pickle.loads, (b"",))),
        pickled(Evil(torch.load, ("x",))),
        pickled(Evil(bytearray, (1 << 60,))),
        pickled(Evil(bytes, (1 << 60,))),
        pickled(Evil(range, (1 << 60,))),
        pickled(Evil(careful.array, (b"", "O", (1,)))),
        pickled(Evil(careful.array, (b"12345678", "V8", (1,)))),
        pickled({"subjects": {"numbers": Pid(0)}}),
        pickled({"subjects": {"numbers": Pid(-1)}}),
        pickled({"subjects": {"numbers": Pid("0")}}),
        pickled({"subjects": 1}),
        pickled([]),
        pickled({"subjects": {}}, 2),
        b"\x80\x05cbuiltins\neval\n.",
        b"\x80\x05r\xff\xff\xff\x7f.",
        b"\x80\x05]\x94" + b"]" * 100_000 + b".",
        b"",
        b".",
        b"}" * 1000,
    ],
    ids=lambda rest: rest[:40].hex(),
)
def test_a_forged_file_can_do_nothing(
    small: Path, rest: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = small.parent.parent / "forged" / "step-000000000001-abc" / small.name
    assert tried(place, forged(rest)) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "piece",
    [
        Piece("numbers", "load", (2,), 0, 8),
        Piece("numbers", "float32", (3,), 0, 6),
        Piece("numbers", "float64", (2,), 0, 8),
        Piece("numbers", "float32", (1,), 0, 4, whole=(8,), begin=(0,)),
    ],
)
def test_a_forged_tensor_is_refused(small: Path, piece: Piece) -> None:
    place = small.parent.parent / "forged" / "step-000000000001-abc" / small.name
    assert tried(place, forged(pickled({"subjects": {"numbers": Pid(0)}}), [piece])) is None


def test_a_class_that_the_user_allows_is_read(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"could not be read again: it names .*Allowed; torch.serialization.add_safe"):
        keep(tmp_path, thing=Allowed(3))
    with torch.serialization.safe_globals([Allowed]):
        assert restored(tmp_path, thing=None)["thing"].value == 3


class Allowed:
    def __init__(self, value: int) -> None:
        self.value = value


def test_a_file_of_another_step_rank_world_or_attempt_is_not_taken(small: Path) -> None:
    top = small.parent.parent / "tried"
    for place in (
        "step-000000000002-{attempt}/rank-00000-of-00001.safetensors",
        "step-000000000001-other/rank-00000-of-00001.safetensors",
    ):
        shutil.rmtree(top, ignore_errors=True)
        path = top / place.format(attempt=small.parent.name.rpartition("-")[2])
        path.parent.mkdir(parents=True)
        shutil.copy(small, path)
        with (
            pytest.warns(UserWarning, match="it is step 1 of rank 0 of 1"),
            pytest.raises(StateUnusable, match=r"no step in .* can be used"),
        ):
            muster.State(durable=top, **things()).restore()


def test_the_step_before_is_taken_instead_and_the_damaged_one_never_again(tmp_path: Path) -> None:
    state = muster.State(durable=tmp_path, durable_every=ALWAYS, **things(1))
    commit(state, 1)
    state["table"]["x"] = 2
    commit(state, 2)
    newest = disk.steps(tmp_path)[2][0]
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    now = things()
    with pytest.warns(UserWarning, match="step-.*2-.* cannot be used: step 2 of rank 0 is damaged in its rest"):
        assert muster.State(durable=tmp_path, **now).restore() == 1
    assert now["table"]["x"] == 1
    assert list(disk.steps(tmp_path)) == [1]
    assert "damaged" in (newest.parent / "damaged.txt").read_text()


def test_a_folder_that_never_was_a_file_or_is_odd_is_no_error(tmp_path: Path) -> None:
    assert disk.steps(tmp_path / "nothing") == {}
    odd = tmp_path / "step-000000000003-abc"
    odd.mkdir()
    os.mkfifo(odd / disk.file_name(0, 1))
    (tmp_path / "step-000000000004-abc").write_text("a file")
    with pytest.warns(UserWarning, match="not a regular file"):
        assert muster.State(durable=tmp_path, start_over=True, a=1).restore() == 0


def test_files_of_two_attempts_or_worlds_make_no_step(tmp_path: Path) -> None:
    rest = leaves.take_apart({"subjects": {}})[0]

    def write(rank: int, ranks: int, attempt: str) -> None:
        manifest = Manifest(rank, ranks, 0, 5, *layout.placed([], len(rest)), attempt=attempt)
        disk.write(tmp_path, manifest, memoryview(rest))

    write(0, 2, "a")
    write(1, 2, "b")
    write(1, 3, "a")
    assert disk.steps(tmp_path) == {}
    write(1, 2, "a")
    assert [path.name for path in disk.steps(tmp_path)[5]] == [disk.file_name(0, 2), disk.file_name(1, 2)]


def test_old_steps_and_leftovers_go_and_two_whole_ones_stay(tmp_path: Path) -> None:
    state = muster.State(durable=tmp_path, durable_every=ALWAYS, a=1)
    (tmp_path / "step-000000000009-dead").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in range(1, 6):
        commit(state, step)
        assert list(disk.steps(tmp_path)) == [step, step - 1][: min(step, 2)]
    left = sorted(path.name.split("-")[1] for path in tmp_path.glob("step-*"))
    assert left == ["000000000004", "000000000005"]
    assert (tmp_path / "notes.txt").exists()


def test_what_a_killed_writer_has_left_is_cleaned(tmp_path: Path) -> None:
    keep(tmp_path, **things(7))
    file = the_file(tmp_path)
    (file.parent / f".{file.name}.12345").write_bytes(b"half")
    with disk.opened(file) as opened:
        disk.write(tmp_path, opened.manifest(file), memoryview(file.read_bytes()))
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_is_one_warning_and_nothing_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    state = muster.State(durable=tmp_path, durable_every=ALWAYS, **things(7))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.warns(UserWarning) as told:
            for step in range(1, 5):
                commit(state, step)
    assert [str(one.message) for one in told] == [
        f"muster.State: nothing can be written to {tmp_path}: No space left on device"
    ]
    assert disk.steps(tmp_path) == {}
    commit(state, 5)
    assert list(disk.steps(tmp_path)) == [5]


def test_others_read_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    model = torch.nn.Linear(3, 2)
    odd = {"half": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor([True]), "complex": torch.ones(2) * 1j}
    keep(tmp_path, model=model, odd=odd)
    read = safetensors.load_file(the_file(tmp_path))
    assert torch.equal(read["model.weight"], model.weight)
    assert torch.equal(read["odd.half"], odd["half"]) and torch.equal(read["odd.flag"], odd["flag"])
    assert torch.equal(read["odd.complex"].view(torch.complex64), odd["complex"])


def test_the_header_is_as_the_format_wants_it(tmp_path: Path) -> None:
    keep(tmp_path, a=torch.ones(3, dtype=torch.bool), b=torch.ones(2, dtype=torch.float64), c=torch.ones(3).half())
    data = the_file(tmp_path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    told = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    about = told.pop("__metadata__")
    assert all(isinstance(value, str) for value in about.values())
    at = 0
    for one in sorted(told.values(), key=lambda one: one["data_offsets"]):
        begin, end = one["data_offsets"]
        size = {"F64": 8, "F16": 2, "BOOL": 1, "U8": 1}[one["dtype"]]
        assert begin == at and begin % size == 0 and end - begin == size * torch.Size(one["shape"]).numel()
        at = end
    assert at == len(data) - 8 - length
    index = json.loads((the_file(tmp_path).parent / "index.json").read_text())
    assert index["files"] == ["rank-00000-of-00001.safetensors"]
    assert index["tensors"]["b"] == {"dtype": "float64", "shape": [2], "in_parts": False}
