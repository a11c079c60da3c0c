"""The benchmark tool, `softdb bench`: engines over a dataset, answers checked before a clock starts.

datasets (and files) -> truth -> engines (and peers) -> grid -> report -> draw.
"""
