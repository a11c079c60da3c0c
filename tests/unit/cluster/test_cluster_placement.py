"""The shard of an id: the same from every form of a column, spread evenly, and found without a loop over ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="columns are Arrow's")

import pyarrow as pa

from softdb.cluster.placement import MOST, by_shard, shard_of

TEXTS = ["", "a", "a\0", "0", "7", "é", "naïve – 漢字 🙂", "eight by", "eight by\0", "doc-000123", "x" * 1000, "y" * 17]
NUMBERS = [0, 1, -1, 7, 127, -128, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)]

M64 = (1 << 64) - 1


def finalised(number: int) -> int:
    number &= M64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & M64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & M64
    return number ^ number >> 31


def expected(id: Any) -> int:
    """The shard of MOST, from the definition."""
    if not isinstance(id, str):
        return finalised(id + 0x9E3779B97F4A7C15) % MOST
    text, total = id.encode(), 0
    for at in range(0, len(text) + 1, 8):
        total += finalised(int.from_bytes(text[at : at + 8], "little") + at * 0x9E3779B97F4A7C15)
    return finalised(total + len(text) * 0xBF58476D1CE4E5B9) % MOST


def test_the_hash_is_as_defined() -> None:
    ids = [*TEXTS, *NUMBERS]
    assert shard_of(ids, MOST).tolist() == list(map(expected, ids))
    assert shard_of([], MOST).tolist() == []
    for shards in (1, 2, 1024):
        assert (shard_of(ids, MOST) % shards == shard_of(ids, shards)).all()


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_texts_have_one_shard_in_every_form(kind: str) -> None:
    names = TEXTS * 3
    column, shards = pa.array(names, kind), shard_of(names, MOST)
    assert shard_of(column, MOST).tolist() == shards.tolist()
    assert shard_of(column.slice(5, 9), MOST).tolist() == shards[5:14].tolist()
    chunks = pa.chunked_array([column[:4], column[4:4], column[4:]])
    assert shard_of(chunks, MOST).tolist() == shards.tolist()
    assert shard_of(pa.chunked_array([], kind), MOST).tolist() == shard_of(pa.array([], kind), MOST).tolist() == []
    some = shard_of(pa.array(["a", None, "", None], kind).slice(1), MOST)
    assert some.tolist() == [expected(0), expected(""), expected(0)]


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_have_one_shard_in_every_form(kind: str) -> None:
    extent = np.iinfo(kind)
    numbers = [number for number in NUMBERS if extent.min <= number <= extent.max]
    column, shards = pa.array([*numbers, None], kind), [expected(number) for number in numbers]
    assert shard_of(column, MOST).tolist() == [*shards, expected(0)]
    assert shard_of(column.slice(1), MOST).tolist() == [*shards[1:], expected(0)]
    assert shard_of(np.array(numbers, kind), MOST).tolist() == shards


def test_a_value_that_is_no_id_goes_with_id_0() -> None:
    ids = [None, "a", 2**63, 1.5, -(2**63) - 1, 7, b"a"]
    assert shard_of(ids, MOST).tolist() == [expected(id if id in ("a", 7) else 0) for id in ids]
    assert shard_of(pa.array([2**63, 2**64 - 1, 3], pa.uint64()), MOST).tolist() == [*map(expected, (0, 0, 3))]
    assert expected(7) != expected("7")


def test_many_ids_and_a_long_one() -> None:
    """Of several batches; a long text lies in the middle."""
    names = [f"r{i}" for i in range(70_000)]
    names[35_000] = "ü" * 500_000
    shards = shard_of(pa.array(names), MOST)
    for i in (0, 35_000, 32_767, 32_768, len(names) - 1):
        assert shards[i] == expected(names[i])


@pytest.mark.parametrize(
    "name",
    [
        lambda i: i,
        lambda i: 4096 * i,
        lambda i: f"doc-{i:06d}",
        lambda i: str(UUID(int=i << 70 | i)),
        "a".__mul__,
    ],
    ids=["sequential", "multiples", "documents", "uuids", "lengths"],
)
def test_ids_are_spread_evenly(name: Callable[[int], Any]) -> None:
    """Pearson's chi-square has mean P - 1 and variance 2 (P - 1)."""
    n = 2048 if name(3) == "aaa" else 8 * MOST
    parts = shard_of([*map(name, range(n))], MOST)
    for shards in (2, 8, 256, n // 8):
        counts = np.bincount(parts % shards, minlength=shards)
        chi_square = ((counts - n / shards) ** 2).sum() * shards / n
        assert abs(chi_square - (shards - 1)) < 5 * np.sqrt(2 * (shards - 1))


def test_a_file_sorted_by_shard_keeps_shards_together() -> None:
    ids = np.arange(5000)
    order = by_shard(ids)
    assert sorted(order) == ids.tolist()
    for shards in (1, 2, 64, 1024):
        assert (np.diff(shard_of(ids[order], shards)) != 0).sum() < shards
