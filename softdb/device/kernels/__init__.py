"""Inner loops in Triton. Imported where they run, for Triton is not everywhere.

Letters: h heads, q queries, n records, d key width, v value width. A program takes BQ queries and a range of the
records, BN at a time; keys BD numbers at a time, values BV. Heads, rows and their offsets are int64. The last dimension
of every tensor is contiguous.
"""
