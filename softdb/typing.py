"""Types of arguments and answers, for annotations; at run time they are strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, Protocol

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    class _ArrowStream(Protocol):
        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...

    class _StoredRecord(Protocol):
        @property
        def id(self) -> int | str: ...
        @property
        def payload(self) -> Any: ...


__all__ = ["Array", "Device", "Ids", "IdsOrRows", "IdsPerQuery", "Keys", "Numbers", "Texts", "Values", "Vectors"]

Array: TypeAlias = "Tensor | NDArray[Any]"
#: one vector or several; tensors as queries keep their graph
Numbers: TypeAlias = "Array | Sequence[float] | Sequence[Sequence[float]] | Sequence[Array]"
#: numbers, or texts if the database has an encoder
Vectors: TypeAlias = "Numbers | str | Sequence[str]"
#: keys of new records: vectors, with None in a list for a record without a key
Keys: TypeAlias = "Vectors | Sequence[Sequence[float] | Array | str | None]"
#: values of new records: numbers or labels, None in a list for a record without a key
Values: TypeAlias = "Numbers | Sequence[float | Sequence[float] | Array | None]"
#: texts of records, None for a record without a text; a single text is a batch of one
Texts: TypeAlias = "str | Sequence[str | None] | NDArray[Any]"
#: ids; a single id is a batch of one
Ids: TypeAlias = "int | str | Iterable[int | str] | NDArray[Any] | Tensor"
#: an id, or a row: a dict, or a record of softdb
IdOrRow: TypeAlias = "int | str | Mapping[str, Any] | _StoredRecord"
#: ids, or rows: also a frame, an Arrow table or a dataset; a single id or row is a batch of one
IdsOrRows: TypeAlias = "IdOrRow | Iterable[IdOrRow] | Array | _ArrowStream"
#: one list of ids for all queries, or one list for each query
IdsPerQuery: TypeAlias = "Ids | Iterable[Ids]"
#: one device, or several GPUs that share the records
Device: TypeAlias = "str | int | torch.device | Sequence[str | int | torch.device]"
