// How the batch's work is shared out, computed on the device so that a captured launch serves
// any lengths.
//
// The KV tiles of all requests are numbered in one line, request after request. Work group g
// of G takes tiles [g * total / G, (g + 1) * total / G): equal shares, whatever the lengths.
// A share that begins or ends inside a request leaves a partial result there, at most two a
// group: slot 0 for the request that it continues, slot 1 for the one that it begins.
//
// Batch-invariant, what is numbered and shared out are not tiles but chunks, whose size depends
// on their request's length alone. Each is a segment by itself, with one slot of its own, so that
// whatever else is in the batch, a request is cut and merged in the same way.
#pragma once

#include "kv_layout.cuh"
#include "ptx.cuh"

namespace mla {

// A group's share of one request.
struct Segment {
  int request;
  int tile_begin, tile_end;    // among the request's own tiles
  int whole;                   // all of them: there is no partial result
  int done;                    // units of the share up to its end
  int last;                    // the share ends with it
  int owner;                   // of its partial result's slot: the group or, if so cut, the chunk
};

// Chunks of a batch-invariant launch: 8 tiles each or, where a request would have too many of
// them, the next power of two that leaves no more than this.
constexpr int kChunkShift = 3;
constexpr int kMaxChunks = 128;

template <int kTokens>
struct Schedule {
  int total;                   // units, tiles or chunks, of all requests
  int groups;                  // groups with a share: at least one unit each

  static __device__ __forceinline__ int tiles_of(const VerifyParams& p, int request) {
    const int drafts = p.qo_indptr[request + 1] - p.qo_indptr[request];
    return drafts > 0 ? (p.kv_lens[request] + drafts + kTokens - 1) / kTokens : 0;
  }

  // Tiles of a unit, as a power of two, of a request with so many tiles.
  static __device__ __forceinline__ int unit_shift(const VerifyParams& p, int tiles) {
    return p.batch_invariant ? max(kChunkShift, 32 - __clz((tiles - 1) / kMaxChunks)) : 0;
  }
  static __device__ __forceinline__ int units_of(const VerifyParams& p, int request) {
    const int tiles = tiles_of(p, request), shift = unit_shift(p, tiles);
    return (tiles + (1 << shift) - 1) >> shift;
  }

  // Every warp of a block computes the same; no barrier.
  __device__ __forceinline__ explicit Schedule(const VerifyParams& p)
      : total(0), groups(p.groups) {
    for (int base = 0; base < p.batch_size; base += 32) {
      const int request = base + lane_id();
      if (request < p.batch_size) prefetch(p.kv_indptr + request);  // needed a little later
      total += __reduce_add_sync(0xffffffffu, request < p.batch_size ? units_of(p, request) : 0);
    }
    groups = min(groups, total);
  }

  __device__ __forceinline__ int begin(int group) const {
    // floor(group * total / groups) without a 64-bit division, which would be a slow call.
    return group >= groups ? total
                           : group * (total / groups) + group * (total % groups) / groups;
  }

  // The group whose share has this unit: the largest g with begin(g) <= unit.
  __device__ __forceinline__ int group_of(int unit) const {
    return ((static_cast<uint32_t>(unit) + 1) * groups - 1) / total;   // plan() keeps it in range
  }

  // The unit at which a request begins.
  static __device__ __forceinline__ int request_begin(const VerifyParams& p, int request) {
    int before = 0;
    for (int base = 0; base < request; base += 32) {
      const int other = base + lane_id();
      before += __reduce_add_sync(0xffffffffu, other < request ? units_of(p, other) : 0);
    }
    return before;
  }

  // The request that has a unit (below total), and the unit's number in it.
  __device__ __forceinline__ void locate(const VerifyParams& p, int unit, int& request,
                                         int& unit_in_request) const {
    const int lane = lane_id();
    int before = 0;
    for (int base = 0;; base += 32) {
      const int own = base + lane < p.batch_size ? units_of(p, base + lane) : 0;
      int upto = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, d);
        if (lane >= d) upto += other;
      }
      const unsigned past = __ballot_sync(0xffffffffu, before + upto > unit);
      if (past) {
        const int found = __ffs(past) - 1;
        request = base + found;
        unit_in_request = unit - before - __shfl_sync(0xffffffffu, upto - own, found);
        return;
      }
      before += __shfl_sync(0xffffffffu, upto, 31);
    }
  }

  // Makes of a group's segment the next one; false when its share is done.
  __device__ __forceinline__ bool next(const VerifyParams& p, int group, Segment& s) const {
    const int unit = begin(group) + s.done;
    const int left = begin(group + 1) - unit;
    if (left <= 0) return false;
    locate(p, unit, s.request, s.tile_begin);
    const int tiles = tiles_of(p, s.request), shift = unit_shift(p, tiles);
    const int count = p.batch_invariant ? 1 : min(tiles - s.tile_begin, left);
    s.tile_end = min((s.tile_begin + count) << shift, tiles);
    s.tile_begin <<= shift;
    s.whole = s.tile_end - s.tile_begin == tiles;
    s.owner = p.batch_invariant ? unit : group;
    s.done += count;
    s.last = count == left;
    return true;
  }
};

// Where a group's or a chunk's partial result of a row tile lies, in units of one row tile.
__device__ __forceinline__ int partial_slot(const VerifyParams& p, int owner, int row_tile,
                                            bool begins) {
  const int at = owner * p.row_tiles + row_tile;
  return p.batch_invariant ? at : at * 2 + begins;
}

// Where a fragment (16 rows x 16 columns: a uint4 for each of 32 lanes) of a partial result
// begins, in uint4.
template <class Config>
__device__ __forceinline__ int64_t partial_fragment(int slot, int row_group, int fragment) {
  return ((static_cast<int64_t>(slot) * Config::kRowGroups + row_group) * (kLatentDim / 16) +
          fragment) * 32;
}

// Where a row's partial log-sum-exp lies. Rows r and r + 8 of 16 are neighbours, as they are in a
// lane's fragment.
template <class Config>
__device__ __forceinline__ int partial_row(int slot, int row) {
  return slot * Config::kRows + row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
}

}  // namespace mla
