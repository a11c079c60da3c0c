"""The loops of the exact soft query on a CPU, compiled by numba when they are first needed and kept on disk."""

from softdb.compiled.loops import GROUPS, backward, forward
from softdb.compiled.parts import BLOCK, Column, Part, Scratch, Task
from softdb.compiled.tile import FEW, LANES

__all__ = ["BLOCK", "FEW", "GROUPS", "LANES", "Column", "Part", "Scratch", "Task", "backward", "forward"]
