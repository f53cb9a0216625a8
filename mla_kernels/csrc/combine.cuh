// Merges the partial results of requests that came in more than one segment:
// out = sum_i w_i out_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i.
#pragma once

#include "kv_layout.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

namespace mla {

// The unit of work is 16 rows by some columns of one row tile: kSplit warps share out the
// partials of each fragment (16 rows x 16 columns, one uint4 a lane), and a block has
// 8 / kSplit fragments side by side.
template <class Config, int kSplit>
struct Combine {
  using Ops = ElementOps<typename Config::Element>;
  static constexpr int kWarps = 8;
  static constexpr int kFragments = kWarps / kSplit;              // a unit
  static constexpr int kUnitsPerRows = kLatentDim / 16 / kFragments;
  static constexpr int kUnitsPerTile = Config::kRowGroups * kUnitsPerRows;
  static constexpr int kAhead = 8;                                // loads under way at once

  // Shared memory: sums of the warps of a fragment, then a weight for each partial and row.
  static constexpr int kSumBytes = kSplit > 1 ? kWarps * 8 * 32 * 4 : 0;
  static int smem_bytes(int partials) { return kSumBytes + partials * 16 * 4; }

  const VerifyParams& p;
  float* const smem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // `before_results` is called before the first partial result is read.
  template <class Before>
  __device__ __forceinline__ void run(int request, int row_tile, int unit, Before before_results) {
    const int row_group = unit / kUnitsPerRows;
    const RequestRows rows(p, request);
    const int num_rows = rows.num_queries(p);
    const int first_row = row_tile * Config::kRows + row_group * 16;
    if (first_row >= num_rows) return;
    const PartialSlots slots(p, Schedule<Config::kTokens>(p), request);
    const int count = slots.count;
    if (count == 1) return;  // one segment was the whole request and wrote its output

    const int64_t slot0 = partial_slot(p, slots.first, row_tile);
    const int64_t slot1 = partial_slot(p, slots.second, row_tile);
    const int64_t slot_step = slots.step * p.row_tiles;
    const auto slot_of = [&](int i) { return i == 0 ? slot0 : slot1 + (i - 1) * slot_step; };

    const int fragment = unit % kUnitsPerRows * kFragments + warp / kSplit;
    const uint4* from = static_cast<const uint4*>(p.partial_out) + lane;
    const auto load = [&](int i) {
      return __ldcg(from + partial_fragment<Config>(slot_of(i), row_group, fragment));
    };

    before_results();
    uint4 ahead[kAhead];       // under way while the weights are computed
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (const int i = warp % kSplit + u * kSplit; i < count) ahead[u] = load(i);
    weigh(rows, row_group, first_row, count, unit % kUnitsPerRows == 0, slot_of);

    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    const auto add = [&](int i, const uint4& x) {
      const float low = weights()[i * 16 + lane / 4], high = weights()[i * 16 + lane / 4 + 8];
      const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 v = Ops::unpack(word[e]);
        const float w = e % 2 ? high : low;
        sum[2 * e] += w * v.x;
        sum[2 * e + 1] += w * v.y;
      }
    };
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (const int i = warp % kSplit + u * kSplit; i < count) add(i, ahead[u]);
#pragma unroll kAhead
    for (int i = warp % kSplit + kAhead * kSplit; i < count; i += kSplit) add(i, load(i));
    if constexpr (kSplit > 1) {
#pragma unroll
      for (int e = 0; e < 8; ++e) smem[(warp * 8 + e) * 32 + lane] = sum[e];
      __syncthreads();
      if (warp % kSplit) return;
#pragma unroll
      for (int s = 1; s < kSplit; ++s)
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += smem[((warp + s) * 8 + e) * 32 + lane];
    }
    const int row = first_row + lane / 4;
    char* to = p.out + ((static_cast<int64_t>(rows.first_token) * p.num_heads + row) * kLatentDim +
                        fragment * 16 + lane % 4 * 2) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row < num_rows)
        *reinterpret_cast<uint32_t*>(to + half * 16) = Ops::pack(sum[4 * half], sum[4 * half + 1]);
      if (row + 8 < num_rows)
        *reinterpret_cast<uint32_t*>(to + half * 16 + 8 * kLatentDim * 2) =
            Ops::pack(sum[4 * half + 2], sum[4 * half + 3]);
    }
  }

  __device__ __forceinline__ float* weights() const { return smem + kSumBytes / 4; }

  // The partials' weights for each of the 16 rows, 16 lanes a row, and the rows' log-sum-exp.
  template <class SlotOf>
  __device__ __forceinline__ void weigh(const RequestRows& rows, int row_group, int first_row,
                                        int count, bool store_lse, SlotOf slot_of) const {
    const int r = threadIdx.x / 16, own = threadIdx.x % 16;
    const float* lse = p.partial_lse + row_group * 16 + r;
    float top = -INFINITY;
#pragma unroll kAhead
    for (int i = own; i < count; i += 16) {
      const float x = __ldcg(lse + slot_of(i) * Config::kRows);
      weights()[i * 16 + r] = x;
      top = fmaxf(top, x);
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    const float base = top == -INFINITY ? 0.f : top;
    float sum = 0.f;
    for (int i = own; i < count; i += 16) {
      const float w = exp2_approx(weights()[i * 16 + r] - base);
      weights()[i * 16 + r] = w;
      sum += w;
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    for (int i = own; i < count; i += 16) weights()[i * 16 + r] *= scale;
    if (store_lse && own == 0 && first_row + r < rows.num_queries(p))
      p.lse[static_cast<int64_t>(rows.first_token) * p.num_heads + first_row + r] =
          sum > 0.f ? (base + log2f(sum)) * kLn2 : -INFINITY;
    __syncthreads();
  }
};

// Grid (row tiles * kUnitsPerTile, batch_size).
template <class Config, int kSplit>
__global__ void __launch_bounds__(256) combine(const __grid_constant__ VerifyParams p) {
  extern __shared__ float combine_smem[];
  using C = Combine<Config, kSplit>;
  // Blocks of this grid start once all of the verify kernel's run, hence after all that came
  // before it: lengths may be read before its results are waited for.
  C{p, combine_smem}.run(blockIdx.y, blockIdx.x / C::kUnitsPerTile, blockIdx.x % C::kUnitsPerTile,
                         [] { grid_dependency_wait(); });
}

}  // namespace mla
