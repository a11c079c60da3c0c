"""softdb beyond one machine: many shards answer as one database. The core imports nothing of this."""

from softdb.cluster.actors import stop
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.distributed import Ranks
from softdb.cluster.handle import Cluster
from softdb.cluster.ingest import ingest
from softdb.cluster.local import Local
from softdb.cluster.opening import create, open, serve
from softdb.cluster.table_cluster import TableCluster

__all__ = ["Cluster", "DatabaseShard", "Local", "Ranks", "TableCluster", "create", "ingest", "open", "serve", "stop"]
