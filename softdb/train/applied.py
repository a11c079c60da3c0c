"""Apply a trained encoder of keys to the records, and encode texts for such a database."""

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
from softdb.nn.targets import database
from softdb.reports import ReembedReport
from softdb.train.keys import KeyEncoder
from softdb.train.projection import QueryProjection

BATCH_KEYS = 4096  # number of keys encoded and stored at once


def apply(db: SoftDB, projection: QueryProjection, *, progress: Progress | bool | None = None) -> ReembedReport:
    """Replace every key k of a database by f(k), in one commit; f is `projection.keys`.

    Works like `SoftDB.reembed`, but from the stored keys instead of texts: until the commit all answers use the old
    keys. After a crash, call `apply` again to continue; after success another call does nothing. From then on project
    the queries. The index is dropped: build another.

    The database stores `projection.name` as the name of its encoder, so that no other encoder embeds texts. To embed
    texts with the encoder of the old keys, open the database with `TextTowers(projection, encoder)`.

    Cost: n encodings, and the cost of `reembed`. Raises BadInput for a projection without `keys`, or trained for keys
    of another width or encoder; and the errors of `reembed`.
    """
    keys, db = _keys_of(projection), database(db)
    if db.encoder_name == projection.name:
        return ReembedReport(db.core.keyed, 0, db.dim, projection.name, db.core.reembedded, 0.0)
    trained_on = projection.metadata.get("encoder", db.encoder_name)
    if db.dim != projection.in_features or db.encoder_name != trained_on:
        raise BadInput(
            f"the projection was trained for keys {projection.in_features} wide by {check.shown(trained_on)} but those "
            f"of this database are {db.dim} wide by {check.shown(db.encoder_name)}; use the one that was trained for it"
        )
    return db.reembed(_OfKeys(keys, projection.name), field=_as_text, batch_size=BATCH_KEYS, progress=progress)


class TextTowers:
    """Encoder of texts for a database whose keys `apply` has changed; pass it to `softdb.open` as encoder.

    Texts of records become f(e(text)), texts of queries W e(text) + b, with e the encoder of the old keys.

    Args:
        projection: the projection that was applied.
        encoder: e.
    """

    def __init__(self, projection: QueryProjection, encoder: check.Encoder) -> None:
        self.projection, self.encoder, self.keys = projection, encoder, _keys_of(projection)
        self.name, self.dim = projection.name, projection.in_features

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:  # (n, d)
        """Encode the texts of n records as keys."""
        keys: Tensor = self.keys(_floats(self.encoder(list(texts))))
        return keys

    @torch.no_grad()
    def encode_queries(self, texts: Sequence[str]) -> Tensor:  # (q, d)
        """Encode the texts of q queries. Raises BadInput if the encoder returns other widths than the projection's."""
        encoder = check.query_encoder(self.encoder) or self.encoder
        queries: Tensor = self.projection(_floats(encoder(list(texts))))
        return queries


class _OfKeys:
    """Encoder of keys that come as hexadecimal texts, because `reembed` passes texts to its encoder."""

    def __init__(self, keys: KeyEncoder, name: str) -> None:
        self.keys, self.name, self.dim = keys, name, keys.outer_bias.numel()

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:  # (n, d)
        stored = np.frombuffer(bytes.fromhex("".join(texts)), np.float32).reshape(len(texts), self.dim)
        keys: Tensor = self.keys(torch.from_numpy(stored.copy()))
        return keys


def _as_text(record: Record) -> str | None:
    """Return the key of a record as a hexadecimal text; None for a record without a key."""
    return None if record.key is None else np.asarray(record.key, np.float32).tobytes().hex()


def _keys_of(projection: QueryProjection) -> KeyEncoder:
    if not isinstance(projection, QueryProjection) or projection.keys is None:
        raise BadInput("the projection has no encoder of keys; train with keys (--keys)")
    return projection.keys


def _floats(vectors: Any) -> Tensor:
    return torch.as_tensor(vectors if isinstance(vectors, Tensor) else np.asarray(vectors)).float()
