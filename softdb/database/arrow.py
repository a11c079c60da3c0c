"""Records as Arrow tables (`softdb[arrow]`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from softdb.answers import Records
from softdb.answers.frames import COLUMNS, column_names, field_cells, warn_of_unknown
from softdb.database.core import Core
from softdb.errors import BadInput
from softdb.tables.arrow_tables import column, column_types, needed


def table(core: Core[Any], batches: Iterable[Records], columns: Sequence[str] | None) -> Any:
    """Return records as a `pyarrow.Table`; see `Verbs.to_arrow`."""
    names = None if columns is None else column_names(columns)
    blocks, fields = [], {name: list[Any]() for name in names or () if name not in COLUMNS}
    converter = _Converter(core, None if names is None else ["id", *(name for name in names if name in COLUMNS)])
    for records in batches:
        blocks.append(converter.batch(records))
        for name, cells in fields.items():
            cells += field_cells(records.payloads, name)
    warn_of_unknown(fields)
    pyarrow = needed("pyarrow", "arrow", "a table")
    table = pyarrow.Table.from_batches(blocks, converter.schema)
    for name, cells in fields.items():
        try:
            table = table.append_column(name, pyarrow.array(cells))
        except (pyarrow.ArrowException, OverflowError) as error:
            raise BadInput(f"field {name!r} cannot become a column ({error}); export whole payloads") from None
    if names is None:
        return table
    id_types = ["id_is_int"] if converter.mixed and "id" in names else []
    return table.select([name for name in [*names, *id_types] if name in table.column_names])


def reader(core: Core[Any], batches: Iterable[Records]) -> Any:
    """Return a `pyarrow.RecordBatchReader` that converts one batch of records at a time."""
    pa, converter = needed("pyarrow", "arrow", "a table"), _Converter(core, None)
    return pa.RecordBatchReader.from_batches(converter.schema, map(converter.batch, batches))


class _Converter:
    """Converts records to Arrow record batches, all with the schema of the database."""

    def __init__(self, core: Core[Any], names: list[str] | None) -> None:
        pa = needed("pyarrow", "arrow", "a table")
        kinds = core.id_types
        self.mixed, self.integers = len(kinds) == 2, kinds == {"integer"}
        id_type = pa.int64() if self.integers else pa.string()
        types = {"id": id_type, **({"id_is_int": pa.bool_()} if self.mixed else {}), **column_types(core.schema)}
        columns = [name for name in types if names is None or name in names or (name == "id_is_int" and "id" in names)]
        metadata = {"softdb": json.dumps(core.header, ensure_ascii=False)}
        self.schema = pa.schema([pa.field(name, types[name]) for name in columns], metadata)

    def batch(self, records: Records) -> Any:
        """Return records as a `pyarrow.RecordBatch`."""
        pa = needed("pyarrow", "arrow", "a table")
        return pa.record_batch([self._column(name, records) for name in self.schema.names], schema=self.schema)

    def _column(self, name: str, records: Records) -> Any:
        pa, kind = needed("pyarrow", "arrow", "a table"), self.schema.field(name).type
        if name == "id":
            if not self.mixed and any((type(name) is int) is not self.integers for name in records.ids):
                raise BadInput("ids of another type were inserted meanwhile; read the table again")
            return pa.array([str(name) for name in records.ids] if self.mixed else records.ids, kind)
        if name == "id_is_int":
            return pa.array([type(name) is int for name in records.ids], kind)
        if name in ("text", "payload"):
            return pa.array(records.texts if name == "text" else records.payload_texts, kind)
        cells = records.keys if name == "key" else records.values
        assert cells is not None
        if name == "key" and not pa.types.is_fixed_size_list(kind):
            return pa.nulls(len(cells), kind)  # no record has a key
        return column(cells.numpy(), kind, records.keyed.numpy())
