"""`softdb verify --repair`: what is intact of a damaged database goes into a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from softdb.cli.show import print_json, print_table, safe, terminal

__all__ = ["repair"]

_SHOWN = 20  # lost records; --json gives up to a thousand


def repair(path: Path, destination: Path, words: dict[str, Any], as_json: bool) -> None:
    """Salvage a database, and say what was lost."""
    import softdb
    from softdb.text import copy_note

    report = softdb.salvage(path, destination, **words)
    copy_note(path, destination)
    if as_json:
        print_json(report)
        return
    console = terminal()
    console.print(
        f"{report['records']:,} records saved to {escape(str(destination))}, {report['lost_records']:,} lost; "
        f"{escape(str(path))} is as it was"
    )
    for note in report["notes"]:
        console.print(f"note: {safe(note)}")
    if report["unconfirmed_records"]:
        console.print(
            f"note: {report['unconfirmed_records']:,} records are saved whose id is not in the index of ids, "
            "or that are marked as deleted; --json lists them"
        )
    _show_lost(report["lost"], report["lost_records"])


def _show_lost(lost: list[dict[str, Any]], count: int) -> None:
    if not lost:
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("row", "id", "why lost"):
        table.add_column(name, no_wrap=True)
    for one in lost[:_SHOWN]:
        table.add_row(str(one["row"]), "" if one["id"] is None else safe(str(one["id"])), safe(one["why"]))
    print_table(table)
    if count > _SHOWN:
        terminal().print(f"… and {count - _SHOWN:,} more; --json lists {len(lost):,}")
