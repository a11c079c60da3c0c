"""Which shard a record lies in: a hash of its id, the same on every machine, modulo the number of shards."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.check import Id
from softdb.errors import BadInput

__all__ = ["MOST", "by_shard", "power_of_two", "shard_of"]

MOST = 1 << 16  # shards


def shard_of(ids: Iterable[Id], shards: int) -> NDArray[np.int64]:
    """The shard (n,) of each id: blake2b-64 of its type and itself, modulo the number of shards, a power of two.

    Raises BadInput for a number beyond 64 bits.
    """
    hashes = b"".join([blake2b(_named(one), digest_size=8).digest() for one in ids])
    parts: NDArray[np.uint64] = np.frombuffer(hashes, "<u8") % np.uint64(shards)
    return parts.astype(np.int64)


def by_shard(ids: Iterable[Id]) -> NDArray[np.int64]:
    """An order (n,) in which the records of each shard stand side by side, whatever the number of shards."""
    parts, bits = shard_of(ids, MOST), MOST.bit_length() - 1
    reverse = np.zeros_like(parts)
    for bit in range(bits):  # shard s of P has the lowest bits in common
        reverse |= (parts >> bit & 1) << (bits - 1 - bit)
    return np.argsort(reverse, kind="stable")


def power_of_two(shards: object) -> int:
    """A number of shards. Raises BadInput: it doubles when a cluster grows, so it is a power of two."""
    found = check.integer(shards, "shards", 1, MOST)
    if found & (found - 1):
        near = 1 << (found.bit_length() - 1)
        raise BadInput(f"shards is {found}; expected a power of two, such as {near} or {2 * near}")
    return found


def _named(one: Id) -> bytes:
    if not isinstance(one, int):
        return b"s" + one.encode()
    try:
        return b"i" + one.to_bytes(8, "little", signed=True)
    except OverflowError:
        raise BadInput(f"id {one} is beyond 64 bits with a sign; make it a smaller number, or a text") from None
