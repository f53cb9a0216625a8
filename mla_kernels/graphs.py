"""Capture of calls in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(
    call: Callable[[], object], *, warm_up: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    """Captures what a call launches, to be replayed.

    Args:
        call: launches work on the current stream.
        warm_up: run once before, on a side stream, as capture wants it: what is compiled, loaded
            or chosen at the first call is then done. Default: ``call``.

    Raises:
        RuntimeError: there is no GPU, or the call did what cannot be captured: a copy to the
            host, a synchronisation. The GPU's streams can be used again afterwards.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("capture needs a CUDA device: torch.cuda.is_available() is False")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (warm_up or call)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
