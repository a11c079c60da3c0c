"""Check records to be written against the schema, and embed their texts. Writes nothing."""

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
from softdb.typing import Ids, Keys, Vectors


class WriteKind(Enum):
    """Kinds of writes: new records, new or replaced records, or parts of stored records; MERGE: fields of payloads."""

    INSERT = "insert"
    UPSERT = "upsert"
    UPDATE = "update"
    MERGE = "merge"


NO_KEYS = (
    "keys are missing; give keys, or texts, or keys=[None, …] for records without a key; texts alone: "
    "insert(texts=…); stored payloads: update(…, merge=True); a file: softdb.formats.import_records"
)
UPDATES = (WriteKind.UPDATE, WriteKind.MERGE)


class Given(NamedTuple):
    """The arguments of `insert`, `upsert` and `update`, unchecked."""

    ids: Any  # None: to be made
    keys: Any
    values: Any
    payloads: Any
    texts: Any


class RecordParts(NamedTuple):
    """Checked parts of stored records; None: unchanged."""

    ids: list[Id]  # n
    keys: Array | None  # (n, d)
    values: Array | None  # (n, v), or labels (n,)
    payloads: list[str | None] | None  # n JSON texts
    texts: list[str | None] | None  # n


class RecordChecker(NamedTuple):
    """Checks records against a schema, and embeds texts with an encoder."""

    schema: Schema
    encoder: Callable[[], check.Encoder | None]

    def parts(self, given: Given, progress: Progress) -> RecordParts:
        """Check the arguments of `update`, and embed texts. Raises the errors of `update` about its arguments."""
        ids, keys, values, payloads, texts = given
        if ids is None:
            raise BadInput("ids are missing; name the stored records: update(ids, …), or rows with a column of ids")
        if keys is None and values is None and payloads is None and texts is None:
            raise BadInput("nothing to change was given; pass keys, values, payloads or texts")
        names, schema = self._identifiers(ids), self.schema
        strings = check.texts(texts, len(names))
        jsons = None if payloads is None else check.payloads(payloads, len(names))
        vectors = None if keys is None else self._keys(keys, len(names), progress)
        if keys is None and strings is not None and self.encoder() is not None:
            vectors = embedded(strings, "texts", self.encoder, schema, progress)
        column = None if values is None else check.values(values, schema, len(names))
        return RecordParts(names, vectors, column, jsons, strings)

    def batch(self, given: Given, progress: Progress) -> Batch:
        """Check the arguments of `insert`, and embed texts. Raises the errors of `insert` about its arguments.

        Without ids the batch's ids are an empty list.
        """
        ids, keys, values, payloads, texts = given
        names = [] if ids is None else self._identifiers(ids)
        count = len(names) or _count(keys, payloads, texts)
        strings, jsons = check.texts(texts, count), check.payloads(payloads, count)
        if keys is None and texts is None and (payloads is None or self.encoder() is not None):
            raise BadInput(NO_KEYS)
        key_column, keyed = self._keys_of(keys, strings, count, progress)
        value_column = self._values_of(values, keyed, count)
        return Batch(names, key_column, value_column, jsons, strings, None if keyed.all() else keyed)

    def _identifiers(self, ids: Ids) -> list[Id]:
        names = check.identifiers(ids)
        if not names:
            raise BadInput("ids are an empty batch; give at least one id")
        return names

    def _keys(self, keys: Vectors, count: int, progress: Progress) -> Array:
        schema = self.schema
        if isinstance(keys, list | tuple) and keys and all(isinstance(key, str) for key in keys):
            return check.filled(embedded(list(keys), "keys", self.encoder, schema, progress), "keys", count)
        array = check.matrix(check.encoded(keys, "keys", self.encoder), "keys", schema.dim, schema.dtype)
        return check.filled(array, "keys", count)

    def _keys_of(
        self, keys: Keys | None, texts: list[str | None] | None, count: int, progress: Progress
    ) -> tuple[Array, NDArray[np.bool_]]:  # (n, d), (n,)
        """Return the keys of new records (zeros for a record without a key), and the mask of records with a key."""
        schema, keyed = self.schema, np.ones(count, np.bool_)
        if keys is None and texts is not None and self.encoder() is not None:
            return embedded(texts, "texts", self.encoder, schema, progress), keyed
        if keys is None:
            keyed[:] = False
        elif isinstance(keys, list | tuple) and any(key is None for key in keys):
            keyed = np.array([key is not None for key in check.filled(keys, "keys", count)])
            keys = [key for key in keys if key is not None]
        if keyed.all():
            return self._keys(keys, count, progress), keyed  # type: ignore[arg-type]
        present = int(np.count_nonzero(keyed))
        given = self._keys(keys, present, progress) if present else np.zeros((0, schema.dim))  # type: ignore[arg-type]
        column = np.zeros((count, given.shape[1]), schema.dtype)
        column[keyed] = given
        return column, keyed

    def _values_of(self, values: Any, keyed: NDArray[np.bool_], count: int) -> Array | None:
        """Return the values of new records, zeros for a record without a key; None in a database without values."""
        schema = self.schema
        if keyed.all() or (values is not None and not schema.has_values and schema.dim):
            return check.values(values, schema, count)
        try:
            items = [None] * count if values is None else check.filled(list(values), "values", count)
        except (TypeError, RuntimeError):  # not iterable, such as a number or a nested tensor
            raise BadInput(f"values are {check.shown(values)}; expected a list with one for each id") from None
        extra = np.flatnonzero([item is not None and not has_key for item, has_key in zip(items, keyed, strict=True)])
        if len(extra):
            raise BadInput(f"record {extra[0]} of the batch has a value and no key; give both, or None for both")
        present = None if values is None else [item for item in items if item is not None]
        given = check.values(present, schema, int(np.count_nonzero(keyed))) if keyed.any() else None
        if not schema.has_values and given is None:
            return None
        width = (schema.value_dim,) if schema.value_dim is not None else ()
        column = np.zeros((count, *(width if given is None else given.shape[1:])), schema.value_dtype)
        if given is not None:
            column[keyed] = given
        return column


def _count(keys: Any, payloads: Any, texts: Any) -> int:
    """Return the number of records in a batch without ids. Raises BadInput if it is 0 or cannot be told."""
    batch = keys if texts is None else texts
    batch = payloads if batch is None else batch
    try:
        count = 1 if isinstance(batch, str | dict) else len(batch)
        if count and batch is keys and not isinstance(first := next(iter(batch)), str | None) and np.ndim(first) == 0:
            count = 1  # a single vector
    except TypeError:
        count = 0
    if not count:
        raise BadInput(f"no ids, and keys, texts or payloads are {check.shown(batch)}; give at least one record")
    return count
