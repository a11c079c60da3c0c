"""Records as Arrow tables (`softdb[arrow]`)."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from softdb import check
from softdb.answers import Records
from softdb.check import Id, Schema
from softdb.database.handle import Face, verb
from softdb.errors import BadInput, MissingDependency

__all__ = ["TableVerbs"]

COLUMNS = ("id", "key", "value", "text", "payload")


class TableVerbs(Face):
    """What is asked by whom works with tables, of a database, or of a cluster."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """Widths, dtype and metric."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""

    @property
    @abstractmethod
    def encoder_name(self) -> str | None:
        """The name of the encoder that made the keys; None where none is remembered."""

    @property
    @abstractmethod
    def id_types(self) -> set[str]:
        """Which of "integer" and "text" ids there are."""

    @abstractmethod
    def count(self, where: dict[str, Any] | None = None) -> int:
        """How many records there are, or how many a filter matches, with a key or without."""

    @abstractmethod
    def scan(self, batch_size: int = 1000, where: dict[str, Any] | None = None) -> Iterator[Records]:
        """All records, or those that a filter matches, in batches of at most `batch_size`."""

    @verb
    def __iter__(self) -> Iterator[Id]:
        """The ids of the generation it begins with, in the order of `scan`, less those deleted or replaced since."""
        return (name for records in self.scan() for name in records.ids)

    __reversed__ = None  # else Python would count the ids down from len(self)

    @property
    def header(self) -> dict[str, Any]:
        """What an export says of the database: schema, declared fields, and the encoder's name."""
        return {**self.schema.described, "fields": self.fields, "encoder": self.encoder_name}

    @verb
    def to_arrow(self, columns: Sequence[str] | None = None, where: dict[str, Any] | None = None) -> Any:
        """All records, or those that a filter matches, as a `pyarrow.Table` in memory, in the order of `scan`.

            db.to_arrow().to_pandas()
            db.to_arrow(["id", "year"])      # fields of the payload, each a column

        Args:
            columns: some of id, key, value, text, payload and names of fields of the payload; None: the first five, so
                many as there are.
            where: a filter.

        `id` is int64 or string; where ids are of both kinds a string, with a column `id_is_int`. `key` is a fixed-size
        list of the database's dtype, null where a record has none; `value` such a list, or an int64; `payload` is JSON.
        The table's metadata says what the database is: `softdb.formats.import_records` gives the same one back.

        Raises MissingDependency without pyarrow, and BadInput for a field whose values have no one type.
        """
        names = None if columns is None else _names(columns)
        taken = [name for name in names or () if name not in COLUMNS]
        batches, fields = [], {name: list[Any]() for name in taken}
        made = _Made(self, None if names is None else [name for name in names if name in COLUMNS])
        for records in self.scan(10_000, where):
            batches.append(made.batch(records))
            for name, column in fields.items():
                column.extend(one.get(name) if isinstance(one, dict) else None for one in records.payloads)
        pyarrow = _pyarrow()
        table = pyarrow.Table.from_batches(batches, made.schema)
        for name, column in fields.items():
            try:
                table = table.append_column(name, pyarrow.array(column))
            except (pyarrow.ArrowException, OverflowError) as error:
                raise BadInput(f"field {name!r} is no column ({error}); take the whole payload instead") from None
        if names is None:
            return table
        also = ["id_is_int"] if made.mixed and "id" in names else []
        return table.select([name for name in [*names, *also] if name in table.column_names])

    @verb
    def scan_arrow(self, batch_size: int = 10_000, where: dict[str, Any] | None = None) -> Any:
        """The table of `to_arrow` as a `pyarrow.RecordBatchReader`, read batch by batch in O(batch) memory.

        The scan is of the generation it began with, as of `scan`.
        """
        made, records = _Made(self, None), self.scan(batch_size, where)
        return _pyarrow().RecordBatchReader.from_batches(made.schema, map(made.batch, records))


class _Made:
    """Makes record batches of one schema."""

    def __init__(self, db: TableVerbs, names: list[str] | None) -> None:
        pa = _pyarrow()
        kinds, made = db.id_types, db.schema
        self.mixed, self.integers = len(kinds) == 2, kinds == {"integer"}
        number = pa.from_numpy_dtype(made.dtype)
        vector = None if made.value_dim is None else pa.list_(number, made.value_dim)
        whole = {
            "id": pa.int64() if self.integers else pa.string(),
            **({"id_is_int": pa.bool_()} if self.mixed else {}),
            "key": pa.list_(number, made.dim),
            **({"value": vector or pa.int64()} if made.has_values else {}),
            "text": pa.string(),
            "payload": pa.string(),
        }
        kept = [name for name in whole if names is None or name in names or (name == "id_is_int" and "id" in names)]
        said = {"softdb": json.dumps(db.header, ensure_ascii=False)}
        self.schema = pa.schema([pa.field(name, whole[name]) for name in kept], said)

    def batch(self, records: Records) -> Any:
        """Some records."""
        pa = _pyarrow()
        return pa.record_batch([self._column(name, records) for name in self.schema.names], schema=self.schema)

    def _column(self, name: str, records: Records) -> Any:
        pa, kind = _pyarrow(), self.schema.field(name).type
        if name == "id":
            if not self.mixed and any((type(one) is int) is not self.integers for one in records.ids):
                raise BadInput("ids of another kind came in meanwhile; read the table again")
            return pa.array([str(one) for one in records.ids] if self.mixed else records.ids, kind)
        if name == "id_is_int":
            return pa.array([type(one) is int for one in records.ids], kind)
        if name in ("text", "payload"):
            return pa.array(records.texts if name == "text" else records.payload_texts, kind)
        column, without = records.keys if name == "key" else records.values, ~records.keyed.numpy()
        assert column is not None
        mask = pa.array(without) if without.any() else None
        if not pa.types.is_fixed_size_list(kind):
            return pa.array(column.numpy(), kind, mask=None if mask is None else np.asarray(without))
        flat = pa.array(np.ascontiguousarray(column.numpy()).reshape(-1), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=mask)


def _names(columns: object) -> list[str]:
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(type(one) is str for one in columns):
        raise BadInput(f'columns are {check.shown(columns)}; expected a list of names such as ["id", "year"]')
    return list(dict.fromkeys(columns))


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingDependency("tables need pyarrow; pip install 'softdb[arrow]'") from None
    return pyarrow
