"""What torch's distributed checkpoint knows of a step, as JSON: torch would pickle it, and trust what it reads."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from muster.errors import InvalidRequest

FORMAT = 1


def write(metadata: Metadata) -> bytes:
    told = {
        "dcp": FORMAT,
        "state": {name: _told(one) for name, one in metadata.state_dict_metadata.items()},
        "planner": _ways(metadata.planner_data),
        "where": [
            [index.fqn, None if index.offset is None else list(index.offset), index.index, *place]
            for index, place in metadata.storage_data.items()
        ],
    }
    return json.dumps(told, separators=(",", ":")).encode()


def _told(one: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    if isinstance(one, BytesStorageMetadata):
        return None
    about = one.properties
    chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in one.chunks]
    return [str(about.dtype).removeprefix("torch."), about.requires_grad, list(one.size), chunks]


def _ways(planned: Any) -> Any:
    """How names were made of ways through nested dictionaries, which is all that torch's own planners write down."""
    if planned is None:
        return None
    if isinstance(planned, dict) and all(
        isinstance(way, tuple) and all(isinstance(one, str | int) for one in way) for way in planned.values()
    ):
        return {name: list(way) for name, way in planned.items()}
    raise InvalidRequest("what this planner wants to be kept is not what torch's own planners write")


def read(data: bytes) -> Metadata:
    """ValueError says what is wrong with it."""
    try:
        told = json.loads(data)
        if told["dcp"] != FORMAT:
            raise ValueError("a format that this version does not know")
        planned = None if told["planner"] is None else {name: tuple(way) for name, way in told["planner"].items()}
        where = {
            MetadataIndex(name, offset, hint): (int(rank), int(piece))
            for name, offset, hint, rank, piece in told["where"]
        }
        return Metadata({name: _read(one) for name, one in told["state"].items()}, planned, where)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not what a distributed checkpoint says of itself: {type(error).__name__} {error}") from None


def _read(told: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if told is None:
        return BytesStorageMetadata()
    name, gradient, size, chunks = told
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no kind of number")
    made = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype, requires_grad=bool(gradient)), torch.Size(size), made)
