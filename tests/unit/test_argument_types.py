"""Every argument of every verb, given odd objects: it works, or an error of softdb's own family says what was expected.

An error of numpy, torch or Python itself is neither.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

import softdb
from softdb import nn, scores
from softdb.text import HashedNGrams, SentenceEncoder

Q, T = np.ones((1, 3), np.float32), torch.ones(1, 3)


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=layout)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


ODD: dict[str, Callable[[], Any]] = {
    "nested": nested, "jagged": lambda: nested(torch.jagged), "nested in a list": lambda: [nested()],
    "sparse": T.to_sparse, "sparse number": lambda: torch.ones(()).to_sparse(), "csr": T.to_sparse_csr,
    "mkldnn": T.to_mkldnn, "quantised": quantised, "quantised in a list": lambda: [quantised()],
    "meta": lambda: T.to("meta"), "meta number": lambda: torch.ones((), device="meta"),
    "meta in a list": lambda: [torch.ones((), device="meta")], "float8": lambda: T.to(torch.float8_e4m3fn),
    "uint64": lambda: T.to(torch.uint64), "complex tensor": lambda: T.to(torch.complex64), "bools": lambda: T.bool(),
    "negated view": lambda: T.to(torch.complex64).conj().imag, "several": lambda: torch.ones(2),
    "no rows": lambda: torch.zeros(0, 3), "list of matrices": lambda: [torch.ones(2, 2)],
    **{f"array {kind}": np.ones((1, 3), kind).copy for kind in (">f2", ">f4", ">f8", ">i4", ">u8", "g")},
    **{f"line {kind}": np.ones(1, kind).copy for kind in (">f4", ">i8", ">u8", "?")},
    "big-endian texts": lambda: np.array(["a"], ">U3"), "big-endian in a list": lambda: [np.ones(3, ">f4")],
    "array of objects": lambda: np.array([object(), None]), "array of bytes": lambda: np.array([b"a"]),
    "dates": lambda: np.array(["2000-01-01"], "M8[D]"), "structured": lambda: np.zeros(2, "i4,f4"),
    "void": lambda: np.zeros(2, "V4"), "array number": lambda: np.array(3), "array 4d": lambda: np.ones((1, 1, 1, 3)),
    "read-only": lambda: np.broadcast_to(np.float32(1), (1, 3)), "longdouble": lambda: np.longdouble(1),
    "None": lambda: None, "nan": lambda: math.nan, "-1": lambda: -1, "huge": lambda: 10**5000, "text": lambda: "text",
    "surrogate": lambda: "\ud800", "bytes": bytes, "complex": lambda: 1j, "sNaN": lambda: decimal.Decimal("sNaN"),
    "date": lambda: datetime.date(2000, 1, 1), "dict": lambda: {"a": 1}, "set": lambda: {1, 2}, "object": object,
    "unshown": Unshown, "function": lambda: lambda *_, **__: None, "none": lambda: [],
    "ragged": lambda: [[1], [1, 2]], "list of None": lambda: [None], "mixed": lambda: [1, "a", None],
}  # fmt: skip
FEW = ("nested", "meta number", "several", "array >f4", "line >i8", "huge")


def labelled() -> softdb.SoftDB:
    return holding([[1, 0, 0], [0, 1, 0]], [0, 1], ids=["a", 1], num_classes=4)


def drawn(**more: Any) -> dict[str, Any]:
    return {"queries": Q, "temperature": 1.0, "where": None, "generator": None, **more}


SURE: dict[str, Any] = {"rtol": 0.1, "confidence": 0.9, "max_draws": None}
WRITTEN: dict[str, Any] = {"ids": ["b"], "keys": Q, "values": np.ones((1, 2)), "payloads": [1], "texts": ["t"]}
VERBS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {  # and arguments that it takes
    "insert": (softdb.SoftDB.insert, WRITTEN),
    "insert without a key": (softdb.SoftDB.insert, {"keys": [None], "ids": ["b"], "values": None, "texts": ["t"]}),
    "insert labels": (lambda _, **given: labelled().insert(**given), {"ids": ["b"], "keys": Q, "values": [1]}),
    "upsert": (softdb.SoftDB.upsert, WRITTEN),
    "update": (softdb.SoftDB.update, WRITTEN | {"ids": ["a"]}),
    "delete": (softdb.SoftDB.delete, {"ids": ["a"]}),
    "delete where": (softdb.SoftDB.delete, {"where": {"x": 1}}),
    "get": (softdb.SoftDB.get, {"ids": ["a"]}),
    "item": (softdb.SoftDB.__getitem__, {"name": "a"}),
    "in": (softdb.SoftDB.__contains__, {"name": "a"}),
    "count": (softdb.SoftDB.count, {"where": {"x": 1}}),
    "scan": (lambda db, **given: list(db.scan(**given)), {"batch_size": 1, "where": {"x": 1}}),
    "index_field": (lambda db, name: db.index_field(name), {"name": "x"}),
    "index_text": (softdb.SoftDB.index_text, {"tokenizer": "words"}),
    "search": (softdb.SoftDB.search, {"queries": Q, "k": 2, "exclude_ids": None, "offset": 0}),
    "search, diverse": (softdb.SoftDB.search, {"queries": Q, "k": 1, "diversity": 0.5, "fetch_k": 2}),
    "search, radius": (softdb.SoftDB.search, {"queries": Q, "radius": 0.5}),
    "search, groups": (softdb.SoftDB.search, {"queries": Q, "group_by": "x", "group_size": 1}),
    "search, texts": (softdb.SoftDB.search, {"queries": Q, "texts": ["one"], "mode": "hybrid", "fusion": "scores"}),
    "attend": (softdb.SoftDB.attend, drawn(score=None, weights=None, k=None, mask=None)),
    "attend, estimated": (softdb.SoftDB.attend, {"queries": Q, **SURE, "generator": None}),
    "attend, exact": (softdb.SoftDB.attend, {"queries": Q, "rtol": None, "atol": 0.0, "max_draws": None}),
    "sample": (softdb.SoftDB.sample, drawn(n=1, score=None, mask=None)),
    "log_partition": (softdb.SoftDB.log_partition, drawn(**SURE, score=None)),
    "log_density": (softdb.SoftDB.log_density, {"queries": Q, "kernel": scores.Gaussian(1.0), **SURE}),
    "count_within": (softdb.SoftDB.count_within, {"queries": Q, "radius": 0.5, "atol": 0.0, **SURE}),
    "explain": (lambda db, k: db.attend(Q).explain(k), {"k": 2}),
    "build_index": (softdb.SoftDB.build_index, {"kind": "flat", "recall": 0.9, "k": 1, "queries": Q, "memory": None}),
    "watch": (softdb.SoftDB.watch, {"share": 0.1, "window": 10}),
    "to": (softdb.SoftDB.to, {"device": "cpu", "dtype": None}),
    "reembed": (softdb.SoftDB.reembed, {"encoder": HashedNGrams(3), "missing": None, "batch_size": 2}),
    "open": (
        lambda _, **given: softdb.open(None, **given),
        {"dim": 3, "value_dim": 2, "num_classes": None, "dtype": None, "metric": None, "mode": "rw", "device": None}
        | {"durability": "full", "encoder": None, "fields": None},
    ),
    "attention": (
        lambda _, **given: softdb.attention(**given),
        {"query": T, "key": T, "value": T, "score": None, "temperature": 1.0, "weights": None, "mask": None}
        | {"valid_len": None},
    ),
    "linear_cross_entropy": (
        lambda _, **given: softdb.linear_cross_entropy(**given),
        {"queries": T, "weight": T, "targets": torch.zeros(1, dtype=torch.int64), "temperature": 1.0, "k": None}
        | {"max_draws": None, "ignore_index": -100, "reduction": "mean", "sparse": None, "generator": None},
    ),
    "retrieval_loss": (nn.retrieval_loss, drawn(positives=["a"], score=None, k=None, rtol=None, reduction="mean")),
    "label_loss": (lambda _, **given: nn.label_loss(labelled(), **given), {"queries": Q, "labels": [1]}),
    "pooled_loss": (nn.pooled_loss, {"queries": Q, "targets": torch.ones(1, 2), "reduction": "mean"}),
    "info_nce": (nn.info_nce, drawn(positives=["a"], negatives=1, skip=0, among=None)),
    "hard_attention": (nn.hard_attention, drawn()),
    "straight_through": (nn.straight_through, drawn(relaxation=1.0, k=None)),
    "gradient_report": (nn.gradient_report, drawn(k=1, rtol=None, atol=0.0, upstream=None)),
    "leave_one_out": (lambda _, reward: nn.leave_one_out(reward), {"reward": torch.ones(2, 2)}),
    "reinforce": (
        lambda _, **given: nn.reinforce(**given),
        {"reward": torch.ones(2, 2), "log_prob": torch.ones(2, 2), "baseline": None},
    ),
    "Memory": (nn.Memory, {"k": 2, "temperature": 1.0, "reindex": None, "overfetch": 2}),
    "Memory, called": (lambda db, queries: nn.Memory(db, k=2)(queries), {"queries": T}),
    "View": (nn.View, {"encoder": torch.nn.Linear(3, 3), "dim": None, "recall": 0.9, "index": "flat"}),
    "KernelRegressor": (nn.KernelRegressor, {"kernel": "gaussian", "bandwidth": 1.0}),
    "Gaussian": (lambda _, bandwidth: scores.Gaussian(bandwidth), {"bandwidth": 1.0}),
    "SentenceEncoder": (lambda _, **given: SentenceEncoder(**given), {"model": "m", "projection": None, "name": ""}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of torch, about layouts that are being tried out; of filters without a match
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("which", [pytest.param(FEW, id="few"), pytest.param(ODD, marks=pytest.mark.slow, id="all")])
def test_an_odd_argument_is_taken_or_refused_by_a_typed_error(verb: str, which: Any) -> None:
    call, given = VERBS[verb]
    failures = []
    for argument in given:
        with softdb.open(None, dim=3, value_dim=2) as db:
            db.index_text()
            for name in which:
                db.upsert(["a", 1], [[1, 0, 0], [0, 1, 0]], np.ones((2, 2)), [{"x": 1}, None], texts=["one", "two"])
                try:
                    call(db, **{**given, argument: ODD[name]()})
                except softdb.SoftDBError:
                    continue
                except Exception as error:  # of whatever kind: the test is about kinds
                    failures.append(f"{argument} = {name}: {type(error).__name__}: {str(error)[:80]}")
    assert not failures, "\n".join(failures)
