"""A table in an object store, moto's S3, whose conditional puts are tested first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")
pytest.importorskip("moto.server", reason="S3 is moto's server")

from lance_tables import batch, contents, hydrated, made, told
from object_stores import bucket

from softdb import errors
from softdb.lance_table.truth import stored

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


@pytest.fixture
def store() -> Iterator[tuple[str, dict[str, str]]]:
    with bucket() as found:
        yield found


def test_a_table_in_a_bucket(store: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, options = store
    truth = made(f"{address}/t.lance", shards=2, options=options)
    truth.write(truth.table(batch(truth, ["a", "b", "c"])), upsert=False)
    followed = hydrated(truth, tmp_path / "cache")
    results: list[object] = []

    def insert(seed: int) -> None:
        writer = stored(truth.url, options)
        try:
            results.append(writer.write(writer.table(batch(writer, ["same", f"own {seed}"], seed=seed)), upsert=False))
        except errors.SoftDBError as error:
            results.append(type(error))

    writers = [threading.Thread(target=insert, args=(seed,)) for seed in (1, 2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(120)
    assert results.count(errors.DuplicateId) == 1, results
    truth.delete(["a"])
    followed.follow(truth.newest())
    assert contents(followed) == told(truth)
    assert len(told(truth)) == 4
    followed.close()
    with pytest.raises(errors.NotADatabase, match="holds no table that can be read"):
        stored(f"{address}/none.lance", options)
