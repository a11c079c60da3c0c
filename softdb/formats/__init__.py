"""Import and export."""

from softdb.formats.arrays import numbers_in
from softdb.formats.lines import Fields, Header, Line, read_header, read_rows
from softdb.formats.records import Rows, export_records, import_records, is_vector, read_records, write_records

__all__ = [
    "Fields", "Header", "Line", "Rows", "export_records", "import_records", "is_vector", "numbers_in", "read_header",
    "read_records", "read_rows", "write_records",
]  # fmt: skip
