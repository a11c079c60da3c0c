"""Which shard a record lies in: a hash of its id, the same on every machine, modulo the number of shards."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.check import Id
from softdb.errors import BadInput

__all__ = ["MOST", "power_of_two", "shard_of"]

MOST = 1 << 16  # shards


def shard_of(ids: Iterable[Id], shards: int) -> NDArray[np.int64]:
    """The shard (n,) of each id: blake2b-64 of its type and itself, modulo the number of shards, a power of two."""
    return np.fromiter((_hash(one) % shards for one in ids), np.int64)


def power_of_two(shards: object) -> int:
    """A number of shards. Raises BadInput: it doubles when a cluster grows, so it is a power of two."""
    found = check.integer(shards, "shards", 1, MOST)
    if found & (found - 1):
        near = 1 << (found.bit_length() - 1)
        raise BadInput(f"shards is {found}; expected a power of two, such as {near} or {2 * near}")
    return found


def _hash(one: Id) -> int:
    named = b"i" + one.to_bytes(8, "little", signed=True) if isinstance(one, int) else b"s" + one.encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "little")
