"""A trained encoder of the keys applied to the records, and the texts that come after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.answers import Record
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.index.choose import Progress
from softdb.reports import ReembedReport
from softdb.train.keys import KeyEncoder
from softdb.train.projection import QueryProjection

AT_ONCE = 4096  # keys that are encoded and kept together


def apply(db: SoftDB, projection: QueryProjection, *, progress: Progress | bool | None = None) -> ReembedReport:
    """Make every key k of a database f(k), f being the `keys` of a projection, in one commit; nothing else changes.

    As `SoftDB.reembed`, with all that it promises, but from the stored keys in place of texts: until the commit every
    answer is by the old keys; where the process is killed, calling it again goes on where it stopped; where it has been
    done, nothing happens. Queries are then asked through the projection. The index is dropped: build another.

    The database notes `projection.name` as its encoder, so that texts are embedded by no other one: with an encoder of
    the old keys, open it with `TextTowers(projection, encoder)`.

    Cost: n encodings, and those of `reembed`. Raises BadInput for a projection without `keys`, and one that was trained
    for keys of another width or encoder; and what `reembed` raises.
    """
    keys = _keys_of(projection)
    if db.encoder_name == projection.name:
        return ReembedReport(db.core.keyed, 0, db.dim, projection.name, db.core.reembedded, 0.0)
    trained_on = projection.metadata.get("encoder", db.encoder_name)
    if db.dim != projection.in_features or db.encoder_name != trained_on:
        raise BadInput(
            f"the projection was trained for keys {projection.in_features} wide by {check.shown(trained_on)} but those "
            f"of this database are {db.dim} wide by {check.shown(db.encoder_name)}; use the one that was trained for it"
        )
    return db.reembed(_OfKeys(keys, projection.name), field=_as_text, batch_size=AT_ONCE, progress=progress)


class TextTowers:
    """An encoder of texts for a database whose keys a projection's `keys` have changed; give it to `softdb.open`.

    Texts of records become f(e(text)), texts that ask W e(text) + b, e being what encoded them before.

    Args:
        projection: as it was applied.
        encoder: e.
    """

    def __init__(self, projection: QueryProjection, encoder: check.Encoder) -> None:
        self.projection, self.encoder, self.keys = projection, encoder, _keys_of(projection)
        self.name, self.dim = projection.name, projection.in_features

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:  # (n, d)
        """The keys of n records."""
        found: Tensor = self.keys(_floats(self.encoder(list(texts))))
        return found

    @torch.no_grad()
    def encode_queries(self, texts: Sequence[str]) -> Tensor:  # (q, d)
        """Vectors of q texts."""
        asking = check.query_encoder(self.encoder) or self.encoder
        found: Tensor = self.projection(_floats(asking(list(texts))))
        return found


class _OfKeys:
    """Keys, written as texts, by an encoder of keys."""

    def __init__(self, keys: KeyEncoder, name: str) -> None:
        self.keys, self.name, self.dim = keys, name, keys.outer_bias.numel()

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:  # (n, d)
        written = np.frombuffer(bytes.fromhex("".join(texts)), np.float32).reshape(len(texts), self.dim)
        found: Tensor = self.keys(torch.from_numpy(written.copy()))
        return found


def _as_text(record: Record) -> str | None:
    """The key of a record, written as a text; None where it has none."""
    return None if record.key is None else np.asarray(record.key, np.float32).tobytes().hex()


def _keys_of(projection: QueryProjection) -> KeyEncoder:
    if not isinstance(projection, QueryProjection) or projection.keys is None:
        raise BadInput("the projection has no encoder of keys: the records stay as they are; train with keys (--keys)")
    return projection.keys


def _floats(vectors: Any) -> Tensor:
    return torch.as_tensor(vectors if isinstance(vectors, Tensor) else np.asarray(vectors)).float()
