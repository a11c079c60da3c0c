"""Inner loops in Triton. softdb imports them only to run them, since Triton is not available everywhere.

Letters: h heads, q queries, n records, d key width, v value width. A program (an instance of a kernel) handles BQ
queries and one range of the records. It reads tiles of BN records, with BD elements of keys and BV elements of values.
Heads, rows and offsets are int64. The last dimension of every tensor is contiguous.
"""
