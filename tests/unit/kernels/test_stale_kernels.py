"""Kernels that were built for other signatures than those of `_native.pyi` are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import softdb
from softdb import kernels

SIGNATURES = Path(kernels.__file__).with_name("_native.pyi")


@pytest.mark.skipif(not kernels.available() or not SIGNATURES.is_file(), reason="needs kernels and their source tree")
def test_stale_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = kernels.loaded.__wrapped__
    assert load() is kernels.native()
    for stale in ("0" * 64, None):  # of another version, and of a version before the stamp
        if stale is None:
            monkeypatch.delattr(kernels.native(), "signatures")
        else:
            monkeypatch.setattr(kernels.native(), "signatures", stale)
        with pytest.raises(softdb.MissingDependency, match=r"_native.*\.so are of another version .*; run pip install"):
            load()
