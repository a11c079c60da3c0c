"""Records and databases that tests share. A test that needs nothing special takes one of these.

    holding(keys, values, payloads)   a database of the records that the test gives
    filled(n, d, value_dim)           a database of awkward records: twins, opposites, a zero key
    labelled()                        a database of three records with labels
    indexed(keys)                     a database of many records, which answers by an index
    snapshot(keys, values)            a snapshot without a database
    awkward(random), clusters(random), near(random, keys, q)    keys and queries alone

`softdb.open(None, dim=2)` is the empty database. `worlds.suite` has the 34 worlds on which error bars must hold, and
`worlds.exact` their exact answers. The modules `attentions`, `memories`, `retrieval`, `trainings` and `views` serve the
tests of `softdb.nn` and `softdb.train`.
"""

from worlds.databases import D, N, V, filled, holding, index_report, indexed, labelled
from worlds.records import Array, awkward, clusters, near, snapshot

__all__ = [
    "Array", "D", "N", "V", "awkward", "clusters", "filled", "holding", "index_report", "indexed", "labelled", "near",
    "snapshot",
]  # fmt: skip
