"""The commands that scripts use record by record: `softdb get`, `count`, `insert` and `delete`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.markup import escape
from typer import Argument, Option

from softdb.errors import BadInput, SoftDBError
from softdb.terminal import Excerpt, counted, print_json, print_result, print_table, safe
from softdb.tools.cli.arguments import AsJson, Database, EncoderName, TypedIds, Where, filter_of, input_lines, typed_ids
from softdb.tools.cli.places import answering, chosen, described, named_encoder, place, read, writing

if TYPE_CHECKING:
    from softdb.answers import Record
    from softdb.cluster import TableCluster
    from softdb.database import SoftDB
    from softdb.filters import FilteredStore

FIRST = 10  # number of records that `get` prints without ids
SHOWN = 4  # largest count of a vector's numbers that are printed
FIELDS = ("id", "key", "value", "payload", "text")


def get(
    path: Database,
    ids: TypedIds = None,
    where: Where = None,
    limit: Annotated[int | None, Option(min=0, help=f"Number of records; without IDs {FIRST}.")] = None,
    offset: Annotated[int, Option(min=0, help="Skip this number of records.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print records in the order of the ids, or the first ones, or those of a filter; exit code 3 for an unknown id."""
    filter_ = filter_of(where)
    with answering(path, quiet=as_json) as db:
        wanted = typed_ids(db, ids) if ids else None
        limit = FIRST if limit is None and not ids else limit
        records = list(db.get(wanted, filter_, limit=limit, offset=offset))
    facts = [record_facts(record) for record in records]
    if as_json:
        print_json(facts)
        return
    used = [name for name in FIELDS if any(record[name] is not None for record in facts)]
    print_table(tuple(used), [tuple(_cell(name, record[name]) for name in used) for record in facts])


def record_facts(record: Record) -> dict[str, Any]:
    """Return a record as JSON; a missing key, value, payload or text is null."""
    key, value = (v if v is None or isinstance(v, int) else v.tolist() for v in (record.key, record.value))
    return dict(zip(FIELDS, (record.id, key, value, record.payload, record.text), strict=True))


def _cell(name: str, field: Any) -> str | Excerpt:
    if name in ("payload", "text"):
        return Excerpt(field)
    if isinstance(field, list):
        more = f", … ({len(field)} numbers)" if len(field) > SHOWN else ""
        return ", ".join(f"{number:.4g}" for number in field[:SHOWN]) + more
    return "" if field is None else safe(str(field))


def count(path: Database, where: Where = None, as_json: AsJson = False) -> None:
    """Count all records, or those that a filter matches."""
    filter_ = filter_of(where)

    def in_store(store: FilteredStore) -> int:
        return store.snapshot.records if filter_ is None else len(store.matching_rows(filter_)[1])

    number = read(path, "count", in_store, lambda db: db.count(filter_), as_json)
    print_result({"count": number}, as_json, str(number))


def delete(path: Database, ids: TypedIds = None, where: Where = None, as_json: AsJson = False) -> None:
    """Delete records by id or by filter; an id that is not stored is no error. The filter '{}' matches every record."""
    if bool(ids) == (where is not None):
        raise BadInput("delete needs either IDs or --where; --where '{}' deletes every record")
    with writing(path, quiet=as_json) as db:
        deleted = db.delete(typed_ids(db, ids) if ids else None, filter_of(where))
        remaining = len(db)
    text = f"{counted(deleted, 'record')} deleted, {remaining:,} in {escape(place(path))}"
    print_result({"deleted": deleted, "records": remaining}, as_json, text)


class _InputRecord(NamedTuple):
    number: int  # of the line
    id: Any
    key: Any
    value: Any
    payload: Any
    text: str | None
    embeds: bool  # the encoder computes the key from the text


def insert(
    path: Database,
    file: Annotated[str, Argument(metavar="[FILE]", help="JSON lines; - is standard input.")] = "-",
    upsert: Annotated[bool, Option("--upsert", help="Replace records whose ids are stored already.")] = False,
    batch_size: Annotated[int, Option(min=1, help="Records per commit; 1 for a pipe that stays open.")] = 1000,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Insert records from JSON lines as `get` and `export` print them: {"id": 1, "key": [1, 0], "payload": {"n": 9}}.

    If the database has an encoder, it computes the key of a text without a key. A record with "key": null stays
    without a key, as does a record of an export without one. The key may be called vector or embedding. If no record
    has an id, ids are made. All other fields than these, value, payload and text become the payload.
    """
    from softdb.formats.lines import batched

    dim, stored_name = described(path)
    embed = None if encoder is None else named_encoder(chosen(path, stored_name, encoder), dim)
    done, number = 0, 0
    with writing(path, embed, quiet=as_json) as db:
        put = db.upsert if upsert else db.insert
        try:
            for batch in batched(_records(input_lines(file), db), batch_size):
                number = batch[0].number
                _, ids, keys, values, payloads, texts, embeds = map(list, zip(*batch, strict=True))
                if any(embeds) and embed is None and stored_name is not None:
                    embed = named_encoder(chosen(path, stored_name, None), dim)
                if any(embeds) and embed is not None:
                    vectors = iter(embed([text for text, embedded in zip(texts, embeds, strict=True) if embedded]))
                    keys = [next(vectors) if embedded else key for key, embedded in zip(keys, embeds, strict=True)]
                columns = [keys, values if any(v is not None for v in values) else None, payloads]
                put(None if ids[0] is None else ids, *columns, texts=texts)
                done += len(batch)
        except SoftDBError as error:
            line = f"line {number}: " if number and not str(error).startswith("line ") else ""
            state = f"{counted(done, 'record')} before that {'is' if done == 1 else 'are'} in the database"
            error.args = (f"{line}{error.args[0]}; {state}", *error.args[1:])
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{counted(done, 'record')} inserted, on disk") from None
        total = len(db)
    text = f"{counted(done, 'record')} inserted, {total:,} in {escape(place(path))}"
    print_result({"inserted": done, "records": total}, as_json, text)


def _records(lines: Iterable[tuple[int, str]], db: SoftDB | TableCluster) -> Iterator[_InputRecord]:
    """Parse JSON lines to records; skip the header line of an export. Raises BadInput with the line number."""
    from softdb.check import shown
    from softdb.formats.lines import json_rows
    from softdb.tables.rows import DEFAULTS

    exported, has_ids = False, None
    for number, _, row, _ in json_rows(((number, 0.0, line) for number, line in lines), "", header=True):
        if number == 1 and row.keys() == {"softdb"}:
            metric = row["softdb"].get("metric") if isinstance(row["softdb"], dict) else None
            if metric != db.metric:
                raise BadInput(
                    f"the export's metric is {metric}, but this database's is {db.metric}; insert it into a database "
                    "of that metric, or delete the first line of the input, which names the metric"
                )
            exported = True
            continue
        if has_ids not in (None, "id" in row):
            expected = 'an object such as {"id": 1, "key": [1, 0]}, with an id in every line or in none'
            raise BadInput(f"line {number} is {shown(row)}; expected {expected}")
        has_ids = "id" in row
        key_name = "key" if exported else next((field for field in DEFAULTS["key"] if field in row), "key")
        embeds = key_name not in row and isinstance(row.get("text"), str) and not exported
        name, key, value, text = (row.pop(field, None) for field in ("id", key_name, "value", "text"))
        payload = row["payload"] if list(row) == ["payload"] else row or None
        yield _InputRecord(number, name, key, value, payload, text, embeds)
