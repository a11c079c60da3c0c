"""Types and functions for all formats: names of fields, headers of exports, batches of records, errors in files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from softdb import check
from softdb.check import Id, shown
from softdb.errors import BadInput, MissingDependency

OnError: TypeAlias = Callable[[BadInput], None]  # called with the error of a bad row, which is then skipped
DEFAULTS = {"id": ("id",), "key": ("key", "vector", "embedding"), "text": ("text",), "value": ("value",)}
_APART = (("id", None), ("value", "value"))  # parts of a `Fields` that are no defaults of rows
OWN = {"id", "id_is_int", "key", "value", "text", "payload"}  # columns of files that softdb exported


@dataclass(frozen=True)
class Fields:
    """Names of a file's fields. All other fields form the payload; a single other field "payload" is the payload."""

    id: str | None = "id"  # None: records are numbered from 0
    key: str | None = None  # a list of numbers; None: the field "key", or if `text` is given the text's encoding
    text: str | None = None  # the record's text
    value: str | None = None  # a list of numbers, or an integer label

    def __post_init__(self) -> None:
        if self.key is None and self.text is None:
            object.__setattr__(self, "key", "key")

    @staticmethod
    def roles(columns: Sequence[str], named: Mapping[str, str | None], has_values: bool) -> dict[str, str | None]:
        """Return the column of each role, None where there is none. Raises BadInput, with the columns."""
        parts = dict(named)
        for role, name in named.items():
            if name is not None and name not in columns:
                raise BadInput(f"rows have no column {name!r} for the {role}; their columns are {shown(columns)}")
        for role in [role for role in DEFAULTS if role not in named]:
            defaults = [name for name in DEFAULTS[role] if name in columns and name not in named.values()]
            if len(defaults) > 1:
                choice = f"fields={{{role!r}: {defaults[0]!r}}}, or on a shell --{role} {defaults[0]}"
                raise BadInput(f"columns {shown(defaults)} may each be the {role}; choose: {choice}")
            parts[role] = defaults[0] if defaults and (role != "value" or has_values) else None
        return parts

    @staticmethod
    def among(names: Collection[str], columns: Fields | Mapping[str, str | None], own: bool) -> Fields:
        """Return the fields of a file with these columns: `DEFAULTS` for those not in a dict, but for the value.

        `own`: softdb exported the file, and its reader knows the columns.
        """
        if isinstance(columns, Fields) or own:
            return columns if isinstance(columns, Fields) else Fields(**columns)
        return Fields(**Fields.roles(list(names), columns, False) | ({} if "id" in columns else {"id": "id"}))


@dataclass(frozen=True)
class Header:
    """Description of the exported database, from the file's first line `{"softdb": {…}}`."""

    dim: int | Any  # None: undecided
    value_dim: int | None
    num_classes: int | None
    dtype: str
    metric: str
    fields: tuple[str, ...]  # declared fields of the payload
    encoder: str | None = None  # name of the database's encoder
    fingerprint: str | None = None  # vectors of fixed texts by it, see `softdb.encoders`

    @classmethod
    def of(cls, said: Any, where: str) -> Header:
        """Return the header of an exported file from its JSON. Raises BadInput."""
        try:
            header = cls(**{**said, "fields": tuple(said["fields"])})
            check.schema(**header.schema, stored=None)
            texts = (*header.fields, header.encoder or "", header.fingerprint or "")
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("fields, encoder and fingerprint are texts")
        except (TypeError, KeyError, ValueError) as error:
            raise BadInput(f"{where}: not the header of an export ({error}); mend it") from None
        return header

    @property
    def schema(self) -> dict[str, Any]:
        """Arguments of `softdb.open` for a database with this header."""
        return {name: getattr(self, name) for name in ("dim", "value_dim", "num_classes", "dtype", "metric")}


def named_in(fields: Any) -> dict[str, str | None]:
    """Return the columns that `fields` names, by role. Raises BadInput."""
    if isinstance(fields, Fields):
        parts = asdict(fields).items()
        fields = {role: name for role, name in parts if name not in (role, None) or (role, name) in _APART}
    named = {} if fields is None else fields
    known = isinstance(named, Mapping) and named.keys() <= DEFAULTS.keys()
    if not known or not all(isinstance(name, str | None) for name in named.values()):
        roles = f"a dict from {', '.join(DEFAULTS)} to the name of a column, or to None for no column"
        raise BadInput(f"fields are {shown(fields)}; expected {roles}; all other columns are the payload")
    return dict(named)


def is_own(names: Collection[str], fields: Fields, header: Header | None = None) -> bool:
    """Return True if a file's columns are those of softdb's exports, and `fields` names no other column as the text."""
    columns = header is not None or {"id", "key", "text", "payload"} <= set(names) <= OWN
    return columns and fields.text in (None, "text")


@dataclass
class Rows:
    """A batch of consecutive records of a file."""

    path: Path
    header: Header | None  # None if the file has none
    share: float  # share of the file that has been read
    lines: Sequence[int]  # the n records' line or row numbers in the file
    ids: list[Id]  # n
    keys: Any  # (n, d) numbers, or n texts to encode; or a list with None for records without a key
    values: Any  # an array or a list of n values; None if the records have no value
    payloads: Sequence[Any]  # n
    texts: list[str | None]  # n, to be stored
    what: str = "line"  # unit of `lines`: "line", from 1, or "row", from 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> str:
        """Name of the file, and numbers of the batch's lines, for messages."""
        return self.at(0) if len(self) == 1 else f"{self.path.name} {self.what}s {self.lines[0]} to {self.lines[-1]}"

    def at(self, i: int) -> str:
        """Return the file's name and the line of record i, for messages."""
        return f"{self.path.name} {self.what} {self.lines[i]}"

    def some(self, places: list[int]) -> Rows:
        """Return the records at these positions in the batch."""
        columns = (self.lines, self.ids, self.keys, self.values, self.payloads, self.texts)
        lines, ids, keys, values, payloads, texts = (_taken(column, places) for column in columns)
        return replace(self, lines=lines, ids=ids, keys=keys, values=values, payloads=payloads, texts=texts)


def _taken(column: Any, places: list[int]) -> Any:
    return column[places] if isinstance(column, np.ndarray) else column and [column[i] for i in places]


def text_in(row: dict[str, Any], name: str, needed: bool, empty: Collection[str] = ()) -> str | None:
    """Return the text in a row's field. Null or an empty cell gives None, or raises BadInput if a text is `needed`."""
    text = row.get(name)
    if isinstance(text, str) or (text is None and not needed and (name in row or name in empty)):
        return text
    raise BadInput(f"field {name!r} is {shown(text)}, not a text; its fields are {shown(list(row))}")


def good_rows(rows: Rows, bad: dict[int, str], on_error: OnError | None) -> Iterator[Rows]:
    """Yield the good rows, and call `on_error` for each bad row; `bad` maps the bad rows' positions to messages.

    Without `on_error` yield the rows before the first bad row, and then raise BadInput with that row's message.
    """
    if not bad:
        yield rows
        return
    if on_error is None:
        first = min(bad)
        if first:
            yield rows.some(list(range(first)))
        raise BadInput(f"{rows.at(first)}: {bad[first]}")
    for i in sorted(bad):
        on_error(BadInput(f"{rows.at(i)}: {bad[i]}"))
    good = [i for i in range(len(rows)) if i not in bad]
    if good:
        yield rows.some(good)


def kind_of(path: Path, expected: str, *kinds: str) -> str:
    """Return a file's suffix, ignoring `.gz`. Raises BadInput unless the file exists and has a suffix in `kinds`."""
    if not path.is_file():
        raise BadInput(f"{path} {f'is not a file; give one of {expected}' if path.exists() else 'does not exist'}")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in kinds:
        lines = "; write a JSON list as lines: jq -c '.[]' FILE.json > FILE.jsonl" if kind == ".json" else ""
        raise BadInput(f"{path.name} has a name of no known kind; expected {expected}{lines}")
    return kind


def require_plain(folder: Path) -> None:
    """Raise BadInput if a folder holds a link (it may lead anywhere), or a pipe or device (it may never end)."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
                raise BadInput(f"{folder.name} holds {shown(path.name)}, no regular file; replace it by a regular file")


@contextlib.contextmanager
def readable(path: Path, what: str = "", advice: str = "") -> Iterator[None]:
    """Convert any error in this context to BadInput: for a damaged file libraries raise errors of every class."""
    try:
        yield
    except (BadInput, MissingDependency):
        raise
    except Exception as error:
        raise BadInput(f"{path.name} cannot be read{what} ({reason(error)}){advice}") from None


def reason(error: Exception) -> str:
    """Return an error's text in one line."""
    return shown(" ".join(str(error).split()) or type(error).__name__)
