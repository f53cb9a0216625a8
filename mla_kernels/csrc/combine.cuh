// Merges the partial results of requests that more than one work group had a share of:
// out = sum_i w_i out_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i.
#pragma once

#include "tree_verify.cuh"

namespace mla {

// A block merges 16 rows by some columns of one row tile: kSplit warps share out the partials
// of each fragment (16 rows x 16 columns, one uint4 a lane), 8 / kSplit fragments side by side.
template <class Config, int kSplit>
struct CombineConfig {
  static constexpr int kWarps = 8;
  static constexpr int kFragments = kWarps / kSplit;                   // a block
  static constexpr int kFragmentsPerRows = kLatentDim / 16;            // 32
  static constexpr int kBlocksPerTile =
      Config::kRowGroups * kFragmentsPerRows / kFragments;
};

// Grid (row tiles * kBlocksPerTile, batch_size); dynamic shared memory: 16 floats for each
// work group.
template <class Config, int kSplit>
__global__ void __launch_bounds__(256) combine(const __grid_constant__ VerifyParams p) {
  using C = CombineConfig<Config, kSplit>;
  using Ops = ElementOps<typename Config::Element>;
  extern __shared__ float weight_smem[];                               // [partials, 16]
  __shared__ float sum_smem[kSplit > 1 ? C::kWarps : 1][8][32];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int request = blockIdx.y;
  const int row_tile = blockIdx.x / C::kBlocksPerTile;
  const int block = blockIdx.x % C::kBlocksPerTile;
  constexpr int kBlocksPerRows = C::kBlocksPerTile / Config::kRowGroups;
  const int row_group = block / kBlocksPerRows;

  // Blocks of this grid start once all of the verify kernel's run, hence after all that came
  // before it: the lengths may be read before its results are waited for.
  const RequestRows rows(p, request);
  const int num_rows = rows.num_queries(p);
  const int first_row = row_tile * Config::kRows + row_group * 16;
  if (first_row >= num_rows) return;
  const Schedule<Config::kTokens> schedule(p);
  const int begin = schedule.request_begin(p, request);
  const int first = schedule.group_of(begin);
  const int last = schedule.group_of(begin + schedule.tiles_of(p, request) - 1);
  const int count = last - first + 1;
  if (count == 1) return;  // one group had the whole request and wrote its output

  // Only the first group can have come to this request from another one.
  const int64_t slot0 = partial_slot(p, first, row_tile, schedule.begin(first) >= begin);
  const int64_t slot1 = partial_slot(p, first + 1, row_tile, true);
  const int64_t slot_step = 2 * p.row_tiles;
  const auto slot_of = [&](int i) { return i == 0 ? slot0 : slot1 + (i - 1) * slot_step; };

  // A fragment's place in its tile: see VerifyBlock::store.
  const int fragment = block % kBlocksPerRows * C::kFragments + warp / kSplit;
  constexpr int kPairs = Config::kValueTiles / 2;
  const int of_warp = fragment / kPairs, pair = fragment % kPairs;
  const uint4* from = static_cast<const uint4*>(p.partial_out) +
                      ((of_warp * Config::kRowGroups + row_group) * kPairs + pair) * 32 + lane;
  constexpr int kSlotWords = Config::kRows * kLatentDim * 2 / 16;
  const auto load = [&](int i) { return __ldcg(from + slot_of(i) * kSlotWords); };

  grid_dependency_wait();
  // The first partials are under way while the weights are computed.
  constexpr int kAhead = 8;
  uint4 x[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u)
    if (const int i = warp % kSplit + u * kSplit; i < count) x[u] = load(i);

  // Weights: 16 lanes a row.
  {
    const int r = threadIdx.x / 16, own = threadIdx.x % 16;
    const float* lse = p.partial_lse + row_group * 16 + r;
    float top = -INFINITY;
#pragma unroll 4
    for (int i = own; i < count; i += 16) {
      const float x = __ldcg(lse + slot_of(i) * Config::kRows);
      weight_smem[i * 16 + r] = x;
      top = fmaxf(top, x);
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    const float base = top == -INFINITY ? 0.f : top;
    float sum = 0.f;
    for (int i = own; i < count; i += 16) {
      const float w = exp2_approx(weight_smem[i * 16 + r] - base);
      weight_smem[i * 16 + r] = w;
      sum += w;
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    for (int i = own; i < count; i += 16) weight_smem[i * 16 + r] *= scale;
    if (block % kBlocksPerRows == 0 && own == 0 && first_row + r < num_rows)
      p.lse[static_cast<int64_t>(rows.first_token) * p.num_heads + first_row + r] =
          sum > 0.f ? (base + log2f(sum)) * kLn2 : -INFINITY;
  }
  __syncthreads();

  float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  const auto add = [&](int i, const uint4& x) {
    const float low = weight_smem[i * 16 + lane / 4], high = weight_smem[i * 16 + lane / 4 + 8];
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
    if (const int i = warp % kSplit + u * kSplit; i < count) add(i, x[u]);
#pragma unroll 8
  for (int i = warp % kSplit + kAhead * kSplit; i < count; i += kSplit) add(i, load(i));
  if constexpr (kSplit > 1) {
#pragma unroll
    for (int e = 0; e < 8; ++e) sum_smem[warp][e][lane] = sum[e];
    __syncthreads();
    if (warp % kSplit) return;
#pragma unroll
    for (int s = 1; s < kSplit; ++s)
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += sum_smem[warp + s][e][lane];
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

}  // namespace mla
