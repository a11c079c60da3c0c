"""An error inside an attribute of a caller's object is raised, not taken for a missing attribute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import holding

import softdb
from softdb.formats import read_records

ONE = np.ones((1, 3), np.float32)


def failing(attribute: str) -> Any:
    """A callable that serves as encoder, score and table, one of whose properties has a mistake in it."""

    def broken(_: object) -> None:
        raise AttributeError(f"the mistake in {attribute}")

    def call(self: object, first: Any, keys: Tensor | None = None) -> Any:
        return np.ones((len(first), 3), np.float32) if keys is None else first @ keys.T

    def stream(self: object, schema: object = None) -> Any:
        pyarrow = pytest.importorskip("pyarrow")
        return pyarrow.table({"id": [7], "key": [[1.0, 0.0, 0.0]]}).__arrow_c_stream__(schema)

    return type("Own", (), {attribute: property(broken), "__call__": call, "__arrow_c_stream__": stream})()


def cluster(encoder: Any, path: Path) -> None:
    pytest.importorskip("lance")
    from softdb.cluster import create

    create(path / "t.lance", encoder=encoder)


T = torch.ones(2, 3)
SURFACES: dict[str, tuple[str, Callable[[Any, softdb.SoftDB, Path], Any]]] = {
    "open, dim": ("dim", lambda own, _, path: softdb.open(path / "new", encoder=own)),
    "open, name": ("name", lambda own, _, path: softdb.open(path / "new", dim=3, encoder=own)),
    "cluster.create, dim": ("dim", lambda own, _, path: cluster(own, path)),
    "reembed, dim": ("dim", lambda own, db, _: db.reembed(own)),
    "search, encode_queries": ("encode_queries", lambda own, *_: softdb.open(None, dim=3, encoder=own).search("a")),
    "attend, fold": ("fold", lambda own, db, _: db.attend(ONE, score=own, k=1)),
    "attend, metric": ("metric", lambda own, db, _: db.attend(ONE, score=own, k=1)),
    "attend, query_dim": ("query_dim", lambda own, db, _: db.attend(ONE, score=own)),
    "attention, fold": ("fold", lambda own, *_: softdb.attention(T, T, T, score=own)),
    "read_records, num_rows": ("num_rows", lambda own, *_: next(read_records(own))),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_a_property_that_fails_shows_its_own_error(surface: str, tmp_path: Path) -> None:
    attribute, use = SURFACES[surface]
    mistake = pytest.raises(AttributeError, match=f"^the mistake in {attribute}$")
    with holding(ONE, ids=[1], texts=["one"]) as db, mistake:
        use(failing(attribute), db, tmp_path)


def test_a_missing_attribute_counts_as_none() -> None:
    class Dynamic:
        def __getattr__(self, name: str) -> int:
            if name == "dim":
                return 3
            raise AttributeError(name)

        def __call__(self, texts: list[str]) -> np.ndarray:
            return np.ones((len(texts), 3), np.float32)

    with softdb.open(None, encoder=Dynamic()) as db:
        assert (db.dim, db.encoder_name) == (3, None)
