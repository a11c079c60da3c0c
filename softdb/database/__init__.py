"""`SoftDB`, the one stateful class: it checks, then asks store, index and answers. No mathematics.

May touch the store, the index and the answers, each through its face. Begin with `handle.py`: `SoftDB` has the verbs of
a database, `Verbs` and `Questions` those that a cluster has, too; `Core` is what other rooms are given.
"""

from softdb.database.core import Core
from softdb.database.database_core import DatabaseCore
from softdb.database.handle import SoftDB
from softdb.database.verbs import Verbs

__all__ = ["Core", "DatabaseCore", "SoftDB", "Verbs"]
