"""Types of what a database is asked with and given, for annotations; at run time they are text."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Array", "Device", "Ids", "IdsPerQuery", "Keys", "Numbers", "Texts", "Values", "Vectors"]

Array: TypeAlias = "Tensor | NDArray[Any]"
# a row of numbers or a table of them; queries that are tensors keep their graph
Numbers: TypeAlias = "Array | Sequence[float] | Sequence[Sequence[float]] | Sequence[Array]"
# the same, or texts where the database has an encoder
Vectors: TypeAlias = "Numbers | str | Sequence[str]"
# keys of new records: the same, with None in a list for a record without one
Keys: TypeAlias = "Vectors | Sequence[Sequence[float] | Array | str | None]"
# values of new records: numbers or labels, None in a list for a record without a key
Values: TypeAlias = "Numbers | Sequence[float | Sequence[float] | Array | None]"
# texts of records, None for one that has none; one alone is a batch of one
Texts: TypeAlias = "str | Sequence[str | None] | NDArray[Any]"
# one id alone is a batch of one
Ids: TypeAlias = "int | str | Iterable[int | str] | NDArray[Any] | Tensor"
# one list of ids for every query, or one for each
IdsPerQuery: TypeAlias = "Ids | Iterable[Ids]"
# one, or several GPUs that share the records
Device: TypeAlias = "str | int | torch.device | Sequence[str | int | torch.device]"
