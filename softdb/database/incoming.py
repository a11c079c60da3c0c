"""Records on their way in: checked by the schema, texts embedded, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.check import Array, Id, Schema
from softdb.database.embedding import embedded
from softdb.errors import BadInput
from softdb.index.choose import Progress
from softdb.store import Batch
from softdb.typing import Ids, Keys, Numbers, Texts, Values, Vectors


class WriteKind(Enum):
    """A write: new records, new or replaced ones, or parts of stored ones."""

    INSERT = "insert"
    UPSERT = "upsert"
    UPDATE = "update"


class Given(NamedTuple):
    """Records as `insert`, `upsert` and `update` take them."""

    ids: Ids
    keys: Any
    values: Any
    payloads: Any
    texts: Texts | None


class RecordParts(NamedTuple):
    """Checked parts of stored records; None: as they are."""

    ids: list[Id]  # n
    keys: Array | None  # (n, d)
    values: Array | None  # (n, v), or labels (n,)
    payloads: list[str | None] | None  # n JSON texts
    texts: list[str | None] | None  # n


class RecordChecker(NamedTuple):
    """The schema that records are checked by, and the encoder that makes keys of texts."""

    schema: Schema
    encoder: Callable[[], check.Encoder | None]

    def parts(
        self, ids: Ids, keys: Vectors | None, values: Numbers | None, payloads: Any, texts: Texts | None, say: Progress
    ) -> RecordParts:
        """Check parts of records as `update` takes them. Raises as it does."""
        if keys is None and values is None and payloads is None and texts is None:
            raise BadInput("nothing to change was given; pass keys, values, payloads or texts")
        names, schema = self._identifiers(ids), self.schema
        kept = check.texts(texts, len(names))
        new = None if payloads is None else check.payloads(payloads, len(names))
        vectors = None if keys is None else self._keys(keys, len(names), say)
        if keys is None and kept is not None and self.encoder() is not None:
            vectors = embedded(kept, "texts", self.encoder, schema, say)
        return RecordParts(
            names, vectors, None if values is None else check.values(values, schema, len(names)), new, kept
        )

    def batch(
        self,
        ids: Ids,
        keys: Keys | None,
        values: Values | None,
        payloads: Any,
        texts: Texts | None,
        say: Progress,
    ) -> Batch:
        """Check records as `insert` takes them. Raises as it does."""
        names = self._identifiers(ids)
        kept, new = check.texts(texts, len(names)), check.payloads(payloads, len(names))
        if keys is None and texts is None and (payloads is None or self.encoder() is not None):
            raise BadInput("keys are missing; give keys, or texts, or keys=[None, …] for records without a key")
        column, keyed = self._keys_of(keys, kept, len(names), say)
        own = self._values_of(values, keyed, len(names))
        return Batch(names, column, own, new, kept, None if keyed.all() else keyed)

    def _identifiers(self, ids: Ids) -> list[Id]:
        names = check.identifiers(ids)
        if not names:
            raise BadInput("ids are an empty batch; give at least one")
        return names

    def _keys(self, keys: Vectors, count: int, say: Progress) -> Array:
        schema = self.schema
        if isinstance(keys, list | tuple) and keys and all(isinstance(key, str) for key in keys):
            return check.filled(embedded(list(keys), "keys", self.encoder, schema, say), "keys", count)
        array = check.matrix(check.encoded(keys, "keys", self.encoder), "keys", schema.dim, schema.dtype)
        return check.filled(array, "keys", count)

    def _keys_of(
        self, keys: Keys | None, texts: list[str | None] | None, count: int, say: Progress
    ) -> tuple[Array, NDArray[np.bool_]]:  # (n, d), (n,)
        """The keys of new records, and which have one; zeros stand for the others."""
        schema, keyed = self.schema, np.ones(count, np.bool_)
        if keys is None and texts is not None and self.encoder() is not None:
            return embedded(texts, "texts", self.encoder, schema, say), keyed
        if keys is None:
            keyed[:] = False
        elif isinstance(keys, list | tuple) and any(key is None for key in keys):
            keyed = np.array([one is not None for one in check.filled(keys, "keys", count)])
            keys = [key for key in keys if key is not None]
        if keyed.all():
            return self._keys(keys, count, say), keyed  # type: ignore[arg-type]
        column = np.zeros((count, schema.dim), schema.dtype)
        if keyed.any():
            column[keyed] = self._keys(keys, int(np.count_nonzero(keyed)), say)  # type: ignore[arg-type]
        return column, keyed

    def _values_of(self, values: Any, keyed: NDArray[np.bool_], count: int) -> Array | None:
        """The values of new records, zeros for those without a key."""
        schema = self.schema
        if keyed.all() or (values is not None and not schema.has_values):
            return check.values(values, schema, count)
        try:
            given = [None] * count if values is None else check.filled(list(values), "values", count)
        except (TypeError, RuntimeError):  # of what cannot be iterated: a number, a nested tensor
            raise BadInput(f"values are {check.shown(values)}; expected a list with one for each id") from None
        extra = np.flatnonzero([one is not None and not own for one, own in zip(given, keyed, strict=True)])
        if len(extra):
            raise BadInput(f"record {extra[0]} of the batch has a value and no key; give both, or None for both")
        if not schema.has_values:
            return None
        column = np.zeros((count, *(() if schema.value_dim is None else (schema.value_dim,))), schema.value_dtype)
        if keyed.any():
            kept = None if values is None else [one for one in given if one is not None]
            column[keyed] = check.values(kept, schema, int(np.count_nonzero(keyed)))
        return column
