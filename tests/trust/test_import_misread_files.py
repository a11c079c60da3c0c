"""Files that an import once misread are imported exactly or refused by name."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import faiss
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import softdb
from softdb.formats import Fields, import_records, read_records


@pytest.fixture
def db() -> softdb.SoftDB:
    return softdb.open(None, dim=2, metric="dot")


KEYS = np.array([[1, 2], [3, 4]], np.float32)


def faiss_file(index: Any, folder: Path) -> Path:
    index.add(KEYS)
    faiss.write_index(index, str(folder / "x.faiss"))
    return folder / "x.faiss"


def by_lists(folder: Path) -> Path:
    quantiser = faiss.IndexFlatL2(2)
    index = getattr(faiss, "IndexIVFFlatDedup")(quantiser, 2, 1)  # noqa: B009 - the stubs lack it
    index.train(KEYS)
    return faiss_file(index, folder)


def far_date(folder: Path) -> Path:
    days = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"id": [1], "key": [[1.0, 2.0]], "day": days}), folder / "x.parquet")
    return folder / "x.parquet"


def csv_file(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "x.csv").write_text(text, newline="")
        return folder / "x.csv"

    return write


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another metric of FAISS": (
        lambda f: faiss_file(faiss.IndexFlat(2, faiss.METRIC_L1), f),
        "a metric that softdb does not have",
    ),
    "equal vectors kept once": (by_lists, "IndexIVFFlatDedup, of which no vectors can be read"),
    "a date after the year 9999": (far_date, r"x\.parquet, rows 0 to 0: cannot be read .*; cast the column"),
    "a column twice": (csv_file('id,key,a,a\nx,"[1,2]",1,2\n'), "several columns 'a'; rename them"),
    "lines that end in CR": (csv_file('id,key\rx,"[1,2]"\r'), "not CSV"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_misread_files_are_refused_by_name(db: softdb.SoftDB, tmp_path: Path, case: str) -> None:
    made, message = REFUSED[case]
    with pytest.raises(softdb.BadInput, match=message):
        import_records(db, made(tmp_path))
    assert len(db) == 0


def test_attributes_of_hdf5_in_bytes_are_read(db: softdb.SoftDB, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["train"] = KEYS
        file.attrs["distance"] = np.bytes_("dot")
    import_records(db, tmp_path / "x.hdf5")
    assert db.get([0, 1]).keys.tolist() == KEYS.tolist()


def test_long_cells_and_quoted_tabs_come_in_beside_keys(db: softdb.SoftDB, tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # as in a fresh process
    np.save(tmp_path / "k.npy", KEYS)
    (tmp_path / "x.tsv").write_text('id\tt\na\t"one\nline"\nb\t' + "long" * 50_000 + "\n")
    read = read_records(tmp_path / "x.tsv", keys=tmp_path / "k.npy", fields=Fields(id="id", text="t"))
    import_records(db, read)
    assert db["a"].text == "one\nline"
    assert len(db["b"].text or "") == 200_000


def test_dates_that_python_can_represent_are_imported(db: softdb.SoftDB, tmp_path: Path) -> None:
    when = pa.array([datetime(2020, 1, 2, tzinfo=timezone.utc)])
    pq.write_table(pa.table({"id": [1], "key": [[1.0, 2.0]], "at": when}), tmp_path / "x.parquet")
    import_records(db, tmp_path / "x.parquet")
    assert str(db[1].payload["at"]).startswith("2020-01-02")
