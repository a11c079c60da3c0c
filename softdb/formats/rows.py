"""Types that formats share: names of fields, headers of exports, batches of records, errors that name a file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from softdb import check
from softdb.check import Id, shown
from softdb.errors import BadInput, MissingDependency

OnError: TypeAlias = Callable[[BadInput], None]  # told of a bad row, which is then passed over
OWN = {"id", "id_is_int", "key", "value", "text", "payload"}  # columns of a table that softdb has written


@dataclass(frozen=True)
class Fields:
    """Names of fields. The other fields are the payload; where `payload` is the only other one, its value is."""

    id: str | None = "id"  # None: records are numbered from 0
    key: str | None = None  # a list of numbers; None: "key", or with `text` what the encoder makes of that
    text: str | None = None  # the record's text
    value: str | None = None  # a list of numbers, or an integer label

    def __post_init__(self) -> None:
        if self.key is None and self.text is None:
            object.__setattr__(self, "key", "key")


@dataclass(frozen=True)
class Header:
    """The database that an exported file is of, from its first line `{"softdb": {…}}`."""

    dim: int
    value_dim: int | None
    num_classes: int | None
    dtype: str
    metric: str
    fields: tuple[str, ...]  # declared fields of the payload
    encoder: str | None = None  # the name of the encoder of texts, as `softdb import --encoder` takes it

    @classmethod
    def of(cls, said: Any, where: str) -> Header:
        """Check the header of an exported file. Raises BadInput."""
        try:
            header = cls(**{**said, "fields": tuple(said["fields"])})
            check.schema(**header.schema, stored=None)
            if not all(isinstance(text, str) for text in (*header.fields, header.encoder or "")):
                raise ValueError("fields and encoder are texts")
        except (TypeError, KeyError, ValueError) as error:
            raise BadInput(f"{where}: not the header of an export ({error}); mend it") from None
        return header

    @property
    def schema(self) -> dict[str, Any]:
        """Arguments of `softdb.open` for such a database."""
        return {name: getattr(self, name) for name in ("dim", "value_dim", "num_classes", "dtype", "metric")}


def is_own(names: Collection[str], fields: Fields, header: Header | None = None) -> bool:
    """Return True where columns are those of an export, and the fields do not say otherwise."""
    columns = header is not None or {"id", "key", "text", "payload"} <= set(names) <= OWN
    return columns and fields.text in (None, "text")


@dataclass
class Rows:
    """A batch of consecutive records of a file."""

    path: Path
    header: Header | None  # of the file
    share: float  # of the file, read so far
    lines: Sequence[int]  # n, where each stands
    ids: list[Id]  # n
    keys: Any  # (n, d) numbers, or n texts to encode; in a list None where a record has none
    values: Any  # n in an array or a list, where the fields name one
    payloads: list[Any]  # n
    texts: list[str | None]  # n, which the records keep
    what: str = "line"  # what `lines` count: lines from 1, or rows from 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> str:
        """File and lines of the batch, for a message."""
        return self.at(0) if len(self) == 1 else f"{self.path.name} {self.what}s {self.lines[0]} to {self.lines[-1]}"

    def at(self, i: int) -> str:
        """File and line of a record, for a message."""
        return f"{self.path.name} {self.what} {self.lines[i]}"

    def some(self, places: list[int]) -> Rows:
        """The records at some places in the batch."""
        columns = (self.lines, self.ids, self.keys, self.values, self.payloads, self.texts)
        lines, ids, keys, values, payloads, texts = (_some(column, places) for column in columns)
        return replace(self, lines=lines, ids=ids, keys=keys, values=values, payloads=payloads, texts=texts)


def _some(column: Any, places: list[int]) -> Any:
    return column[places] if isinstance(column, np.ndarray) else column and [column[i] for i in places]


def text_in(row: dict[str, Any], name: str, needed: bool, empty: Collection[str] = ()) -> str | None:
    """Return the text of a row; None where that is null, or its cell empty, unless a text is needed."""
    text = row.get(name)
    if isinstance(text, str) or (text is None and not needed and (name in row or name in empty)):
        return text
    raise BadInput(f"field {name!r} is {shown(text)}, not a text; its fields are {shown(list(row))}")


def passed_over(rows: Rows, bad: dict[int, str], on_error: OnError | None) -> Iterator[Rows]:
    """The good rows, where `bad` has what is wrong with the others.

    Without `on_error` those before the first bad one, and then its BadInput.
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
    """The suffix before `.gz` of a file that is there, one of `kinds`."""
    if not path.is_file():
        raise BadInput(f"{path} is not a file; give one of {expected}")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in kinds:
        raise BadInput(f"{path.name} has a name of no known kind; expected {expected}")
    return kind


def require_plain(folder: Path) -> None:
    """BadInput where a folder holds a link, a pipe or a device, which may lead anywhere or never end."""
    for place, folders, files in os.walk(folder):
        for part in (Path(place, name) for name in (*folders, *files)):
            if not stat.S_ISREG(mode := part.lstat().st_mode) and not stat.S_ISDIR(mode):
                raise BadInput(f"{folder.name} holds {shown(part.name)}, a link or no file; put a copy there")


@contextlib.contextmanager
def readable(path: Path, what: str = "", advice: str = "") -> Iterator[None]:
    """Raise BadInput for the errors of other packages, which are of every kind for a file that is damaged."""
    try:
        yield
    except (BadInput, MissingDependency):
        raise
    except Exception as error:
        raise BadInput(f"{path.name} cannot be read{what} ({reason(error)}){advice}") from None


def reason(error: Exception) -> str:
    """An error in one line."""
    return shown(" ".join(str(error).split()) or type(error).__name__)
