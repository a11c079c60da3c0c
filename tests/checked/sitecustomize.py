"""Python imports this file when an example starts: a picture is checked before it is written."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if any(Path(word).parent.name == "examples" for word in sys.orig_argv):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from figures import assert_readable

    from softdb import plots

    write = plots.save

    def save(drawn: Any, path: str | os.PathLike[str]) -> None:
        assert_readable(drawn)
        write(drawn, path)

    plots.save = save
