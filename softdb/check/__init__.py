"""Validation: arguments become canonical here, or a BadInput that says what came, what was expected, what to do.

May touch NumPy and torch; no files, no database. Begin in `plain.py`, then the file named after what you check.
"""

from softdb.check.arrays import *  # noqa: F403 - keys, values, queries, masks; encoders, devices
from softdb.check.extents import *  # noqa: F403 - k and radius, tolerances, excluded ids, generators
from softdb.check.ids import *  # noqa: F403 - ids
from softdb.check.payload import *  # noqa: F403 - payloads
from softdb.check.plain import *  # noqa: F403 - numbers, choices, lengths; how messages quote a value
from softdb.check.schemas import *  # noqa: F403 - metric and columns of a database
from softdb.check.texts import *  # noqa: F403 - texts of records
from softdb.check.words import *  # noqa: F403 - searches by text
