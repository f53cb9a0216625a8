// Merges the partial results of requests that came in more than one segment:
// out = sum_i w_i out_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i.
#pragma once

#include "kv_layout.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

namespace mla {

// The unit of work is 16 rows by some columns of one row tile: kSplit warps share out the
// partials of each fragment (16 rows x 16 columns, one uint4 a lane), and a block has
// 8 / kSplit fragments side by side. What counts is latency: a warp asks for all of its partials
// and their log-sum-exps at once, and only then computes.
template <class Config, int kSplit>
struct Combine {
  using Ops = ElementOps<typename Config::Element>;
  static constexpr int kWarps = 8;
  static constexpr int kFragments = kWarps / kSplit;              // a unit
  static constexpr int kUnitsPerRows = kLatentDim / 16 / kFragments;
  static constexpr int kUnitsPerTile = Config::kRowGroups * kUnitsPerRows;
  // Partials that a warp asks for at once. Split among 8 warps, all those that a request can have
  // from sm_120's largest card, with 188 multiprocessors. A warp that has a fragment to itself
  // asks for fewer, so that two blocks fit a multiprocessor: fragments are many then.
  static constexpr int kAhead = kSplit == 1 ? 8 : 24;

  // Shared memory: what the warps of a fragment found; 8 sums, 2 maxima and 2 weights a lane.
  static constexpr int kSmemBytes = kSplit > 1 ? kWarps * 12 * 32 * 4 : 0;

  const VerifyParams& p;
  float* const smem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // A unit's partials, which can be found before they are there.
  struct Unit {
    RequestRows rows;
    int first_row;             // of the 16, in the request
    int row_group, fragment;   // in the row tile; this warp's
    int count;                 // partials; 0: nothing to merge
    int first;                 // group that has one, or the request's first chunk
  };
  __device__ __forceinline__ Unit find(int request, int row_tile, int unit) const {
    Unit u;
    u.rows = RequestRows(p, request);
    u.row_group = unit / kUnitsPerRows;
    u.fragment = unit % kUnitsPerRows * kFragments + warp / kSplit;
    u.first_row = row_tile * Config::kRows + u.row_group * 16;
    u.count = 0;
    if (u.first_row >= u.rows.num_queries(p)) return u;
    const Schedule<Config::kTokens> schedule(p);
    const int begin = schedule.request_begin(p, request);
    const int end = begin + schedule.units_of(p, request) - 1;
    const int first = p.batch_invariant ? begin : schedule.group_of(begin);
    const int last = p.batch_invariant ? end : schedule.group_of(end);
    if (first == last) return u;   // one segment was the whole request and wrote its output
    u.count = last - first + 1;
    u.first = first;
    return u;
  }

  __device__ __forceinline__ void merge(const Unit& unit, int row_tile) const {
    const int count = unit.count, fragment = unit.fragment;
    if (count == 0) return;
    // All of them lie in slots 0, but the first, where the request begins.
    const int slot = partial_slot(p, unit.first, row_tile, false);
    const int step = partial_slot(p, 1, 0, false);
    const uint4* outs = static_cast<const uint4*>(p.partial_out) +
                        partial_fragment<Config>(slot, unit.row_group, fragment) + lane;
    const float2* lses = reinterpret_cast<const float2*>(
        p.partial_lse + partial_row<Config>(slot, unit.row_group * 16 + lane / 4));
    const int64_t out_step = partial_fragment<Config>(step, 0, 0);
    const int lse_step = partial_row<Config>(step, 0) / 2;

    // Of the lane's two rows: the largest log-sum-exp, the sum of weights relative to it, and
    // the sum of weighted outputs.
    float top[2] = {-INFINITY, -INFINITY}, weight[2] = {0.f, 0.f};
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int start = warp % kSplit; start < count; start += kAhead * kSplit) {
      const int left = (count - start + kSplit - 1) / kSplit;
      // In two halves, so that few partials take little code: it is fetched for each launch.
      const auto each = [&](auto what) {
#pragma unroll
        for (int u = 0; u < kAhead / 2; ++u) what(u);
        if (left > kAhead / 2) {
#pragma unroll
          for (int u = kAhead / 2; u < kAhead; ++u) what(u);
        }
      };
      const uint4* out_at = outs + start * out_step;
      const float2* lse_at = lses + start * lse_step;
      float2 lse[kAhead];
      uint4 out[kAhead];
      each([&](int u) {
        lse[u] = make_float2(-INFINITY, -INFINITY);
        out[u] = make_uint4(0, 0, 0, 0);
        const int begins = u == 0 && start == 0 && !p.batch_invariant;
        if (u < left) {
          lse[u] = __ldcg(lse_at + begins * partial_row<Config>(1, 0) / 2);
          out[u] = __ldcg(out_at + begins * partial_fragment<Config>(1, 0, 0));
        }
        out_at += kSplit * out_step;
        lse_at += kSplit * lse_step;
      });
      float base[2] = {top[0], top[1]};
      each([&](int u) {
        base[0] = fmaxf(base[0], lse[u].x);
        base[1] = fmaxf(base[1], lse[u].y);
      });
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float finite = base[half] == -INFINITY ? 0.f : base[half];
        const float rescale = exp2_approx(top[half] - finite);
        top[half] = base[half];
        base[half] = finite;
        weight[half] *= rescale;
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (e / 2 % 2 == half) sum[e] *= rescale;
      }
      each([&](int u) {
        const float w[2] = {exp2_approx(lse[u].x - base[0]), exp2_approx(lse[u].y - base[1])};
        const uint32_t word[4] = {out[u].x, out[u].y, out[u].z, out[u].w};
        weight[0] += w[0];
        weight[1] += w[1];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 v = Ops::unpack(word[e]);
          sum[2 * e] += w[e % 2] * v.x;
          sum[2 * e + 1] += w[e % 2] * v.y;
        }
      });
    }

    const int row = unit.first_row + lane / 4, num_rows = unit.rows.num_queries(p);
    const int64_t row0 = static_cast<int64_t>(unit.rows.first_token) * p.num_heads + row;
    // Word `word` of the fragment: two columns of row lane / 4 or lane / 4 + 8.
    const auto put = [&](int word, float top, float weight, float x, float y) {
      const int below = word % 2 * 8;
      if (row + below >= num_rows) return;
      const float scale = weight > 0.f ? 1.f / weight : 0.f;
      *reinterpret_cast<uint32_t*>(
          p.out + ((row0 + below) * kLatentDim + fragment * 16 + word / 2 * 8 + lane % 4 * 2) * 2) =
          Ops::pack(x * scale, y * scale);
      if (word < 2 && fragment == 0 && lane % 4 == 0)
        p.lse[row0 + below] = weight > 0.f ? (top + log2f(weight)) * kLn2 : -INFINITY;
    };
    if constexpr (kSplit == 1) {
#pragma unroll
      for (int word = 0; word < 4; ++word)
        put(word, top[word % 2], weight[word % 2], sum[2 * word], sum[2 * word + 1]);
    } else {
      float* own = smem + warp * 12 * 32 + lane;
#pragma unroll
      for (int e = 0; e < 8; ++e) own[e * 32] = sum[e];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[(8 + half) * 32] = top[half];
        own[(10 + half) * 32] = weight[half];
      }
      __syncthreads();
      const int word = warp % kSplit;  // a word a warp
      if (word >= 4) return;
      const float* from = smem + warp / kSplit * kSplit * 12 * 32 + lane;
      const auto found = [&](int by, int what) { return from[(by * 12 + what) * 32]; };
      float all = -INFINITY, total = 0.f, x = 0.f, y = 0.f;
#pragma unroll
      for (int s = 0; s < kSplit; ++s) all = fmaxf(all, found(s, 8 + word % 2));
      const float finite = all == -INFINITY ? 0.f : all;
#pragma unroll
      for (int s = 0; s < kSplit; ++s) {
        const float w = exp2_approx(found(s, 8 + word % 2) - finite);
        total += w * found(s, 10 + word % 2);
        x += w * found(s, 2 * word);
        y += w * found(s, 2 * word + 1);
      }
      put(word, all, total, x, y);
    }
  }
};

// Grid (row tiles * kUnitsPerTile, batch_size).
template <class Config, int kSplit>
__global__ void __launch_bounds__(256, kSplit == 1 ? 2 : 1) combine(const __grid_constant__ VerifyParams p) {
  extern __shared__ float combine_smem[];
  using C = Combine<Config, kSplit>;
  // Blocks of this grid start once all of the verify kernel's run, hence after all that came
  // before it: lengths may be read before its results are waited for.
  const C combine{p, combine_smem};
  const auto unit = combine.find(blockIdx.y, blockIdx.x / C::kUnitsPerTile,
                                 blockIdx.x % C::kUnitsPerTile);
  grid_dependency_wait();
  combine.merge(unit, blockIdx.x / C::kUnitsPerTile);
}

}  // namespace mla
