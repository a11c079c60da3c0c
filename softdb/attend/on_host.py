"""Columns that do not fit on a device: a pass over the host's by the CPU, where that is faster than to send them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from softdb.attend.fused import pass_of
from softdb.attend.on_device import kernel_form
from softdb.attend.pace import PassRate, rate
from softdb.attend.remote import Remote
from softdb.attend.request import Request, Source
from softdb.attend.source import Stored
from softdb.attend.streaming import stream
from softdb.store import Snapshot

__all__ = ["stream_where_faster"]


def stream_where_faster(request: Request, source: Source) -> tuple[Tensor, Tensor, Source]:  # (q, v), (q,), and where
    """As `stream`, and the source that it read; answers are where the queries lie.

    It is the host's where the columns beside the queries are not all there, the CPU has kernels for the request, and
    passes over some of the records took it less time.
    """
    if isinstance(source, Remote):
        return *source.streamed(request), source
    moved = _on_host(request, source)
    if moved is None:
        return *stream(request, source), source
    device = request.queries.device
    output, lse = stream(*moved)
    return output.to(device), lse.to(device), moved[1]


def _on_host(request: Request, source: Source) -> tuple[Request, Stored] | None:
    """What is asked of the CPU; None where the device is faster, or alone can tell."""
    if not isinstance(source, Stored) or source.there is None or source.there.resident(request.pools):
        return None
    score = request.score
    own = [*score.parameters(), *score.buffers()] if isinstance(score, torch.nn.Module) else []
    if kernel_form(request) is None or any(one.device.type != "cpu" for one in own):
        return None
    mask = None if request.mask is None else request.mask.cpu()
    asked = replace(request, queries=request.queries.cpu(), mask=mask)
    host = replace(source, there=None)
    if pass_of(asked, host) is None:
        return None
    width = request.queries.shape[1] + (source.width if request.pools else 0)
    rates = source.finder.rates.get(width)
    if rates is None:
        rates = source.finder.rates[width] = _measured(request, source, width)
    numbers, there = source.count * width, rates[0].seconds
    return (asked, host) if rates[1].seconds(numbers, len(asked.queries)) < there(numbers, len(asked.queries)) else None


def _measured(request: Request, source: Stored, width: int) -> tuple[PassRate, PassRate]:
    """What a number costs that is sent to the device, and one that the CPU reads where it lies."""
    some = source.first(width)
    plain = Snapshot.of(0, some.snapshot.segments, some.snapshot.live)
    queries = request.queries.detach()
    places = ((queries, some), (queries.cpu(), replace(some, snapshot=plain, there=None)))
    request = replace(request, allowed=None, mask=None)
    found = []
    for asked, records in places:

        def pass_over(count: int, asked: Tensor = asked, records: Stored = records) -> object:
            few = asked[torch.arange(count, device=asked.device) % len(asked)]
            return stream(replace(request, queries=few), records)[1].cpu()

        with torch.no_grad():
            found.append(rate(pass_over, some.count * width))
    return found[0], found[1]
