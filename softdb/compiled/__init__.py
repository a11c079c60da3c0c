"""Loops that numba compiles when they are first needed and keeps on disk; to import this package compiles nothing."""
