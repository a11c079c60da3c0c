"""Create an empty table for `softdb.lance_table.truth.Truth`."""

from __future__ import annotations

import json
from pathlib import Path

from softdb.check import Schema
from softdb.errors import BadInput, WriteFailed
from softdb.lance_table.storage import LANCE, Synced, cause
from softdb.store import files
from softdb.tables.arrow_tables import column_types, needed

KEY = {b"lance-schema:unenforced-primary-key": b"true"}  # metadata of the column of ids


def create(
    url: str, options: dict[str, str] | None, schema: Schema, shards: int, replicas: int, ids: str, encoder: str | None
) -> None:
    """Create an empty table. Raises BadInput if the address holds a table already, and WriteFailed."""
    pa, lance = (needed(module, "cluster", "a cluster") for module in ("pyarrow", "lance"))
    identity = pa.field("id", pa.int64() if ids == "int" else pa.string(), False, KEY)
    columns = [identity, *(pa.field(name, kind) for name, kind in column_types(schema).items())]
    header = {**schema.described, "fields": (), "encoder": encoder}
    layout = pa.schema(columns, {"softdb": json.dumps(header, ensure_ascii=False)})
    try:
        dataset = lance.write_dataset(layout.empty_table(), url, mode="create", storage_options=options)
    except LANCE as error:
        if "already exists" in str(error):
            raise BadInput(f"{url} holds a table already; open it, or choose another address") from None
        raise WriteFailed(f"{url} cannot be made ({cause(error)}); choose another address") from error
    dataset.update_config({"softdb.shards": str(shards), "softdb.replicas": str(replicas)})
    if "://" not in url:
        Synced(Path(url)).sync()
        files.sync_directory(Path(url).parent)
