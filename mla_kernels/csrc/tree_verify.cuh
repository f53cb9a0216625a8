// Attention of a batch of draft trees over a paged MLA cache: mma.sync, cp.async, at most
// 101,376 bytes of shared memory. Runs on sm_80 and later; built for sm_120.
//
// A query row is one (draft token, head) pair. A block owns kRows of them and walks its share
// of the prefix and drafts in tiles of 32 cache rows, each loaded once and used as key and as
// value. Per tile:
//
//   S = Q K^T    a warp takes 16 rows, half of the 576 dimensions, and all or some tokens
//   P = 2^(S-m)  the halves meet in shared memory; running maximum and sum for each row
//   O += P V     a warp takes all rows and 64 of the 512 value columns, O in registers
#pragma once

#include <cooperative_groups.h>

#include "combine.cuh"
#include "kv_layout.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

namespace mla {

template <class Element_, int kRows_>
struct VerifyConfig {
  using Element = Element_;
  static constexpr int kRows = kRows_;                      // 16, 32 or 64
  static constexpr int kTokens = 32;                        // cache rows a tile
  static constexpr int kHalf = 16;                          // cache rows a stage: half a tile
  static constexpr int kStages = kRows == 16 ? 5 : 4;       // all that shared memory holds
  static constexpr int kWarps = 8, kThreads = kWarps * 32;

  static constexpr int kRowGroups = kRows / 16;             // 1   2   4    for 16, 32, 64 rows
  static constexpr int kDimSplits = 2;                      // 2   2   2
  static constexpr int kTokenSplits = kWarps / (kRowGroups * kDimSplits);  // 4   2   1
  static constexpr int kSteps = kRowDim / 16 / kDimSplits;  // 18 k16 steps a warp
  static constexpr int kKeyTiles = kTokens / kTokenSplits / 8;             // 1   2   4
  static constexpr int kValueTiles = kLatentDim / kWarps / 8;              // 8

  // 18 steps of Q are 72 registers a thread, and O takes 128 of the 255 at 64 rows: the last
  // 3 steps then stay in shared memory, which is what keeps the kernel free of spills.
  static constexpr int kStepsInSmem = kRows == 64 ? 3 : 0;
  static constexpr int kStepsInRegs = kSteps - kStepsInSmem;

  // Softmax: kLanesPerRow neighbouring lanes share a row, kScores tokens each.
  static constexpr int kLanesPerRow = kThreads / kRows;     // 16  8   4
  static constexpr int kScores = kTokens / kLanesPerRow;    // 2   4   8
  // At 64 rows a row's tokens lie in one warp's fragments and only the other half of the
  // dimensions is missing, so warps swap half-fragments; else S goes through a plain matrix.
  static constexpr bool kSwapFragments = kTokenSplits == 1;

  // Shared memory, in bytes                                 16 rows   32 rows   64 rows
  static constexpr int kStageBytes = kHalf * kRowStride;    // 18,688 each
  static constexpr int kScoreStride = kTokens + 8;          // floats: rows 8 banks apart
  static constexpr int kProbStride = kTokens + 8;           // elements: rows 20 banks apart
  static constexpr int kKV = 0;                             // 93,440    74,752    74,752
  static constexpr int kS = kKV + kStages * kStageBytes;    //  5,120    10,240     8,192
  static constexpr int kP = kS + (kSwapFragments ? kWarps * 1024
                                                 : kDimSplits * kRows * kScoreStride * 4);
  static constexpr int kRescale = kP + kRows * kProbStride * 2;  // P: 1,280  2,560  5,120
  static constexpr int kQ = kRescale + kRows * 4;           //     64       128       256
  static constexpr int kBarriers = kQ + kWarps * kStepsInSmem * 512;  // Q: 0  0  12,288
  static constexpr int kSegment = kBarriers + 2 * kStages * 8;   //    80       64        64
  static constexpr int kSmemBytes = kSegment + sizeof(Segment);  //    24       24        24
  // Sum                                                      100,008    87,768   100,696
  static_assert(kSmemBytes <= 101376, "over the shared memory of an sm_120 block");

  // The next tile's copies go out between the steps of the scores, where they disturb least, or
  // as soon as their stage is free, where the time until they land is what counts.
  static constexpr bool kCopyInScores = kRows > 32;

  // Q passes through the last stage on its way to registers, 4 steps at a time; the first tiles
  // are copied to the other stages meanwhile.
  static constexpr int kStepsAtOnce = 4;
  static constexpr int kScratchStride = kStepsAtOnce * 32 + 16;  // rows 4 banks apart
  static_assert(kWarps * 16 * kScratchStride <= kStageBytes, "Q scratch");
};

// A maximum may be exceeded by 2^8 before the accumulators are scaled down to a new one: the
// result is the same, and most tiles then scale nothing.
constexpr float kLazyRescale = 8.f;

template <class Config>
struct VerifyBlock {
  using C = Config;
  using Ops = ElementOps<typename C::Element>;

  const VerifyParams& p;
  const uint32_t smem;         // base address in shared memory
  int lane, warp;
  uint32_t tiles_before;       // the number of the next tile
  uint32_t Q_frag[C::kStepsInRegs][4];
  float O_frag[C::kRowGroups][C::kValueTiles][4];
  float row_max, row_sum;      // of the softmax row; the sum is this lane's share

  __device__ __forceinline__ VerifyBlock(const VerifyParams& params, unsigned char* shared)
      : p(params),
        smem(smem_address(shared)),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        tiles_before(0) {}

  // The warp's part of S = Q K^T.
  __device__ __forceinline__ int row_group() const { return warp % C::kRowGroups; }
  __device__ __forceinline__ int dim_split() const { return warp / C::kRowGroups % C::kDimSplits; }
  __device__ __forceinline__ int token_split() const {
    return warp / (C::kRowGroups * C::kDimSplits);
  }

  // The row of the tile whose softmax this lane shares, and its place among that row's lanes.
  __device__ __forceinline__ int softmax_row() const {
    return C::kSwapFragments ? row_group() * 16 + dim_split() * 8 + lane / 4
                             : (warp * 32 + lane) / C::kLanesPerRow;
  }
  __device__ __forceinline__ int softmax_lane() const { return lane % C::kLanesPerRow; }
  // The token of the tile that score `i` of this lane belongs to: first_token + token_step(i).
  __device__ __forceinline__ int first_token() const {
    return softmax_lane() * (C::kSwapFragments ? 2 : C::kScores);
  }
  static __device__ __forceinline__ constexpr int token_step(int i) {
    return C::kSwapFragments ? i / 2 * 8 + i % 2 : i;
  }

  // ---- stages ---------------------------------------------------------------------------
  // Tiles are numbered through all segments of the block. The halves of tile n are the halves
  // 2 n and 2 n + 1, and half h lies in stage h % kStages.

  __device__ __forceinline__ uint32_t KV_smem(uint32_t half) const {
    return smem + C::kKV + half % C::kStages * C::kStageBytes;
  }
  // Half 0 or 1 of a tile. With an even number of stages they lie side by side.
  __device__ __forceinline__ uint32_t KV_smem(uint32_t tile, int half) const {
    return C::kStages % 2 ? KV_smem(2 * tile + half)
                          : KV_smem(2 * tile) + half * C::kStageBytes;
  }
  // Its copies have landed.
  __device__ __forceinline__ uint32_t full(uint32_t half) const {
    return smem + C::kBarriers + half % C::kStages * 8;
  }
  // All warps are done with it: its stage may be filled again.
  __device__ __forceinline__ uint32_t empty(uint32_t half) const {
    return smem + C::kBarriers + (C::kStages + half % C::kStages) * 8;
  }
  static __device__ __forceinline__ uint32_t parity(uint32_t half) {
    return half / C::kStages & 1;
  }
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0)
      for (int i = 0; i < C::kStages; ++i) {
        barrier_init(full(i), C::kThreads / 2);
        barrier_init(empty(i), C::kThreads);
      }
    __syncthreads();
  }
  __device__ __forceinline__ void wait_full(uint32_t tile) const {
    barrier_wait(full(2 * tile), parity(2 * tile));
    barrier_wait(full(2 * tile + 1), parity(2 * tile + 1));
  }
  __device__ __forceinline__ void release(uint32_t tile) const {
    barrier_arrive(empty(2 * tile));
    barrier_arrive(empty(2 * tile + 1));
  }

  // ---- loads ----------------------------------------------------------------------------

  // Four warps copy the first halves of tiles and four the second ones: 4 rows each, 8 lanes a
  // row, 9 chunks of 16 bytes a lane.
  static constexpr int kCopies = kRowChunks / 8;
  __device__ __forceinline__ int copy_half() const { return warp / 4; }
  __device__ __forceinline__ uint32_t copy_target(uint32_t half) const {
    return KV_smem(half) + (warp % 4 * 4 + lane / 8) * kRowStride + lane % 8 * 16;
  }
  // The position of the lane's row of a tile (of the request's).
  __device__ __forceinline__ int copy_position(int tile) const {
    return tile * C::kTokens + warp * 4 + lane / 8;
  }
  __device__ __forceinline__ void wait_empty(uint32_t half) const {
    if (half >= C::kStages) barrier_wait(empty(half), parity(half - C::kStages));
  }
  __device__ __forceinline__ void copy(uint32_t half, const char* from) const {
    wait_empty(half);
    uint32_t to = copy_target(half);
    pin(to);
    pin(from);
#pragma unroll
    for (int c = 0; c < kCopies; ++c) copy_async_16B(to + c * 128, from + c * 128);
    copy_async_arrive(full(half));
  }

  // The warp's 16 rows and half of the dimensions of Q, in the order of the cache row, so that a
  // dot product needs no knowledge of it: in 16-byte pieces, all under way at once ...
  static constexpr int kRounds = (C::kSteps + C::kStepsAtOnce - 1) / C::kStepsAtOnce;
  __device__ __forceinline__ void fetch_queries(uint4 (&piece)[kRounds][4],
                                                const RequestRows& rows) const {
    constexpr int kChunks = C::kStepsAtOnce * 2;           // of a row, for some steps
    const int latent_chunk = p.latent_offset / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {                          // lane / 8 + 4 i: a row of the 16
      const int row = first_row() + row_group() * 16 + lane / 8 + i * 4;
      const bool present = row < rows.num_queries(p);
      const int safe = present ? row : 0;
      const int64_t token = rows.first_token + safe / p.num_heads, head = safe % p.num_heads;
      const char* latent =
          p.q_latent + token * p.q_latent_token_stride + head * p.q_latent_head_stride;
      const char* rope = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const int chunk = dim_split() * C::kSteps * 2 + round * kChunks + lane % kChunks;
        const int in_latent = chunk - latent_chunk;
        const int in_rope = latent_chunk ? chunk : chunk - kLatentDim * 2 / 16;
        const bool is_latent = in_latent >= 0 && in_latent < kLatentDim * 2 / 16;
        piece[round][i] = make_uint4(0, 0, 0, 0);          // rows past the request: zeros
        if (present && round * kChunks + lane % kChunks < C::kSteps * 2)
          piece[round][i] = __ldg(reinterpret_cast<const uint4*>(
              is_latent ? latent + in_latent * 16 : rope + in_rope * 16));
      }
    }
  }
  // ... and through a scratch of this warp's own to fragments.
  __device__ __forceinline__ void queries_to_fragments(const uint4 (&piece)[kRounds][4]) {
    const uint32_t scratch =
        KV_smem(2 * tiles_before + C::kStages - 1) + warp * 16 * C::kScratchStride;
    const uint32_t put = scratch + lane / 8 * C::kScratchStride + lane % 8 * 16;
    const uint32_t get = scratch + lane % 16 * C::kScratchStride + lane / 16 * 16;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int i = 0; i < 4; ++i) smem_store(put + i * 4 * C::kScratchStride, piece[round][i]);
      __syncwarp();
#pragma unroll
      for (int s = 0; s < C::kStepsAtOnce; ++s) {
        const int k = round * C::kStepsAtOnce + s;
        if (k < C::kStepsInRegs) {
          ldmatrix(Q_frag[k < C::kStepsInRegs ? k : 0], get + s * 32);
        } else if (k < C::kSteps) {
          uint32_t f[4];
          ldmatrix(f, get + s * 32);
          smem_store(Q_smem(k), make_uint4(f[0], f[1], f[2], f[3]));
        }
      }
      __syncwarp();
    }
  }

  // The fragment of a late step, in fragment order: one uint4 a lane.
  __device__ __forceinline__ uint32_t Q_smem(int k) const {
    return smem + C::kQ + ((warp * C::kStepsInSmem + k - C::kStepsInRegs) * 32 + lane) * 16;
  }

  // ---- S = Q K^T ------------------------------------------------------------------------

  // The step's 16 x 16 piece of Q.
  __device__ __forceinline__ void query_step(uint32_t (&a)[4], int k) const {
    if (k < C::kStepsInRegs) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = Q_frag[k < C::kStepsInRegs ? k : 0][e];
    } else {
      smem_load(a, Q_smem(k));
    }
  }

  // The warp's part of the scores of one tile. Between the steps it issues its copies of a
  // later half (if `copy`), which spreads them over time; where from, `source()` says.
  template <class Source>
  __device__ __forceinline__ void scores(float (&S_frag)[C::kKeyTiles][4], uint32_t tile,
                                         bool copy, uint32_t copy_half, Source source) {
    // x4: with two or more key tiles, two of them for one step; with one, two steps of it.
    constexpr bool kPairTokens = C::kKeyTiles > 1;
    const int token = token_split() * C::kKeyTiles * 8 % C::kHalf + lane % 8 +
                      (kPairTokens ? lane / 16 * 8 : 0);
    const int first_half = token_split() * C::kKeyTiles * 8 / C::kHalf;
    const int chunk = kPairTokens ? lane / 8 % 2 : lane / 8;
    const uint32_t offset = token * kRowStride + dim_split() * C::kSteps * 32 + chunk * 16;
    uint32_t K_smem[C::kKeyTiles > 2 ? 2 : 1];
    K_smem[0] = KV_smem(tile, first_half) + offset;
    if constexpr (C::kKeyTiles > 2) K_smem[1] = KV_smem(tile, 1) + offset;
    uint32_t to = 0;
    const char* from = nullptr;
#pragma unroll
    for (int j = 0; j < C::kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S_frag[j][e] = 0.f;
    float odd[4] = {0.f, 0.f, 0.f, 0.f};  // a second chain where there is one key tile
#pragma unroll
    for (int k = 0; k < C::kSteps; ++k) {
      if (k == 1 && copy) {    // the first multiplies are under way
        to = copy_target(copy_half);
        from = source();
        pin(to);
        pin(from);
        wait_empty(copy_half);
      }
      if (k % 2 == 1 && copy) copy_async_16B(to + k / 2 * 128, from + k / 2 * 128);
      uint32_t a[4];
      query_step(a, k);
      if constexpr (kPairTokens) {
#pragma unroll
        for (int j = 0; j < C::kKeyTiles; j += 2) {
          uint32_t f[4];
          ldmatrix(f, K_smem[j / 2] + k * 32);
          Ops::mma(S_frag[j], a, f[0], f[1]);
          Ops::mma(S_frag[j + 1], a, f[2], f[3]);
        }
      } else if (k % 2 == 0) {
        uint32_t f[4], b[4];
        ldmatrix(f, K_smem[0] + k * 32);
        query_step(b, k + 1);
        Ops::mma(S_frag[0], a, f[0], f[1]);
        Ops::mma(odd, b, f[2], f[3]);
      }
    }
    static_assert(C::kSteps == 2 * kCopies, "one copy every other step");
    if (copy) copy_async_arrive(full(copy_half));
    if constexpr (!kPairTokens) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S_frag[0][e] += odd[e];
    }
  }

  // Gives the other warps what they need of this warp's scores ...
  __device__ __forceinline__ void share_scores(const float (&S_frag)[C::kKeyTiles][4]) {
    if constexpr (C::kSwapFragments) {
      // The partner has the same rows and the other dimensions; it finishes rows 8 .. 15 of
      // the 16 if this warp finishes 0 .. 7.
#pragma unroll
      for (int j = 0; j < C::kKeyTiles; j += 2) {
        const bool low = dim_split() == 0;
        smem_store(S_swap(warp) + j / 2 * 512, low ? S_frag[j][2] : S_frag[j][0],
                   low ? S_frag[j][3] : S_frag[j][1], low ? S_frag[j + 1][2] : S_frag[j + 1][0],
                   low ? S_frag[j + 1][3] : S_frag[j + 1][1]);
      }
    } else {
      const uint32_t to = S_smem(dim_split(), row_group() * 16 + lane / 4) +
                          (token_split() * C::kKeyTiles * 8 + lane % 4 * 2) * 4;
#pragma unroll
      for (int j = 0; j < C::kKeyTiles; ++j) {
        smem_store(to + j * 32, S_frag[j][0], S_frag[j][1]);
        smem_store(to + j * 32 + 8 * C::kScoreStride * 4, S_frag[j][2], S_frag[j][3]);
      }
    }
  }

  // ... and takes the full scores of this lane's softmax row.
  __device__ __forceinline__ void collect_scores(float (&s)[C::kScores],
                                                 const float (&S_frag)[C::kKeyTiles][4]) {
    if constexpr (C::kSwapFragments) {
#pragma unroll
      for (int j = 0; j < C::kKeyTiles; j += 2) {
        float x[4];
        smem_load(x, S_swap(warp ^ C::kRowGroups) + j / 2 * 512);
        s[2 * j] = x[0] + (dim_split() ? S_frag[j][2] : S_frag[j][0]);
        s[2 * j + 1] = x[1] + (dim_split() ? S_frag[j][3] : S_frag[j][1]);
        s[2 * j + 2] = x[2] + (dim_split() ? S_frag[j + 1][2] : S_frag[j + 1][0]);
        s[2 * j + 3] = x[3] + (dim_split() ? S_frag[j + 1][3] : S_frag[j + 1][1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < C::kScores; i += 2) {
        float x[2], y[2];
        smem_load(x, S_smem(0, softmax_row()) + (first_token() + token_step(i)) * 4);
        smem_load(y, S_smem(1, softmax_row()) + (first_token() + token_step(i)) * 4);
        s[i] = x[0] + y[0];
        s[i + 1] = x[1] + y[1];
      }
    }
  }

  __device__ __forceinline__ uint32_t S_swap(int of_warp) const {
    return smem + C::kS + of_warp * 1024 + lane * 16;
  }
  __device__ __forceinline__ uint32_t S_smem(int split, int row) const {
    return smem + C::kS + (split * C::kRows + row) * C::kScoreStride * 4;
  }

  // ---- P = 2^(S - max) ------------------------------------------------------------------

  __device__ __forceinline__ void softmax(float (&s)[C::kScores], uint32_t visible) {
    if (p.logit_cap > 0.f) {
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        s[i] = p.logit_cap * kLog2e * tanhf(s[i] * p.logit_scale / p.logit_cap);
    } else {
#pragma unroll
      for (int i = 0; i < C::kScores; ++i) s[i] *= p.logit_scale * kLog2e;
    }
    if (visible != 0xffffffffu) {
      visible >>= first_token();
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        if (!(visible & 1u << token_step(i))) s[i] = -INFINITY;
    }
    float tile_max = s[0];
#pragma unroll
    for (int i = 1; i < C::kScores; ++i) tile_max = fmaxf(tile_max, s[i]);
#pragma unroll
    for (int d = 1; d < C::kLanesPerRow; d *= 2)
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, d));
    float rescale = 1.f;
    if (tile_max > row_max + kLazyRescale || row_max == -INFINITY) {
      rescale = row_max == -INFINITY ? 0.f : exp2_approx(row_max - tile_max);
      row_max = tile_max;
    }
    const float base = row_max == -INFINITY ? 0.f : row_max;  // -inf - -inf is NaN
    row_sum *= rescale;
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      s[i] = exp2_approx(s[i] - base);
      row_sum += s[i];
    }
    const uint32_t to = smem + C::kP + (softmax_row() * C::kProbStride + first_token()) * 2;
#pragma unroll
    for (int i = 0; i < C::kScores; i += 2)
      smem_store(to + token_step(i) * 2, Ops::pack(s[i], s[i + 1]));
    if (softmax_lane() == 0) smem_store(rescale_smem(softmax_row()), rescale);
  }

  // What O is multiplied by before P V is added, for each row.
  __device__ __forceinline__ uint32_t rescale_smem(int row) const {
    return smem + C::kRescale + row * 4;
  }

  // ---- O += P V -------------------------------------------------------------------------

  __device__ __forceinline__ void scale_output() {
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m) {
      const float low = smem_load_float(rescale_smem(m * 16 + lane / 4));
      const float high = smem_load_float(rescale_smem(m * 16 + lane / 4 + 8));
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j) {
        O_frag[m][j][0] *= low;
        O_frag[m][j][1] *= low;
        O_frag[m][j][2] *= high;
        O_frag[m][j][3] *= high;
      }
    }
  }

  __device__ __forceinline__ void accumulate(uint32_t tile) {
    bool changed = false;
#pragma unroll
    for (int m = 0; m < C::kRows; m += 8)
      changed |= smem_load_float(rescale_smem(m + lane / 4)) != 1.f;
    if (__any_sync(0xffffffffu, changed)) scale_output();

    const uint32_t P_smem =
        smem + C::kP + lane % 16 * C::kProbStride * 2 + lane / 16 * 16;
    const uint32_t offset = lane % 16 * kRowStride + p.latent_offset +
                            warp * C::kValueTiles * 16 + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < 2; ++k) {  // the tile's halves
      const uint32_t V_smem = KV_smem(tile, k) + offset;
      uint32_t P_frag[C::kRowGroups][4];
#pragma unroll
      for (int m = 0; m < C::kRowGroups; ++m)
        ldmatrix(P_frag[m], P_smem + m * 16 * C::kProbStride * 2 + k * 32);
#pragma unroll
      for (int j = 0; j < C::kValueTiles; j += 2) {
        uint32_t f[4];
        ldmatrix_trans(f, V_smem + j * 16);
#pragma unroll
        for (int m = 0; m < C::kRowGroups; ++m) {
          Ops::mma(O_frag[m][j], P_frag[m], f[0], f[1]);
          Ops::mma(O_frag[m][j + 1], P_frag[m], f[2], f[3]);
        }
      }
    }
  }

  // ---- results --------------------------------------------------------------------------

  // The block's segment waits in shared memory while it runs, when registers are scarce.
  __device__ __forceinline__ void keep(const Segment& segment) const {
    const uint32_t* word = reinterpret_cast<const uint32_t*>(&segment);
    if (threadIdx.x == 0)
#pragma unroll
      for (int i = 0; i < int(sizeof(Segment) / 4); ++i)
        smem_store(smem + C::kSegment + i * 4, word[i]);
  }
  __device__ __forceinline__ Segment kept() const {
    Segment segment;
    uint32_t* word = reinterpret_cast<uint32_t*>(&segment);
#pragma unroll
    for (int i = 0; i < int(sizeof(Segment) / 4); ++i)
      word[i] = smem_load_word(smem + C::kSegment + i * 4);
    return segment;
  }

  __device__ __forceinline__ void store() {
    pin(lane);
    pin(warp);
    const Segment segment = kept();
#pragma unroll
    for (int d = 1; d < C::kLanesPerRow; d *= 2)
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, d);
    const RequestRows rows(p, segment.request);
    const int64_t slot = partial_slot(p, blockIdx.y, blockIdx.x, segment.first);
    const int num_rows = rows.num_queries(p);
    __syncthreads();  // every warp has read the last tile's rescale factors
    if (softmax_lane() == 0) {
      const int r = softmax_row();
      smem_store(rescale_smem(r), row_sum > 0.f ? p.value_scale / row_sum : 0.f);
      const float lse = row_sum > 0.f ? row_max + log2f(row_sum) : -INFINITY;
      if (!segment.whole)
        p.partial_lse[slot * C::kRows + r] = lse;
      else if (first_row() + r < num_rows)
        p.lse[static_cast<int64_t>(rows.first_token) * p.num_heads + first_row() + r] = lse * kLn2;
    }
    __syncthreads();  // the factors are there
    scale_output();

    if (segment.whole) {
#pragma unroll
      for (int m = 0; m < C::kRowGroups; ++m)
        store_rows(rows, first_row() + m * 16 + lane / 4, num_rows, warp * C::kValueTiles * 8,
                   O_frag[m]);
    } else {
      // Fragment order, 512 contiguous bytes a warp: the combine reads it the same way.
      uint4* to = static_cast<uint4*>(p.partial_out) + slot * (C::kRows * kLatentDim * 2 / 16) +
                  warp * (C::kRowGroups * C::kValueTiles / 2) * 32 + lane;
#pragma unroll
      for (int m = 0; m < C::kRowGroups; ++m)
#pragma unroll
        for (int j = 0; j < C::kValueTiles; j += 2)
          to[(m * C::kValueTiles + j) / 2 * 32] =
              make_uint4(Ops::pack(O_frag[m][j][0], O_frag[m][j][1]),
                         Ops::pack(O_frag[m][j][2], O_frag[m][j][3]),
                         Ops::pack(O_frag[m][j + 1][0], O_frag[m][j + 1][1]),
                         Ops::pack(O_frag[m][j + 1][2], O_frag[m][j + 1][3]));
    }
  }

  __device__ __forceinline__ void store_rows(const RequestRows& rows, int row, int num_rows,
                                             int column, const float (&d)[C::kValueTiles][4]) {
    char* to = p.out + ((static_cast<int64_t>(rows.first_token) * p.num_heads + row) * kLatentDim +
                        column + lane % 4 * 2) * 2;
#pragma unroll
    for (int j = 0; j < C::kValueTiles; ++j) {
      if (row < num_rows) *reinterpret_cast<uint32_t*>(to + j * 16) = Ops::pack(d[j][0], d[j][1]);
      if (row + 8 < num_rows)
        *reinterpret_cast<uint32_t*>(to + j * 16 + 8 * kLatentDim * 2) =
            Ops::pack(d[j][2], d[j][3]);
    }
  }

  // ---- one request's tiles --------------------------------------------------------------

  // The block's first query row in a request.
  __device__ __forceinline__ int first_row() const { return blockIdx.x * C::kRows; }

  __device__ __forceinline__ void run(const Segment& segment) {
    pin(lane);
    pin(warp);
    const RequestRows rows(p, segment.request);
    __syncthreads();  // the previous segment's last reads of shared memory are over
    keep(segment);
    // Block tile n is the request's tile n + to_request.
    const int to_request = segment.tile_begin - tiles_before;
    const uint32_t end = tiles_before + segment.tile_end - segment.tile_begin;
    // This warp's halves: tile by tile, as many ahead as there are stages for.
    const int ahead = (C::kStages + (C::kStages % 2 ? 1 - copy_half() : 0)) / 2;
    const auto copy_of = [&](uint32_t tile) { return 2 * tile + copy_half(); };
    // The index of the row that the lane copies next, looked up a tile ahead.
    const auto look_up = [&](uint32_t tile) {
      return rows.look_up(p, copy_position(tile + to_request));
    };
    const auto source = [&](uint32_t tile, int index) {
      return rows.address(p, copy_position(tile + to_request), index) + lane % 8 * 16;
    };
    int indices[(C::kStages + 1) / 2];
#pragma unroll
    for (int i = 0; i < (C::kStages + 1) / 2; ++i) indices[i] = look_up(tiles_before + i);
    uint4 piece[kRounds][4];
    fetch_queries(piece, rows);
    // All stages but the last, which Q needs first.
#pragma unroll
    for (int i = 0; i < (C::kStages + 1) / 2; ++i)
      if (tiles_before + i < end && 2 * i + copy_half() < C::kStages - 1)
        copy(copy_of(tiles_before + i), source(tiles_before + i, indices[i]));
    queries_to_fragments(piece);
    __syncthreads();  // all warps are done with their scratch
    constexpr int kLast = (C::kStages - 1) / 2;
    if (tiles_before + kLast < end && 2 * kLast + copy_half() == C::kStages - 1)
      copy(copy_of(tiles_before + kLast), source(tiles_before + kLast, indices[kLast]));
    int index = look_up(tiles_before + ahead);
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m)
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) O_frag[m][j][e] = 0.f;
    row_max = -INFINITY;
    row_sum = 0.f;

    for (const uint32_t begin = tiles_before; tiles_before < end; ++tiles_before) {
      const uint32_t tile = tiles_before;
      wait_full(tile);
      pin(lane);
      float S_frag[C::kKeyTiles][4];
      // The stage of the tile before this one takes a later half.
      const uint32_t next = tile - 1 + ahead;
      const bool copy_now = C::kCopyInScores && tile > begin && next < end;
      scores(S_frag, tile, copy_now, copy_of(next), [&] { return source(next, index); });
      share_scores(S_frag);
      if (copy_now) index = look_up(next + 1);
      __syncthreads();  // all parts of S are there; all warps are done with the last P
      float s[C::kScores];
      collect_scores(s, S_frag);
      uint32_t visible = 0xffffffffu;
      const int first = static_cast<int>(tile + to_request) * C::kTokens - rows.prefix_len;
      if (first > -C::kTokens) {  // else all prefix
        const int draft = min((first_row() + softmax_row()) / p.num_heads, rows.num_drafts - 1);
        visible = visible_bits(
            p.mask_bits + static_cast<int64_t>(rows.first_token + draft) * p.mask_words,
            p.mask_words, first, rows.num_drafts);
      }
      softmax(s, visible);
      __syncthreads();  // P and its factors are there; S may be overwritten
      accumulate(tile);
      release(tile);
      if (!C::kCopyInScores && tile + ahead < end) {
        copy(copy_of(tile + ahead), source(tile + ahead, index));
        index = look_up(tile + ahead + 1);
      }
    }
    store();
  }
};

// With few results to merge, the blocks of the verify kernel do it themselves. They wait for one
// another, so all must be running: a cooperative launch sees to that. Not inlined: the compiler
// would spill registers of the main loop for its sake.
template <class Config>
__device__ __noinline__ void merge_together(const VerifyParams& p) {
  extern __shared__ __align__(16) unsigned char smem[];
  cooperative_groups::this_grid().sync();
  using C = Combine<Config, 8>;
  C merge{p, reinterpret_cast<float*>(smem)};
  const int units = p.batch_size * p.row_tiles * C::kUnitsPerTile;
  for (int unit = blockIdx.y * gridDim.x + blockIdx.x; unit < units;
       unit += gridDim.x * gridDim.y) {
    const int tile = unit / C::kUnitsPerTile;
    merge.run(tile / p.row_tiles, tile % p.row_tiles, unit % C::kUnitsPerTile, [] {});
    __syncthreads();  // shared memory is free for the next unit
  }
}

// Grid (row_tiles, groups). Row tiles vary fastest: the blocks of one group read the same
// cache rows at about the same time, so that all but one find them in L2.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tree_verify(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  grid_dependency_wait();
  grid_dependency_release();
  VerifyBlock<Config> block(p, smem);
  block.init_barriers();
  // What can be computed again is, after each segment: while one runs, registers are scarce.
  Segment segment = {};
  while (true) {
    const Schedule<Config::kTokens> schedule(p);
    const int tile = schedule.begin(blockIdx.y) + segment.done;
    const int left = schedule.begin(blockIdx.y + 1) - tile;
    if (left <= 0) break;
    schedule.locate(p, tile, segment.request, segment.tile_begin);
    const int request_tiles = schedule.tiles_of(p, segment.request);
    const int count = min(request_tiles - segment.tile_begin, left);
    segment.tile_end = segment.tile_begin + count;
    segment.whole = count == request_tiles;
    segment.first = segment.done == 0;
    segment.done += count;
    // A request smaller than the largest has fewer row tiles.
    if (block.first_row() >= RequestRows(p, segment.request).num_queries(p)) continue;
    block.run(segment);
    segment.done = block.kept().done;
  }

  if (p.fused) merge_together<Config>(p);
}

}  // namespace mla
