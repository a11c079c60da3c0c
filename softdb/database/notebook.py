"""A database as a table, for notebooks."""

from __future__ import annotations

from softdb.answers import Records
from softdb.reports import Stats
from softdb.visible import table

FIRST = 5  # number of records to show


def described(name: str, stats: Stats, first: Records | None) -> str:
    """Return an HTML table of a database with this name, and a table of its first records."""
    index, vectors = stats.index, f"v = {stats.value_dim}, {stats.dtype}"
    if stats.value_dim is None:
        vectors = "the keys" if stats.num_classes is None else f"labels of {stats.num_classes} classes"
    facts = {
        "records": f"{stats.records:,}" + f", {stats.keyless:,} without a key" * (stats.keyless > 0),
        "keys": f"d = {stats.dim or 'undecided'}, {stats.dtype}, {stats.metric}",
        "values": vectors,
        "encoder": stats.encoder or "none",
        "index": "none, searches are exact" if index is None else f"{index.kind}, recall {index.recall:.3f}",
        "fields": ", ".join(stats.fields) or "none declared",
        "text index": stats.text_index or "none",
        "size": f"{stats.bytes:,} bytes",
    }
    return table(["", name], facts.items(), "") + ("" if first is None else first._repr_html_())
