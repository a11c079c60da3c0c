"""Validation: convert arguments to a canonical form, or raise a BadInput with what came, what was expected, what to do.

It uses NumPy and torch, but no files and no database. Begin in `plain.py`, then read the file of one argument.
"""

from softdb.check.arrays import *  # noqa: F403 - keys, values, queries, masks; encoders, devices
from softdb.check.extents import *  # noqa: F403 - k and radius, tolerances, excluded ids, generators
from softdb.check.ids import *  # noqa: F403 - ids
from softdb.check.payload import *  # noqa: F403 - payloads
from softdb.check.plain import *  # noqa: F403 - numbers, choices, lengths; how messages quote a value
from softdb.check.schemas import *  # noqa: F403 - metric and columns of a database
from softdb.check.texts import *  # noqa: F403 - texts of records
from softdb.check.words import *  # noqa: F403 - searches by text
