"""Validation: arguments become canonical here, or a BadInput that says what came, what was expected, what to do."""

from softdb.check.arrays import Array, Encoder, device, encoded, finite, mask, matrix, precise, queries, values
from softdb.check.asking import Asked, Tolerance, asked, excluded, generator, least_score, tolerance
from softdb.check.ids import Id, identifiers, padded
from softdb.check.npy import numbers_in
from softdb.check.payload import MAX_DEPTH, json_text, payloads
from softdb.check.plain import filled, integer, one_of, positive, share, shown
from softdb.check.schemas import MAX_DIM, Metric, Schema, schema

__all__ = [
    "MAX_DEPTH",
    "MAX_DIM",
    "Array",
    "Asked",
    "Encoder",
    "Id",
    "Metric",
    "Schema",
    "Tolerance",
    "asked",
    "device",
    "encoded",
    "excluded",
    "filled",
    "finite",
    "generator",
    "identifiers",
    "integer",
    "json_text",
    "least_score",
    "mask",
    "matrix",
    "numbers_in",
    "one_of",
    "padded",
    "payloads",
    "positive",
    "precise",
    "queries",
    "schema",
    "share",
    "shown",
    "tolerance",
    "values",
]
