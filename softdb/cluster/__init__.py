"""Shards in several processes or on several machines as one database.

This package may import `database`, `attend`, `lance_table` and `formats`. It imports Ray, Lance and torch.distributed
only when a function needs them. Begin with `handle.py` (the public class), `shard.py` (messages) and
`database_shard.py`.
"""

from softdb.cluster.actors import stop
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.distributed import Ranks
from softdb.cluster.handle import Cluster
from softdb.cluster.ingest import ingest
from softdb.cluster.local import Local
from softdb.cluster.table_cluster import TableCluster
from softdb.cluster.table_opening import create, open, serve

__all__ = ["Cluster", "DatabaseShard", "Local", "Ranks", "TableCluster", "create", "ingest", "open", "serve", "stop"]
