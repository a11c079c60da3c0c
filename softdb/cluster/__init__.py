"""softdb beyond one machine: many shards answer as one database. The core imports nothing of this."""
