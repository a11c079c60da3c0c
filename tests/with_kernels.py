"""Tests that run with and without the kernels; with them only where there are any."""

from __future__ import annotations

import pytest

from softdb.kernels import available

NEEDS_KERNELS = pytest.mark.skipif(not available(), reason="softdb was built without its kernels")
WITH_AND_WITHOUT = [pytest.param(True, marks=NEEDS_KERNELS, id="kernels"), pytest.param(False, id="torch")]
