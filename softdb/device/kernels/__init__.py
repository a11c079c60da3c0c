"""Inner loops in Triton, imported only when they run, since Triton is not available everywhere.

Letters: h heads, q queries, n records, d key width, v value width. A program handles BQ queries and a range of the
records, BN records at a time, BD numbers of the keys and BV numbers of the values at a time. Heads, rows and their
offsets are int64. The last dimension of every tensor is contiguous.
"""
