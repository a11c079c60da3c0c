"""`SoftDB`, the only stateful class: it checks arguments, then calls store, index and answers. No mathematics.

May touch the public parts of store, index and answers. Begin with `handle.py`: `SoftDB` has the verbs of a database,
`Verbs` and `Questions` those that a cluster has, too. Other folders work with `Core`.
"""

from softdb.database.core import Core
from softdb.database.database_core import DatabaseCore
from softdb.database.handle import SoftDB
from softdb.database.verbs import Verbs

__all__ = ["Core", "DatabaseCore", "SoftDB", "Verbs"]
