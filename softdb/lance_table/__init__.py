"""The Lance table that stores the records of a cluster: its versions, the changes between them, and its writes."""
