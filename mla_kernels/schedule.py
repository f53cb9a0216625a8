"""How a batch's cache tiles are shared out to work groups: the twin of ``csrc/schedule.cuh``.

The kernel computes its shares on the device, from lengths that the host never reads. Here the
same arithmetic stands in plain Python, to draw and to test: the tiles of all requests are
numbered in one line, request after request, and group ``g`` of ``G`` takes the tiles from
``g * total // G`` up to ``(g + 1) * total // G``. :func:`merge` is what ``combine.cuh`` does
with the partial results, in float64.

So where a request is cut depends on what else is in the batch, and the last bits of its result
with it. Batch-invariant, each request is cut into chunks by its own length alone
(:func:`chunk_tiles`), and chunks are numbered and shared out in the place of tiles: where the
groups' shares end does not matter then, since every chunk is a result by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from .batch import VerifyBatch


@dataclasses.dataclass(frozen=True)
class Share:
    """What one group does of one request.

    Args:
        group, request: whose.
        begin, end: tiles, counted within the request.
        slot: None where the group has the whole request and writes its output; else where its
            partial result goes: 0 for the request that the group's share continues, 1 for the
            one that it begins; batch-invariant, the chunk's number among those of all requests.
    """

    group: int
    request: int
    begin: int
    end: int
    slot: int | None

    @property
    def tiles(self) -> int:
        return self.end - self.begin

    @property
    def partial(self) -> bool:
        return self.slot is not None


def tiles_of(prefix: int, nodes: int, tile_tokens: int) -> int:
    """Tiles of a request: its prefix and draft tokens in one sequence, rounded up. A request
    without draft tokens has no query, and so no work."""
    return -(-(prefix + nodes) // tile_tokens) if nodes else 0


def request_tiles(batch: VerifyBatch, tile_tokens: int) -> list[int]:
    """:func:`tiles_of` for each request of a batch."""
    nodes = batch.qo_indptr.diff().tolist()
    return [tiles_of(prefix, n, tile_tokens)
            for prefix, n in zip(batch.kv_lens.tolist(), nodes, strict=True)]


#: Tiles of a chunk, doubled for a request that would have more than so many chunks.
CHUNK_TILES, MAX_CHUNKS = 8, 128


def chunk_tiles(tiles: int) -> int:
    """Tiles in a chunk of a request with so many tiles."""
    chunk = CHUNK_TILES
    while tiles > chunk * MAX_CHUNKS:
        chunk *= 2
    return chunk


def chunks_of(tiles: int) -> int:
    """Chunks of a request with so many tiles: the last may be shorter than the others."""
    return -(-tiles // chunk_tiles(tiles))


def most_chunks(tiles: int) -> int:
    """The most chunks of any request with up to so many tiles; just past a doubling, a longer
    request has fewer."""
    return min(MAX_CHUNKS, -(-tiles // CHUNK_TILES))


def share_begin(group: int, groups: int, total: int) -> int:
    """The first tile of a group's share, or ``total`` past the last group. With fewer tiles
    than groups, the groups at the end have nothing."""
    groups = min(groups, total)
    return total if group >= groups else group * total // groups


def share_out(
    tiles: Sequence[int], groups: int, *, batch_invariant: bool = False,
) -> list[Share]:
    """Every group's shares, group by group, in the order in which it works on them.

    Args:
        tiles: of each request; zeros are allowed.
        groups: work groups, at least 1.
        batch_invariant: shares are of chunks.

    Raises:
        ValueError: no group, or a negative number of tiles.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1; got {groups}")
    if any(n < 0 for n in tiles):
        raise ValueError(f"tiles must not be negative; got {list(tiles)}")
    if batch_invariant:
        return _share_out_chunks(tiles, groups)
    total = sum(tiles)
    return [share for group in range(groups)
            for share in _shares_of(group, groups, tiles, total)]


def _shares_of(group: int, groups: int, tiles: Sequence[int], total: int) -> Iterator[Share]:
    begin, end = share_begin(group, groups, total), share_begin(group + 1, groups, total)
    at = 0
    for request, count in enumerate(tiles):
        low, high = max(begin, at), min(end, at + count)
        if low < high:
            whole = high - low == count
            yield Share(group, request, low - at, high - at, None if whole else int(low == at))
        at += count


def _share_out_chunks(tiles: Sequence[int], groups: int) -> list[Share]:
    chunks = [(request, begin, min(begin + chunk_tiles(count), count))
              for request, count in enumerate(tiles)
              for begin in range(0, count, chunk_tiles(count))]
    begins = [share_begin(group, groups, len(chunks)) for group in range(groups + 1)]
    return [Share(group, request, begin, end, None if end - begin == tiles[request] else number)
            for group in range(groups)
            for number, (request, begin, end) in
            enumerate(chunks[begins[group]:begins[group + 1]], begins[group])]


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole sequence from attention over its pieces.

    A piece's output is an average of values, and ``exp(lse)`` is the weight it has among the
    pieces: ``lse = log sum_i exp(lse_i)``, ``out = sum_i exp(lse_i - lse) out_i``.

    Args:
        outs: ``[pieces, ..., V]``; lses: ``[pieces, ...]``, -inf for a piece of which nothing
            is visible.

    Returns:
        ``(out [..., V], lse [...])``; 0 and -inf where no piece sees anything.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse.isinf(), 0.0, lse))
    return (weights[..., None] * outs).sum(0), lse
