"""`SoftDB`, the only stateful class: it checks arguments, then calls store, index and answers. No mathematics.

This folder may use the public parts of store, index and answers. Begin with `handle.py`: `SoftDB` has the methods of a
database, `Verbs` and `Questions` those that a cluster has, too. Other folders use `Core`.
"""

from softdb.database.core import Core
from softdb.database.database_core import DatabaseCore
from softdb.database.handle import SoftDB
from softdb.database.verbs import Verbs

__all__ = ["Core", "DatabaseCore", "SoftDB", "Verbs"]
