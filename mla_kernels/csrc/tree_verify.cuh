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

#include "kv_layout.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

namespace mla {

template <class Element_, int kRows_>
struct VerifyConfig {
  using Element = Element_;
  static constexpr int kRows = kRows_;                      // 16, 32 or 64
  static constexpr int kTokens = 32;                        // cache rows a tile
  static constexpr int kStages = 2;
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
  static constexpr int kStageBytes = kTokens * kRowStride;  // 37,376
  static constexpr int kScoreStride = kTokens + 8;          // floats: rows 8 banks apart
  static constexpr int kProbStride = kTokens + 8;           // elements: rows 20 banks apart
  static constexpr int kKV = 0;                             // 74,752    74,752    74,752
  static constexpr int kS = kKV + kStages * kStageBytes;    //  5,120    10,240     8,192
  static constexpr int kP = kS + (kSwapFragments ? kWarps * 1024
                                                 : kDimSplits * kRows * kScoreStride * 4);
  static constexpr int kRescale = kP + kRows * kProbStride * 2;  // P: 1,280  2,560  5,120
  static constexpr int kQ = kRescale + kRows * 4;           //     64       128       256
  static constexpr int kSmemBytes = kQ + kWarps * kStepsInSmem * 512;  // Q: 0  0  12,288
  // Sum                                                       81,216    87,680   100,608
  static_assert(kSmemBytes <= 101376, "over the shared memory of an sm_120 block");

  // Q passes through the KV stages on its way to registers, at their end: up to 32 rows leave
  // the first stage free for the first tile's copies.
  static constexpr int kQStaging = kKV + (kStages * kTokens - kRows) * kRowStride;
  static constexpr bool kLoadBesideQ = kRows <= kTokens;
  static_assert(kRows <= kStages * kTokens, "Q must fit into the stages");
};

// A maximum may be exceeded by 2^8 before the accumulators are scaled down to a new one: the
// result is the same, and most tiles then scale nothing.
constexpr float kLazyRescale = 8.f;

template <class Config>
struct VerifyBlock {
  using C = Config;
  using Ops = ElementOps<typename C::Element>;

  const VerifyParams& p;
  unsigned char* const smem;
  const uint32_t smem_base;
  const int lane, warp;
  // The warp's part of S = Q K^T.
  const int row_group, dim_split, token_split;

  uint32_t Q_frag[C::kStepsInRegs][4];
  float O_frag[C::kRowGroups][C::kValueTiles][4];
  float row_max, row_sum;      // of the softmax row; the sum is this lane's share

  __device__ __forceinline__ VerifyBlock(const VerifyParams& params, unsigned char* shared)
      : p(params),
        smem(shared),
        smem_base(smem_address(shared)),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        row_group(warp % C::kRowGroups),
        dim_split(warp / C::kRowGroups % C::kDimSplits),
        token_split(warp / (C::kRowGroups * C::kDimSplits)) {}

  // The row of the tile whose softmax this lane shares, and its place among that row's lanes.
  __device__ __forceinline__ int softmax_row() const {
    return C::kSwapFragments ? row_group * 16 + dim_split * 8 + lane / 4
                             : static_cast<int>(threadIdx.x) / C::kLanesPerRow;
  }
  __device__ __forceinline__ int softmax_lane() const { return lane % C::kLanesPerRow; }
  // The token of the tile that score `i` of this lane belongs to.
  __device__ __forceinline__ int softmax_token(int i) const {
    return C::kSwapFragments ? i / 2 * 8 + softmax_lane() * 2 + i % 2
                             : softmax_lane() * C::kScores + i;
  }

  // ---- loads ----------------------------------------------------------------------------

  // A warp copies 4 rows of a tile, 8 lanes a row, 9 chunks of 16 bytes a lane.
  static constexpr int kCopies = kRowChunks / 8;
  __device__ __forceinline__ int copy_token() const { return warp * 4 + lane / 8; }
  __device__ __forceinline__ uint32_t copy_target(int stage) const {
    return smem_base + C::kKV + stage * C::kStageBytes + copy_token() * kRowStride + lane % 8 * 16;
  }
  __device__ __forceinline__ const char* copy_source(const RequestRows& rows, int tile) const {
    return rows.row(p, tile * C::kTokens + copy_token()) + lane % 8 * 16;
  }

  __device__ __forceinline__ void load_queries(const RequestRows& rows, int first_row) {
    const int num_rows = rows.num_drafts * p.num_heads;
    const int latent_chunk = p.latent_offset / 16;
    // In the order of the cache row, so that a dot product needs no knowledge of it.
    for (int i = threadIdx.x; i < C::kRows * kRowChunks; i += C::kThreads) {
      const int r = i / kRowChunks, chunk = i % kRowChunks;
      unsigned char* target = smem + C::kQStaging + r * kRowStride + chunk * 16;
      const int row = first_row + r;
      if (row >= num_rows) {  // past the request: zeros, so that no score is NaN
        *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
        continue;
      }
      const int64_t token = rows.first_token + row / p.num_heads, head = row % p.num_heads;
      const int in_latent = chunk - latent_chunk;
      const char* source =
          in_latent >= 0 && in_latent < kLatentDim * 2 / 16
              ? p.q_latent + token * p.q_latent_token_stride + head * p.q_latent_head_stride +
                    in_latent * 16
              : p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride +
                    (latent_chunk ? chunk : chunk - kLatentDim * 2 / 16) * 16;
      copy_async_16B(smem_address(target), source);
    }
  }

  __device__ __forceinline__ void queries_to_fragments() {
    const uint32_t base = smem_base + C::kQStaging + (row_group * 16 + lane % 16) * kRowStride +
                          dim_split * C::kSteps * 32 + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < C::kStepsInRegs; ++k) ldmatrix(Q_frag[k], base + k * 32);
#pragma unroll
    for (int k = C::kStepsInRegs; k < C::kSteps; ++k) {
      uint32_t f[4];
      ldmatrix(f, base + k * 32);
      *Q_smem(k) = make_uint4(f[0], f[1], f[2], f[3]);
    }
  }

  // The fragment of a late step, in fragment order: one uint4 a lane.
  __device__ __forceinline__ uint4* Q_smem(int k) const {
    return reinterpret_cast<uint4*>(smem + C::kQ) +
           (warp * C::kStepsInSmem + k - C::kStepsInRegs) * 32 + lane;
  }

  // ---- S = Q K^T ------------------------------------------------------------------------

  __device__ __forceinline__ void mma_qk(float (&d)[4], int k, uint32_t b0, uint32_t b1) {
    if (k < C::kStepsInRegs) {
      Ops::mma(d, Q_frag[k < C::kStepsInRegs ? k : 0], b0, b1);
    } else {
      const uint4 q = *Q_smem(k);
      const uint32_t a[4] = {q.x, q.y, q.z, q.w};
      Ops::mma(d, a, b0, b1);
    }
  }

  // The warp's part of the scores of one tile. Between the steps it issues the copies of the
  // next one (`source` not null), which spreads them over time.
  __device__ __forceinline__ void scores(float (&S_frag)[C::kKeyTiles][4], int stage,
                                         const char* source) {
    // x4: with two or more key tiles, two of them for one step; with one, two steps of it.
    constexpr bool kPairTokens = C::kKeyTiles > 1;
    const int token = token_split * C::kKeyTiles * 8 + lane % 8 + (kPairTokens ? lane / 16 * 8 : 0);
    const int chunk = kPairTokens ? lane / 8 % 2 : lane / 8;
    const uint32_t K_smem = smem_base + C::kKV + stage * C::kStageBytes + token * kRowStride +
                            dim_split * C::kSteps * 32 + chunk * 16;
    const uint32_t target = copy_target(stage ^ 1);
#pragma unroll
    for (int j = 0; j < C::kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S_frag[j][e] = 0.f;
    float odd[4] = {0.f, 0.f, 0.f, 0.f};  // a second chain where there is one key tile
#pragma unroll
    for (int k = 0; k < C::kSteps; ++k) {
      if (k % 2 == 0 && source) copy_async_16B(target + k / 2 * 128, source + k / 2 * 128);
      if constexpr (kPairTokens) {
#pragma unroll
        for (int j = 0; j < C::kKeyTiles; j += 2) {
          uint32_t f[4];
          ldmatrix(f, K_smem + j * 8 * kRowStride + k * 32);
          mma_qk(S_frag[j], k, f[0], f[1]);
          mma_qk(S_frag[j + 1], k, f[2], f[3]);
        }
      } else if (k % 2 == 0) {
        uint32_t f[4];
        ldmatrix(f, K_smem + k * 32);
        mma_qk(S_frag[0], k, f[0], f[1]);
        mma_qk(odd, k + 1, f[2], f[3]);
      }
    }
    static_assert(C::kSteps == 2 * kCopies, "one copy every other step");
    if constexpr (!kPairTokens) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S_frag[0][e] += odd[e];
    }
    copy_async_commit();
  }

  // Gives the other warps what they need of this warp's scores ...
  __device__ __forceinline__ void share_scores(const float (&S_frag)[C::kKeyTiles][4]) {
    if constexpr (C::kSwapFragments) {
      // The partner has the same rows and the other dimensions; it finishes rows 8 .. 15 of
      // the 16 if this warp finishes 0 .. 7.
      float4* to = S_swap(warp);
      const int e = dim_split == 0 ? 2 : 0;
#pragma unroll
      for (int j = 0; j < C::kKeyTiles; j += 2)
        to[j / 2 * 32] = make_float4(e ? S_frag[j][2] : S_frag[j][0],
                                     e ? S_frag[j][3] : S_frag[j][1],
                                     e ? S_frag[j + 1][2] : S_frag[j + 1][0],
                                     e ? S_frag[j + 1][3] : S_frag[j + 1][1]);
    } else {
      float* to = S_smem(dim_split, row_group * 16 + lane / 4) + token_split * C::kKeyTiles * 8 +
                  lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < C::kKeyTiles; ++j) {
        *reinterpret_cast<float2*>(to + j * 8) = make_float2(S_frag[j][0], S_frag[j][1]);
        *reinterpret_cast<float2*>(to + j * 8 + 8 * C::kScoreStride) =
            make_float2(S_frag[j][2], S_frag[j][3]);
      }
    }
  }

  // ... and takes the full scores of this lane's softmax row.
  __device__ __forceinline__ void collect_scores(float (&s)[C::kScores],
                                                 const float (&S_frag)[C::kKeyTiles][4]) {
    if constexpr (C::kSwapFragments) {
      const float4* from = S_swap(warp ^ C::kRowGroups);
#pragma unroll
      for (int j = 0; j < C::kKeyTiles; j += 2) {
        const float4 x = from[j / 2 * 32];
        s[2 * j] = x.x + (dim_split ? S_frag[j][2] : S_frag[j][0]);
        s[2 * j + 1] = x.y + (dim_split ? S_frag[j][3] : S_frag[j][1]);
        s[2 * j + 2] = x.z + (dim_split ? S_frag[j + 1][2] : S_frag[j + 1][0]);
        s[2 * j + 3] = x.w + (dim_split ? S_frag[j + 1][3] : S_frag[j + 1][1]);
      }
    } else {
      const float* a = S_smem(0, softmax_row()) + softmax_token(0);
      const float* b = S_smem(1, softmax_row()) + softmax_token(0);
#pragma unroll
      for (int i = 0; i < C::kScores; i += 2) {
        const float2 x = *reinterpret_cast<const float2*>(a + i);
        const float2 y = *reinterpret_cast<const float2*>(b + i);
        s[i] = x.x + y.x;
        s[i + 1] = x.y + y.y;
      }
    }
  }

  __device__ __forceinline__ float4* S_swap(int of_warp) const {
    return reinterpret_cast<float4*>(smem + C::kS + of_warp * 1024) + lane;
  }
  __device__ __forceinline__ float* S_smem(int split, int row) const {
    return reinterpret_cast<float*>(smem + C::kS) + (split * C::kRows + row) * C::kScoreStride;
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
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        if (!(visible >> softmax_token(i) & 1)) s[i] = -INFINITY;
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
    unsigned char* to = smem + C::kP + softmax_row() * C::kProbStride * 2;
#pragma unroll
    for (int i = 0; i < C::kScores; i += 2)
      *reinterpret_cast<uint32_t*>(to + softmax_token(i) * 2) = Ops::pack(s[i], s[i + 1]);
    if (softmax_lane() == 0) rescale_smem()[softmax_row()] = rescale;
  }

  __device__ __forceinline__ float* rescale_smem() const {
    return reinterpret_cast<float*>(smem + C::kRescale);
  }

  // ---- O += P V -------------------------------------------------------------------------

  // Multiplies O by a factor for each row.
  __device__ __forceinline__ void scale_output(const float* factor) {
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m) {
      const float low = factor[m * 16 + lane / 4], high = factor[m * 16 + lane / 4 + 8];
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j) {
        O_frag[m][j][0] *= low;
        O_frag[m][j][1] *= low;
        O_frag[m][j][2] *= high;
        O_frag[m][j][3] *= high;
      }
    }
  }

  __device__ __forceinline__ void accumulate(int stage) {
    bool changed = false;
    const float* rescale = rescale_smem();
#pragma unroll
    for (int m = 0; m < C::kRows; m += 8) changed |= rescale[m + lane / 4] != 1.f;
    if (__any_sync(0xffffffffu, changed)) scale_output(rescale);

    const uint32_t P_smem =
        smem_base + C::kP + lane % 16 * C::kProbStride * 2 + lane / 16 * 16;
    const uint32_t V_smem = smem_base + C::kKV + stage * C::kStageBytes + lane % 16 * kRowStride +
                            p.latent_offset + warp * C::kValueTiles * 16 + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < C::kTokens / 16; ++k) {
      uint32_t P_frag[C::kRowGroups][4];
#pragma unroll
      for (int m = 0; m < C::kRowGroups; ++m)
        ldmatrix(P_frag[m], P_smem + m * 16 * C::kProbStride * 2 + k * 32);
#pragma unroll
      for (int j = 0; j < C::kValueTiles; j += 2) {
        uint32_t f[4];
        ldmatrix_trans(f, V_smem + k * 16 * kRowStride + j * 16);
#pragma unroll
        for (int m = 0; m < C::kRowGroups; ++m) {
          Ops::mma(O_frag[m][j], P_frag[m], f[0], f[1]);
          Ops::mma(O_frag[m][j + 1], P_frag[m], f[2], f[3]);
        }
      }
    }
  }

  // ---- results --------------------------------------------------------------------------

  __device__ __forceinline__ void store(const RequestRows& rows, const Segment& segment,
                                        int row_tile, int group) {
#pragma unroll
    for (int d = 1; d < C::kLanesPerRow; d *= 2)
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, d);
    const int64_t slot = partial_slot(p, group, row_tile, segment.first);
    const int first_row = row_tile * C::kRows;
    const int num_rows = rows.num_drafts * p.num_heads;
    __syncthreads();  // every warp has read the last tile's rescale factors
    if (softmax_lane() == 0) {
      const int r = softmax_row();
      rescale_smem()[r] = row_sum > 0.f ? p.value_scale / row_sum : 0.f;
      const float lse = row_sum > 0.f ? row_max + log2f(row_sum) : -INFINITY;
      if (!segment.whole())
        p.partial_lse[slot * C::kRows + r] = lse;
      else if (first_row + r < num_rows)
        p.lse[static_cast<int64_t>(rows.first_token) * p.num_heads + first_row + r] = lse * kLn2;
    }
    __syncthreads();  // the factors are there
    scale_output(rescale_smem());

    if (segment.whole()) {
#pragma unroll
      for (int m = 0; m < C::kRowGroups; ++m)
        store_rows(rows, first_row + m * 16 + lane / 4, num_rows, warp * C::kValueTiles * 8,
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

  __device__ __forceinline__ void run(const Segment& segment, int row_tile, int group) {
    const RequestRows rows(p, segment.request);
    const int first_row = row_tile * C::kRows;
    if (first_row >= rows.num_drafts * p.num_heads) return;

    const int draft_token = min((first_row + softmax_row()) / p.num_heads, rows.num_drafts - 1);
    const uint32_t* mask =
        p.mask_bits + static_cast<int64_t>(rows.first_token + draft_token) * p.mask_words;

    __syncthreads();  // the previous segment's last reads of the stages are over
    load_queries(rows, first_row);
    copy_async_commit();
    const char* source = copy_source(rows, segment.tile_begin);
    if constexpr (C::kLoadBesideQ) {
      load_tile(0, source);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();  // Q is there
    queries_to_fragments();
    if constexpr (!C::kLoadBesideQ) {
      __syncthreads();  // Q has been read: its place may take a tile
      load_tile(0, source);
    }
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m)
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) O_frag[m][j][e] = 0.f;
    row_max = -INFINITY;
    row_sum = 0.f;

    int stage = 0;
    source = copy_source(rows, segment.tile_begin + 1);
    for (int tile = segment.tile_begin; tile < segment.tile_end; ++tile, stage ^= 1) {
      copy_async_wait<0>();
      __syncthreads();  // the tile is there; the other stage, P and the factors are free
      float S_frag[C::kKeyTiles][4];
      scores(S_frag, stage, tile + 1 < segment.tile_end ? source : nullptr);
      share_scores(S_frag);
      if (tile + 2 < segment.tile_end) source = copy_source(rows, tile + 2);
      __syncthreads();  // all parts of S are there
      float s[C::kScores];
      collect_scores(s, S_frag);
      softmax(s, visible_bits(mask, p.mask_words, tile * C::kTokens - rows.prefix_len,
                              rows.num_drafts));
      __syncthreads();  // P and the factors are there
      accumulate(stage);
    }
    store(rows, segment, row_tile, group);
  }

  __device__ __forceinline__ void load_tile(int stage, const char* source) {
    const uint32_t target = copy_target(stage);
#pragma unroll
    for (int c = 0; c < kCopies; ++c) copy_async_16B(target + c * 128, source + c * 128);
    copy_async_commit();
  }
};

// Grid (row_tiles, groups). Row tiles vary fastest: the blocks of one group read the same
// cache rows at about the same time, so that all but one find them in L2.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tree_verify(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  grid_dependency_wait();
  grid_dependency_release();
  const int row_tile = blockIdx.x, group = blockIdx.y;
  const Schedule<Config::kTokens> schedule(p);
  if (group >= schedule.groups) return;
  int tile = schedule.begin(group);
  const int end = schedule.begin(group + 1);

  VerifyBlock<Config> block(p, smem);
  Segment segment;
  schedule.locate(p, tile, segment.request, segment.tile_begin);
  segment.first = true;
  while (true) {
    segment.request_tiles = schedule.tiles_of(p, segment.request);
    segment.tile_end = min(segment.request_tiles, segment.tile_begin + end - tile);
    block.run(segment, row_tile, group);
    tile += segment.tile_end - segment.tile_begin;
    if (tile >= end) break;
    segment.first = false;
    segment.tile_begin = 0;
    do ++segment.request;
    while (schedule.tiles_of(p, segment.request) == 0);
  }
}

}  // namespace mla
