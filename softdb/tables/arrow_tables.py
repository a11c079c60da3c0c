"""Tables: Parquet and Arrow files, Lance and Hugging Face folders, and frames through the Arrow C stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Schema, attribute, is_missing, json_texts, shown
from softdb.errors import BadInput, MissingDependency
from softdb.tables.rows import OWN, Fields, Header, OnError, Rows, good_rows, is_own, readable, reason, require_plain


@dataclass(frozen=True)
class Table:
    """A table of any source, which is read batch by batch."""

    path: Path
    schema: Any  # pyarrow.Schema
    batches: Iterator[Any]  # of pyarrow.RecordBatch
    rows: int | None = None  # approximate number of rows, if known
    optional: bool = False  # True: keys and texts may be null or have no column, and texts are not also the keys

    @property
    def header(self) -> Header | None:
        """Header of softdb's export, from the table's metadata; None for a table of another source. Raises BadInput."""
        header = (self.schema.metadata or {}).get(b"softdb")
        if header is None:
            return None
        try:
            return Header.of(json.loads(header), self.path.name)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{self.path.name}: not the header of an export ({error}); mend it") from None


def needed(module: str, extra: str, name: str) -> Any:
    """Import a module that a format needs. Raises MissingDependency, which names the `extra` of softdb to install."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise MissingDependency(f"{name} needs {module.partition('.')[0]}; pip install 'softdb[{extra}]'") from None


def column_types(schema: Schema) -> dict[str, Any]:
    """Return the Arrow types of a database's columns by name, without the id; keys of undecided width are any lists."""
    pa = needed("pyarrow", "arrow", "a table")
    number = pa.from_numpy_dtype(schema.dtype)
    value = pa.int64() if schema.value_dim is None else pa.list_(number, schema.value_dim)
    values = {"value": value} if schema.has_values else {}
    return {"key": pa.list_(number, schema.dim or -1), **values, "text": pa.string(), "payload": pa.string()}


def column(values: Any, kind: Any, present: Any = None) -> Any:
    """Convert numbers (n, …) to an Arrow column of type `kind`, with nulls where `present` (n,) is False."""
    pa, array = needed("pyarrow", "arrow", "a table"), np.ascontiguousarray(values)
    mask = None if present is None or present.all() else ~present
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(array.tolist() if array.dtype == object else array, kind, mask=mask)
    flat = pa.array(array.reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=None if mask is None else pa.array(mask))


def _parquet(path: Path, size: int) -> Table:
    parquet = needed("pyarrow.parquet", "arrow", path.name)
    # without pre_buffer a row group, which may be as large as the file, is read page by page
    file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
    return Table(path, file.schema_arrow, file.iter_batches(size), file.metadata.num_rows)


def _arrow(path: Path, size: int) -> Table:
    pa = needed("pyarrow", "arrow", path.name)
    source = pa.memory_map(str(path))
    if source.read(6) == b"ARROW1":
        file = pa.ipc.open_file(source)
        count = file.num_record_batches
        rows = count * len(file.get_batch(0)) if count else 0  # all batches but the last usually have the same size
        return Table(path, file.schema, map(file.get_batch, range(count)), rows)
    source.seek(0)
    stream = pa.ipc.open_stream(source)
    return Table(path, stream.schema, iter(stream))


def _lance(path: Path, size: int) -> Table:
    dataset = needed("lance", "lance", path.name).dataset(str(path))
    if hasattr(dataset, "base_paths") and dataset.base_paths():
        raise BadInput(f"{path.name} has files outside of its folder, which are not read; import a deep copy of it")
    batches = dataset.to_batches(batch_size=size, scan_in_order=True)
    return Table(path, dataset.schema, iter(batches), dataset.count_rows())


def _hugging_face(path: Path, size: int) -> Table:
    datasets = needed("datasets", "datasets", path.name)
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        raise BadInput(f"{path.name} holds the splits {shown(splits)}; give the folder of one of them")
    state = json.loads((path / "state.json").read_bytes())
    for file in (*state["_data_files"], *(state.get("_indices_data_files") or ())):
        if Path(file["filename"]).name != file["filename"]:
            raise BadInput(
                f"{path.name} names {shown(file['filename'])}, outside of the folder; save the dataset again"
            )
    return replace(table_of(datasets.load_from_disk(str(path)), size), path=path)


TABLES: dict[str, Callable[[Path, int], Table]] = {
    ".parquet": _parquet, ".pq": _parquet, ".arrow": _arrow, ".feather": _arrow, ".ipc": _arrow,
}  # fmt: skip
FOLDERS: dict[str, Callable[[Path, int], Table]] = {".lance": _lance, "datasets": _hugging_face}


def table_in(path: Path, kind: str, size: int) -> Table:
    """Return the table in a file or folder. Raises BadInput if it cannot be read."""
    with readable(path, " as a table", "; write it again"):
        if path.is_dir():
            require_plain(path)
        return (TABLES | FOLDERS)[kind](path, size)


def table_of(source: Any, size: int) -> Table:
    """Return the table of a frame of pandas or polars, a table or reader of pyarrow, or a dataset of Hugging Face."""
    pa, path = needed("pyarrow", "arrow", "a table"), Path("the table")
    if hasattr(source, "with_format") and hasattr(source, "iter"):  # a dataset, which may select rows of its table
        tables = source.with_format("arrow").iter(size)
        first = list(islice(tables, 1))
        schema = first[0].schema if first else source.features.arrow_schema
        batches = (batch for table in chain(first, tables) for batch in table.to_batches())
        return Table(path, schema, batches, len(source))
    with readable(path, " through the Arrow C stream"):
        reader = pa.RecordBatchReader.from_stream(source)
    count = None if isinstance(source, pa.RecordBatchReader) else attribute(source, "num_rows")
    if count is None and hasattr(source, "__len__"):
        count = len(source)
    return Table(path, reader.schema, iter(reader), count)


def read_table(
    table: Table, columns: Any, size: int, on_error: OnError | None, bad_rows: dict[int, str] | None = None
) -> Iterator[Rows]:
    """Yield the records of a table; a dict `bad_rows` receives a message for the number of each bad row.

    `columns` are a `Fields`, or a dict of some roles; the others, but the value, then have the columns of `DEFAULTS`.
    In an export of softdb the column "payload" holds the payload. In any other table the columns that are neither id,
    key, value nor text are the fields of the payload, without nulls and NaN. Raises BadInput with a bad row's number.
    """
    header, names = table.header, table.schema.names
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise BadInput(f"{table.path.name} has several columns {repeated!r}; rename them")
    fields = columns if isinstance(columns, Fields) else Fields(**columns)
    own = is_own(names, fields, header)
    fields = Fields.among(names, columns, own)
    if own and fields.value is None and "value" in names:
        fields = replace(fields, value="value")
    key = None if (own or table.optional) and fields.key not in names else fields.key
    for name, use in ((fields.id, "id"), (key, "key"), (fields.text, "text"), (fields.value, "value")):
        if name is not None and name not in names:
            missing = f"{table.path.name} has no column {name!r} for the {use}"
            raise BadInput(f"{missing}; its columns are {shown(names)}, name the right one")
    reader, at = _TableReader(table, fields, key, own, header), 0
    for batch in _batches(table, size):
        try:
            rows, bad = reader.rows(batch, at)
        except (BadInput, MissingDependency):
            raise
        except Exception as error:  # Python has no value for some cells, such as dates after the year 9999
            where = f"{table.path.name}, rows {at} to {at + len(batch) - 1}"
            raise BadInput(f"{where}: cannot be read ({reason(error)}); cast the column, or leave it out") from None
        if bad_rows is not None:
            bad_rows.update((at + i, bad[i]) for i in sorted(bad))
        yield from good_rows(rows, bad, on_error)
        at += len(batch)


def _batches(table: Table, size: int) -> Iterator[Any]:
    """Yield the table in batches of `size` rows, by splitting and joining the table's own batches. Raises BadInput."""
    pa = needed("pyarrow", "arrow", "a table")
    pending, count, done = list[Any](), 0, 0
    try:
        for batch in table.batches:
            batch.validate(full=True)  # offsets of texts and lists may point outside of the file
            while count + len(batch) >= size:
                head, batch = batch.slice(0, size - count), batch.slice(size - count)
                yield pa.concat_batches([*pending, head]) if pending else head
                pending, count, done = [], 0, done + size
            if len(batch):
                pending.append(batch)
                count += len(batch)
    except Exception as error:  # for a damaged file Arrow raises errors of any class
        if pending:
            yield pa.concat_batches(pending)
        where = f"after row {done + count - 1}"
        raise BadInput(f"{table.path.name} cannot be read {where} ({reason(error)}); write it again") from None
    if pending:
        yield pa.concat_batches(pending)


class _TableReader:
    """Converter of a table's batches to `Rows`."""

    def __init__(self, table: Table, fields: Fields, key: str | None, own: bool, header: Header | None) -> None:
        self.table, self.fields, self.key, self.own, self.header = table, fields, key, own, header
        self.embeds, self.keyless = fields.key is None and not table.optional, own or table.optional
        self.widths: dict[str, int] = {} if header is None or key is None else {key: header.dim or 1}
        used = {fields.id, key, fields.text, fields.value} | (OWN if own else set())
        self.payload_names = [name for name in table.schema.names if name not in used]

    def rows(self, batch: Any, at: int) -> tuple[Rows, dict[int, str]]:
        """Convert the batch that begins at row `at`; also return a message for the position of each bad row."""
        n, bad, fields = len(batch), dict[int, str](), self.fields
        share = min(1.0, (at + n) / self.table.rows) if self.table.rows else 1.0
        ids, texts = self._ids(batch, at, bad), self._texts(batch, bad)
        keys, keyed = (texts, np.ones(n, np.bool_)) if self.embeds else self._keys(batch, bad)
        values = None if fields.value is None else self._values(batch, fields.value, keyed, bad)
        is_json = self.own and ("payload" in self.table.schema.names or not self.payload_names)
        payloads = self._own_payloads(batch, bad) if is_json else self._payloads(batch)
        path, numbers = self.table.path, range(at, at + n)
        return Rows(path, self.header, share, numbers, ids, keys, values, payloads, texts, what="row"), bad

    def _ids(self, batch: Any, at: int, bad: dict[int, str]) -> list[Any]:
        name = self.fields.id
        if name is None:
            return list(range(at, at + len(batch)))
        ids: list[Any] = batch.column(name).to_pylist()
        if self.own and "id_is_int" in batch.schema.names:
            is_int = batch["id_is_int"].to_pylist()
            try:
                return [int(cell) if integral else cell for cell, integral in zip(ids, is_int, strict=True)]
            except (TypeError, ValueError):
                raise BadInput(f"{self.table.path.name}: an id with id_is_int is not an int; export it again") from None
        for i, cell in enumerate(ids):
            if type(cell) is not int and type(cell) is not str:
                bad[i] = f"column {name!r} is {shown(cell)}; an id is a str or an int"
        return ids

    def _texts(self, batch: Any, bad: dict[int, str]) -> list[Any]:
        name = self.fields.text or ("text" if self.own and "text" in batch.schema.names else None)
        if name is None:
            return [None] * len(batch)
        texts: list[Any] = batch.column(name).to_pylist()
        for i, text in enumerate(texts if self.fields.text else ()):
            if type(text) is not str and (text is not None or self.embeds):
                bad[i] = f"column {name!r} is {shown(text)}, not a text"
        return texts

    def _keys(self, batch: Any, bad: dict[int, str]) -> tuple[Any, NDArray[np.bool_]]:
        if self.key is None:
            return [None] * len(batch), np.zeros(len(batch), np.bool_)
        keys, keyed = self._vectors(batch.column(self.key), self.key, bad)
        missing = np.flatnonzero(~keyed)
        if not self.keyless:
            bad.update({int(i): f"column {self.key!r} is null; expected numbers" for i in missing if i not in bad})
        if not self.keyless or not len(missing):
            return keys, keyed
        return [key if present else None for key, present in zip(keys, keyed, strict=True)], keyed

    def _values(self, batch: Any, name: str, keyed: NDArray[np.bool_], bad: dict[int, str]) -> Any:
        pa, column = needed("pyarrow", "arrow", "a table"), batch.column(name)
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            values, valid = column.fill_null(0).to_numpy(zero_copy_only=False), column.is_valid().to_numpy(False)
        else:
            values, valid = self._vectors(column, name, bad)
        missing = [i for i in np.flatnonzero(keyed & ~valid).tolist() if i not in bad]
        bad.update(dict.fromkeys(missing, f"column {name!r} is null; expected a value"))
        if keyed.all():
            return values
        return [value if present else None for value, present in zip(values, valid, strict=True)]

    def _vectors(self, column: Any, name: str, bad: dict[int, str]) -> tuple[Array, NDArray[np.bool_]]:
        """Return a column of lists as vectors (n, width), zeros for an invalid list, and a mask of the valid lists."""
        pa = needed("pyarrow", "arrow", "a table")
        column = getattr(column, "storage", column)  # an extension type, such as a tensor of fixed shape
        kind, n = column.type, len(column)
        inner = getattr(kind, "value_type", pa.null())
        if not (pa.types.is_integer(inner) or pa.types.is_floating(inner)) or pa.types.is_dictionary(kind):
            expected = "expected lists of numbers, all of one length"
            raise BadInput(f"{self.table.path.name}: column {name!r} is of type {shown(str(kind))}; {expected}")
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_fixed_size_list(kind):
            width = kind.list_size
        else:
            compute = needed("pyarrow.compute", "arrow", "a table")
            lengths = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            width = self.widths.setdefault(name, int(lengths[valid][0])) if valid.any() else self.widths.get(name, 1)
            for i in np.flatnonzero(valid & (lengths != width)).tolist():
                bad[i] = f"column {name!r} has {lengths[i]} numbers, {width} in the rows before; mend it"
            valid = valid & (lengths == width)
        flat = (column if valid.all() else column.filter(pa.array(valid))).flatten()
        if not width:
            raise BadInput(f"{self.table.path.name}: column {name!r} holds no numbers; expected lists of numbers")
        if flat.null_count:
            complete = flat.is_valid().to_numpy(zero_copy_only=False).reshape(-1, width).all(1)
            positions = np.flatnonzero(valid)[~complete]
            bad.update({int(i): f"column {name!r} holds null; expected only numbers" for i in positions})
            flat = flat.fill_null(0)
        present = flat.to_numpy(zero_copy_only=False).reshape(-1, width)
        if len(present) == n:
            return present, valid
        vectors = np.zeros((n, width), present.dtype)
        vectors[valid] = present
        return vectors, valid

    def _own_payloads(self, batch: Any, bad: dict[int, str]) -> Sequence[Any]:
        if "payload" not in batch.schema.names:
            return [None] * len(batch)
        payloads: list[Any] = batch.column("payload").to_pylist()
        checked = json_texts(payloads)
        if checked is not None:
            return checked
        for i, text in enumerate(payloads):
            if not isinstance(text, dict | list | None):
                try:
                    payloads[i] = json.loads(text)
                except (TypeError, ValueError, RecursionError) as error:
                    bad[i] = f"column 'payload' is {shown(text)}, which is not JSON ({error}); rename the column"
        return payloads

    def _payloads(self, batch: Any) -> list[Any]:
        names = self.payload_names
        if not names:
            return [None] * len(batch)
        columns = [
            [cell.isoformat() if hasattr(cell, "isoformat") else cell for cell in batch.column(name).to_pylist()]
            for name in names
        ]
        if names == ["payload"]:
            return columns[0]
        rows = zip(*columns, strict=True)
        return [{name: cell for name, cell in zip(names, row, strict=True) if not is_missing(cell)} for row in rows]
