"""Import and export of records.

This package may use a database's public calls and the user's files. A separate process (`sandbox.py`) reads formats
whose libraries are unsafe for untrusted files. Begin in `importing.py` and `exporting.py`.
"""

from softdb.formats.arrays import numbers_in
from softdb.formats.exporting import export_records, write_records
from softdb.formats.importing import import_records, is_vector, read_records
from softdb.formats.lines import Line, read_header, read_rows
from softdb.tables.rows import Fields, Header, Rows

__all__ = [
    "Fields", "Header", "Line", "Rows", "export_records", "import_records", "is_vector", "numbers_in", "read_header",
    "read_records", "read_rows", "write_records",
]  # fmt: skip
