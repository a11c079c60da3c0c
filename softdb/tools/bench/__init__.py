"""The harness of `softdb bench` and of the repository's benchmarks: answers are checked before a clock starts.

It asks a database by its public calls and other engines by theirs. Begin at `grid.run`.
"""
