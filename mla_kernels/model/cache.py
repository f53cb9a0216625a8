"""A paged cache of MLA rows for several requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..layout import KVLayout


class PagedCache:
    """Rows of all layers, ``pools[layer]`` ``[slots, row_dim]``, handed out by pages.

    Args:
        layout: the order in which rows are written.
        num_layers: pools.
        num_pages, page_size: capacity. Pages are handed out in a random order, as they are
            after an engine has served for a while.
        dtype, device: of the pools, which begin as NaN: what is read was written.
    """

    def __init__(self, layout: KVLayout, num_layers: int, num_pages: int, page_size: int = 16, *,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
                 seed: int = 0) -> None:
        self.layout, self.page_size = layout, page_size
        self.pools = [torch.full((num_pages * page_size, layout.row_dim), torch.nan, dtype=dtype,
                                 device=device) for _ in range(num_layers)]
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []

    def open(self) -> int:
        """A new request; its number."""
        self.pages.append([])
        self.lengths.append(0)
        return len(self.pages) - 1

    def close(self, request: int) -> None:
        """Gives the request's pages back."""
        self._free += self.pages[request]
        self.pages[request], self.lengths[request] = [], 0

    def slots(self, request: int, begin: int, end: int) -> np.ndarray:
        """Slots of the request's positions ``begin`` to ``end``, which it gets pages for.

        Raises:
            ValueError: no page is left.
        """
        pages = self.pages[request]
        while len(pages) * self.page_size < end:
            if not self._free:
                raise ValueError(f"num_pages is too small: request {request} needs "
                                 f"{-(-end // self.page_size)} pages, and none is free")
            pages.append(self._free.pop())
        position = np.arange(begin, end)
        return (np.array(pages)[position // self.page_size] * self.page_size
                + position % self.page_size)

    def accept(self, request: int, nodes: Sequence[int]) -> None:
        """Keeps the rows of accepted draft nodes, which lie at the positions after the prefix in
        the tree's order, and moves them together.

        Args:
            nodes: of the accepted path, the root included, in any order: a parent comes before
                its child in a tree, so that sorted they are the path. Engines hand the slots out
                from the root or from the leaf.

        Raises:
            ValueError: a node twice, or none.
        """
        path = np.sort(np.asarray(nodes, dtype=np.int64))
        if not path.size or (path[1:] == path[:-1]).any():
            raise ValueError(f"nodes must be different ones, at least one; got {list(nodes)}")
        length = self.lengths[request]
        slots = self.slots(request, length, length + int(path[-1]) + 1)
        # Everything is read before anything is written: a row's new place may be another's old.
        source, target = slots[path], slots[: path.size]
        for pool in self.pools:
            pool[target] = pool[source]
        self.lengths[request] = length + path.size
