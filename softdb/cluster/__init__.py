"""softdb beyond one machine: many shards answer as one database. The core imports nothing of this."""

from softdb.cluster.actors import stop
from softdb.cluster.handle import Cluster
from softdb.cluster.ingest import ingest
from softdb.cluster.opening import create, open, serve
from softdb.cluster.table_cluster import TableCluster

__all__ = ["Cluster", "TableCluster", "create", "ingest", "open", "serve", "stop"]
