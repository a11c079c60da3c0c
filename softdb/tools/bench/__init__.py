"""The harness of `softdb bench` and of the repository's benchmarks: it checks answers before it measures times.

It queries databases and other engines by their public calls. Begin at `grid.run`.
"""
