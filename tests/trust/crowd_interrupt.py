"""Ctrl-C at a chosen moment: KeyboardInterrupt where CPython looks for signals, at the entry of a function, or after a
call of one in C whose result is then lost."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import softdb

OURS = str(softdb.__file__).removesuffix("__init__.py")
HELPERS = (contextlib.__file__, threading.__file__)  # context managers and events are Python code, too


class Interruption:
    """Runs something and interrupts it at its nth such moment within softdb; 0: never, they are counted."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.moments = 0
        self.where = ""  # where it came

    def during(self, work: Callable[[], Any]) -> KeyboardInterrupt | None:
        """The interrupt, with its traceback; None where the work ended before."""
        sys.setprofile(self._look)
        try:
            work()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.setprofile(None)
        return None

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "c_return") or not (name.startswith(OURS) or name in HELPERS):
            return
        if event == "call" and frame.f_lasti > 0 and frame.f_code.co_flags & CO_GENERATOR:
            return  # a generator that is being closed, where an interrupt would be lost
        self.moments += 1
        if self.moments == self.at:
            sys.setprofile(None)
            after = "entering it" if event == "call" else f"after {getattr(argument, '__qualname__', argument)}"
            self.where = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}, {after}"
            raise KeyboardInterrupt(self.where)


def moments(work: Callable[[], Any]) -> int:
    """Return the number of moments at which a call can be interrupted."""
    counted = Interruption(0)
    counted.during(work)
    return counted.moments
