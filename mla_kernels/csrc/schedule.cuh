// How the batch's work is shared out, computed on the device so that a captured launch serves
// any lengths.
//
// The KV tiles of all requests are numbered in one line, request after request. Work group g
// of G takes tiles [g * total / G, (g + 1) * total / G): equal shares, whatever the lengths.
// A share that begins or ends inside a request leaves a partial result there, at most two a
// group: slot 2g for the first request of the share, 2g + 1 for the last.
//
// Batch-invariant, what is numbered and shared out are not tiles but chunks, whose size depends
// on their request's length alone. Each is a segment by itself and has the slot of its number,
// so that whatever else is in the batch, a request is cut and merged in the same way.
#pragma once

#include "kv_layout.cuh"
#include "ptx.cuh"

namespace mla {

// A group's share of one request.
struct Segment {
  int request;
  int tile_begin, tile_end;    // among the request's own tiles
  int whole;                   // all of them: there is no partial result
  int slot;                    // where its partial result goes: see segment_slot
  int done;                    // units of the share up to its end
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
    // The least that leaves at most kMaxChunks.
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
    return static_cast<int>(((static_cast<int64_t>(unit) + 1) * groups - 1) / total);
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
    s.slot = p.batch_invariant ? unit : s.done != 0;
    s.done += count;
    return true;
  }
};

// The slot of a group's segment. Added up where it is used: a step earlier, sm_120's compiler
// spills registers for it.
__device__ __forceinline__ int segment_slot(const VerifyParams& p, int group, const Segment& s) {
  return p.batch_invariant ? s.slot : 2 * group + s.slot;
}

// Where the partial results of a request lie: slots `first`, then `second` and every `step`-th.
struct PartialSlots {
  int count, first, second, step;

  template <int kTokens>
  __device__ __forceinline__ PartialSlots(const VerifyParams& p, const Schedule<kTokens>& schedule,
                                          int request) {
    const int begin = schedule.request_begin(p, request);
    const int units = schedule.units_of(p, request);
    if (p.batch_invariant) {
      count = units;
      first = begin;
      second = begin + 1;
      step = 1;
      return;
    }
    const int group = schedule.group_of(begin);
    count = schedule.group_of(begin + units - 1) - group + 1;
    // Only the first group can have come to this request from another one.
    first = 2 * group + (schedule.begin(group) < begin);
    second = 2 * (group + 1);
    step = 2;
  }
};

// Where a slot's partial result of a row tile lies, in units of one row tile.
__device__ __forceinline__ int64_t partial_slot(const VerifyParams& p, int slot, int row_tile) {
  return static_cast<int64_t>(slot) * p.row_tiles + row_tile;
}

// Where a fragment (16 rows x 16 columns: a uint4 for each of 32 lanes) of a partial result
// begins, in uint4.
template <class Config>
__device__ __forceinline__ int64_t partial_fragment(int64_t slot, int row_group, int fragment) {
  return ((slot * Config::kRowGroups + row_group) * (kLatentDim / 16) + fragment) * 32;
}

}  // namespace mla
