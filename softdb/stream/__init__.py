"""The exact soft query over every record that takes part, in blocks: memory that does not grow with the database."""

from softdb.stream.blocks import Task
from softdb.stream.columns import Columns, Source
from softdb.stream.exact import stream
from softdb.stream.scan import scan

__all__ = ["Columns", "Source", "Task", "scan", "stream"]
