"""A server over the database of a test's module, which says what `place` is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from explore_site import Site, served


@pytest.fixture(scope="module")
def site(place: Path) -> Iterator[Site]:
    with served(place) as site:
        yield site
