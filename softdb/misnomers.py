"""Names that other libraries give to softdb's calls, arguments and columns; errors name softdb's own instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CALLS = {
    "add": "insert", "add_texts": "insert(texts=…)", "merge_insert": "upsert", "set_payload": "update(…, merge=True)",
    "query": "search", "query_points": "search", "similarity_search": "search", "retrieve": "get",
    "scroll": "get(where=…, limit=…, offset=…)", "peek": "get(limit=…)", "head": "get(limit=…)", "count_rows": "count",
    "shape": "len(db)", "create_index": "build_index", "create_fts_index": "index_text", "optimize": "compact",
    "drop": "delete(where={})", "reset": "delete(where={})", "clear": "delete(where={})", "info": "stats",
    "describe": "stats", "schema": "stats", "columns": "to_pandas().columns", "ids": "to_pandas(['id'])",
    "encoder": "encoder_name", "to_polars": "to_arrow, and polars.from_arrow", "to_dict": "to_pandas",
    "distances": "scores, where larger is closer", "distance": "score, where larger is closer", "documents": "texts",
    "document": "text", "metadatas": "payloads", "metadata": "payload", "embeddings": "keys", "embedding": "key",
    "vectors": "keys", "vector": "key", "connect": "open", "Client": "open", "PersistentClient": "open",
    "create_collection": "open", "get_or_create_collection": "open", "create_table": "open", "open_table": "open",
    "import_records": "formats.import_records", "read_records": "formats.read_records",
}  # fmt: skip
ARGUMENTS = {  # and options of a shell
    "documents": "texts", "text": "texts", "embeddings": "keys", "vectors": "keys", "vector": "keys", "key": "keys",
    "metadatas": "payloads", "payload": "payloads", "id": "ids", "data": "the first argument", "n_results": "k",
    "top_k": "k", "n": "k", "limit": "k", "query_texts": "queries", "query_embeddings": "queries", "query": "queries",
    "query_vector": "queries", "filter": "where", "query_filter": "where",
    "where_document": "where={'$text': {'$contains': …}}", "include": "not needed: hits read columns when asked",
    "score_threshold": "radius", "tau": "temperature", "embedding_function": "encoder", "model": "encoder",
    "space": "metric", "distance": "metric", "text_column": "fields={'text': …}", "vector_column": "fields={'key': …}",
    "read_only": "mode='r'",
}  # fmt: skip
COMMANDS = {
    "ls": "get", "list": "get", "head": "get", "query": "search", "add": "insert", "create": "import", "stats": "info",
    "describe": "info", "serve": "explore", "rm": "delete",
}  # fmt: skip


def own_name(name: str, names: Mapping[str, str], known: Iterable[str]) -> str:
    """Return the end of an error's message: softdb's name for another library's, or the most similar one; or ""."""
    similar = difflib.get_close_matches(name, [word for word in known if not word.startswith("_")], 1, 0.75)
    return f"; in softdb it is {names[name]}" if name in names else f"; did you mean {similar[0]}?" if similar else ""


def require_known(call: str, given: Iterable[str], known: Mapping[str, inspect.Parameter]) -> None:
    """Raise TypeError for the first of the given arguments that a call does not have."""
    for name in given:
        if name not in known and not any(own.kind is own.VAR_KEYWORD for own in known.values()):
            own = {**ARGUMENTS, "columns": "fields"} if "fields" in known else {**ARGUMENTS, "fields": "columns"}
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{own_name(name, own, known)}")


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function: `require_known` names the right argument in place of an unknown one."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        require_known(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return call


class OwnNames:
    """Base of classes whose errors for a missing attribute name softdb's own."""

    if not TYPE_CHECKING:  # type checkers report unknown names

        def __getattr__(self, name: str) -> Any:
            own = "" if name.startswith("_") else own_name(name, CALLS, dir(type(self)))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{own}")
