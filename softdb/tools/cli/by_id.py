"""The commands that scripts ask record by record: `softdb get`, `count`, `insert` and `delete`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.markup import escape
from typer import Argument, Option

from softdb.errors import BadInput, SoftDBError
from softdb.terminal import counted, dumps, print_json, print_result, print_table, safe
from softdb.tools.cli.arguments import (
    AsJson,
    Database,
    EncoderName,
    TypedIds,
    Where,
    filter_of,
    input_lines,
    typed_ids,
)
from softdb.tools.cli.places import answering, chosen, described, named_encoder, place, read, writing

if TYPE_CHECKING:
    from softdb.answers import Record
    from softdb.cluster import TableCluster
    from softdb.database import SoftDB
    from softdb.filters import FilteredStore

AT_ONCE = 1000  # ids that are looked up together
SHOWN = 4  # numbers of a vector that are shown
FIELDS = ("id", "key", "value", "payload", "text")


def get(path: Database, ids: TypedIds, as_json: AsJson = False) -> None:
    """Records by their ids, in that order; exit code 3 where one is not stored."""
    with answering(path, quiet=as_json) as db:
        wanted = typed_ids(db, ids)
        records = [one for low in range(0, len(wanted), AT_ONCE) for one in db.get(wanted[low : low + AT_ONCE])]
    if as_json:
        print_json([record_facts(record) for record in records])
        return
    rows = [tuple(_cell(part) for part in record_facts(record).values()) for record in records]
    print_table(FIELDS, rows)


def record_facts(record: Record) -> dict[str, Any]:
    """A record as JSON, null where it has no key, value, payload or text."""
    key, value = (
        part if part is None or isinstance(part, int) else part.tolist() for part in (record.key, record.value)
    )
    return dict(zip(FIELDS, (record.id, key, value, record.payload, record.text), strict=True))


def _cell(part: Any) -> str:
    if isinstance(part, list) and part and all(isinstance(one, float) for one in part):
        more = f", … ({len(part)} numbers)" if len(part) > SHOWN else ""
        return ", ".join(f"{one:.4g}" for one in part[:SHOWN]) + more
    return "" if part is None else safe(part if isinstance(part, str) else dumps(part))


def count(path: Database, where: Where = None, as_json: AsJson = False) -> None:
    """How many records there are, or how many a filter matches."""
    only = filter_of(where)

    def stored(store: FilteredStore) -> int:
        return store.snapshot.records if only is None else len(store.matching_rows(only)[1])

    number = read(path, "count", stored, lambda db: db.count(only), as_json)
    print_result({"count": number}, as_json, str(number))


def delete(path: Database, ids: TypedIds = None, where: Where = None, as_json: AsJson = False) -> None:
    """Delete records by id or by filter; an id that is not stored is no error. '{}' is the filter of all."""
    if bool(ids) == (where is not None):
        raise BadInput("give IDs or --where, one of them; --where '{}' deletes every record")
    with writing(path, quiet=as_json) as db:
        gone = db.delete(typed_ids(db, ids) if ids else None, filter_of(where))
        left = len(db)
    print_result(
        {"deleted": gone, "records": left},
        as_json,
        f"{counted(gone, 'record')} deleted, {left:,} in {escape(place(path))}",
    )


class _Piped(NamedTuple):
    """A record of the input."""

    number: int
    id: Any
    key: Any
    value: Any
    payload: Any
    text: str | None

    embeds: bool  # a text whose key the encoder makes

    @property
    def kind(self) -> tuple[bool, bool]:
        """Records that go into one commit are of one kind."""
        return self.key is not None, self.embeds


def insert(
    path: Database,
    file: Annotated[str, Argument(metavar="[FILE]", help="JSON lines; - is standard input.")] = "-",
    upsert: Annotated[bool, Option("--upsert", help="Replace records whose ids are stored already.")] = False,
    batch_size: Annotated[int, Option(min=1, help="Records a commit; 1 for a pipe that stays open.")] = 1000,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Put records in, one a line as `get` and `export` print them: {"id": 1, "key": [1, 0], "payload": {"year": 1999}}.

    A text without a key is embedded where the database has an encoder; "key": null, or no key in an export, is a
    record without one. Fields beside id, key, value, payload and text are the payload.
    """
    dim, noted = described(path)
    made = None if encoder is None else named_encoder(chosen(path, noted, encoder), dim)
    done, number = 0, 0
    with writing(path, made, quiet=as_json) as db:
        put = db.upsert if upsert else db.insert
        try:
            for batch in _batches(_records(input_lines(file), db), batch_size):
                number = batch[0].number
                _, ids, keys, values, payloads, texts, _ = map(list, zip(*batch, strict=True))
                if batch[0].embeds and made is None and noted is not None:
                    made = named_encoder(chosen(path, noted, None), dim)
                given: Any = made(texts) if batch[0].embeds and made is not None else keys
                own = values if any(value is not None for value in values) else None
                put(ids, given, own, payloads, texts=texts)
                done += len(batch)
        except SoftDBError as error:
            line = f"line {number}: " if number and not str(error).startswith("line ") else ""
            state = f"{counted(done, 'record')} before that {'is' if done == 1 else 'are'} in the database"
            error.args = (f"{line}{error.args[0]}; {state}", *error.args[1:])
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{counted(done, 'record')} inserted, on disk") from None
        total = len(db)
    print_result(
        {"inserted": done, "records": total},
        as_json,
        f"{counted(done, 'record')} inserted, {total:,} in {escape(place(path))}",
    )


def _records(lines: Iterable[tuple[int, str]], db: SoftDB | TableCluster) -> Iterator[_Piped]:
    """The records of JSON lines; the header of an export says nothing new. Raises BadInput naming the line."""
    exported = False
    for number, line in lines:
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"line {number}: not JSON ({error}); mend or remove that line") from None
        if number == 1 and isinstance(row, dict) and row.keys() == {"softdb"}:
            _require_same(row["softdb"], db)
            exported = True
            continue
        if not isinstance(row, dict) or "id" not in row:
            raise BadInput(
                f'line {number}: {line[:40].strip()}…; expected an object such as {{"id": 1, "key": [1, 0]}}'
            )
        embeds = "key" not in row and isinstance(row.get("text"), str) and not exported
        name, key, value, text = (row.pop(part, None) for part in ("id", "key", "value", "text"))
        payload = row["payload"] if list(row) == ["payload"] else row or None
        yield _Piped(number, name, key, value, payload, text, embeds)


def _require_same(header: Any, db: SoftDB | TableCluster) -> None:
    """BadInput where an export's vectors would rank otherwise here."""
    metric = header.get("metric") if isinstance(header, dict) else None
    if metric != db.metric:
        raise BadInput(
            f"exported from a database that compares by {metric}, this one does by {db.metric}; insert it into one "
            "like it, or leave the first line out"
        )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _batches(records: Iterable[_Piped], size: int) -> Iterator[list[_Piped]]:
    """Records one after the other of one kind, at most so many; before an error is raised, the good ones go out."""
    failure: BadInput | None = None

    def good() -> Iterator[_Piped]:
        nonlocal failure
        try:
            yield from records
        except BadInput as error:
            failure = error

    for _, alike in itertools.groupby(good(), lambda one: one.kind):
        while batch := list(itertools.islice(alike, size)):
            yield batch
    if failure is not None:
        raise failure
