"""Shards in several processes or on several machines as one database.

This package may use `database`, `attend`'s answers and `formats`. It imports Ray, Lance and torch.distributed on first
use. Begin with `handle.py` (the caller), `shard.py` (the messages) and `database_shard.py` (the answers).
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
