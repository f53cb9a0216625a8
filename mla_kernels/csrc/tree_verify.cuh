// Attention of a batch of draft trees over a paged MLA cache: mma.sync, cp.async, at most
// 101,376 bytes of shared memory. Runs on sm_80 and later; built for sm_120.
//
// A query row is one (draft token, head) pair. A block owns kRows of them and walks its share
// of the prefix and drafts in tiles of 16 cache rows, each loaded once and used as key and as
// value. Its warps have two roles, which overlap in time:
//
//   4 score warps   S = Q K^T over all 576 dimensions, 16 query rows and 16 tokens at once;
//                   P = 2^(S - max) in registers; P to shared memory. Q stays in registers.
//   8 value warps   O += P V, all rows and 64 of the 512 value columns each, O in registers;
//                   they also copy the tiles from global memory.
//
// While the value warps multiply tile t, the score warps are at tile t + 1: tensor cores find
// work from one role while the other waits for shared memory or exponentials.
#pragma once

#include "kv_layout.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

namespace mla {

template <class Element_, int kRows_>
struct VerifyConfig {
  using Element = Element_;
  static constexpr int kRows = kRows_;                      // 16, 32 or 64
  static constexpr int kTokens = 16;                        // cache rows a tile
  static constexpr int kStages = 4;
  static constexpr int kScoreWarps = 4, kValueWarps = 8;
  static constexpr int kThreads = (kScoreWarps + kValueWarps) * 32;

  static constexpr int kRowGroups = kRows / 16;             // of 16 rows: 1   2   4
  // With fewer row groups than score warps, warps of one group take turns at the tiles.
  static constexpr int kTurns = kScoreWarps / kRowGroups;   //             4   2   1
  static constexpr int kSteps = kRowDim / 16;               // 36 k16 steps
  static constexpr int kValueTiles = kLatentDim / kValueWarps / 8;  // 8 n8 tiles a warp

  // 12 warps leave 168 registers a thread. 36 steps of Q would be 144 of them: the last 9
  // stay in shared memory.
  static constexpr int kStepsInSmem = kRows < 64 ? 10 : 9;
  static constexpr int kStepsInRegs = kSteps - kStepsInSmem;

  // P and its companions pass from score to value warps through a ring of slots.
  static constexpr int kSlots = 8 / kRowGroups;             // 8   4   2
  static constexpr int kProbStride = kTokens + 8;           // elements: rows 12 banks apart
  static constexpr int kSlotBytes = kRows * kProbStride * 2;

  // Shared memory, in bytes                                   16 rows   32 rows   64 rows
  static constexpr int kStageBytes = kTokens * kRowStride;    // 18,688
  static constexpr int kKV = 0;                               // 74,752    74,752    74,752
  static constexpr int kP = kKV + kStages * kStageBytes;      //  6,144     6,144     6,144
  static constexpr int kQ = kP + kSlots * kSlotBytes;         //  4,608     9,216    18,432
  static constexpr int kRescale = kQ + kRowGroups * kStepsInSmem * 512;  // 512  512    512
  static constexpr int kChanged = kRescale + kSlots * kRows * 4;         //  32   32     32
  static constexpr int kMax = kChanged + kSlots * kRowGroups * 4;        //  64  128    256
  static constexpr int kSum = kMax + kRows * 4;               //    256       256       256
  static constexpr int kBarriers = kSum + kTurns * kRows * 4; //    232       168       136
  static constexpr int kNumBarriers = 2 * kStages + 2 * kSlots + kScoreWarps + kRowGroups;
  static constexpr int kParts = kBarriers + kNumBarriers * 8; //    384       384       384
  static constexpr int kSmemBytes = kParts + kThreads;
  // Sum                                                         87,032    91,592   100,904
  static_assert(kSmemBytes <= 101376, "over the shared memory of an sm_120 block");
  static_assert(kBarriers % 8 == 0, "barriers are 8 bytes wide");

  // Q passes through the P slots on its way to registers, two steps at a time.
  static constexpr int kQStagingStride = 64 + 16;             // bytes: rows 20 banks apart
  static_assert(kScoreWarps * 16 * kQStagingStride <= kSlots * kSlotBytes, "Q staging");
};

// A maximum may be exceeded by 2^8 before the accumulators are scaled down to a new one: the
// result is the same, and most tiles then scale nothing.
constexpr float kLazyRescale = 8.f;

// A block's part of one request, as its roles see it. Tiles are numbered through all parts of
// the block, tile n lying in stage n % kStages. Hand-offs of P are numbered likewise, hand-off n
// in slot n % kSlots: one a tile, and after the last one of a part another that brings the final
// factors of the rows. So tile n is hand-off n + number, and the last one end + number.
struct Part {
  int request;
  uint32_t number;             // parts before this one
  uint32_t begin, end;         // its tiles' numbers
  int first_position;          // of tile 0 of the block, if all its tiles were this request's
  uint32_t whole;              // all of the request's tiles: no other block has partial results
  uint32_t first;              // in its group's share
  int done;                    // tiles of the share up to its end

  // Where its partial results go, in units of a row tile.
  __device__ __forceinline__ int64_t partial(const VerifyParams& p) const {
    return partial_slot(p, blockIdx.y, blockIdx.x, first);
  }
};

// What both roles of a block share.
template <class Config>
struct VerifyBlock {
  using C = Config;
  using Ops = ElementOps<typename C::Element>;

  const VerifyParams& p;
  const uint32_t smem;         // base address in shared memory
  const int lane;

  __device__ __forceinline__ VerifyBlock(const VerifyParams& params, unsigned char* shared)
      : p(params), smem(smem_address(shared)), lane(threadIdx.x % 32) {}

  // The block's first query row in its request.
  __device__ __forceinline__ int first_row() const { return blockIdx.x * C::kRows; }

  // -- barriers; in brackets who arrives ---------------------------------------------------

  __device__ __forceinline__ uint32_t barrier(int index) const {
    return smem + C::kBarriers + index * 8;
  }
  // The tile's copies have landed (value warps, through cp.async).
  __device__ __forceinline__ uint32_t tile_full(uint32_t tile) const {
    return barrier(tile % C::kStages);
  }
  // The tile has been multiplied: its stage may be filled again (value warps).
  __device__ __forceinline__ uint32_t tile_empty(uint32_t tile) const {
    return barrier(C::kStages + tile % C::kStages);
  }
  // P and its factors are there (the score warps whose turn it is).
  __device__ __forceinline__ uint32_t slot_full(uint32_t handoff) const {
    return barrier(2 * C::kStages + handoff % C::kSlots);
  }
  // They have been read (value warps).
  __device__ __forceinline__ uint32_t slot_empty(uint32_t handoff) const {
    return barrier(2 * C::kStages + C::kSlots + handoff % C::kSlots);
  }
  // The running maximum after a tile is there (the row group's warp whose turn it is).
  __device__ __forceinline__ uint32_t max_full(uint32_t tile, int row_group) const {
    return barrier(2 * C::kStages + 2 * C::kSlots + tile % C::kTurns * C::kRowGroups + row_group);
  }
  // The sums of all turns of a row group are there (its score warps).
  __device__ __forceinline__ uint32_t sums_full(int row_group) const {
    return barrier(2 * C::kStages + 2 * C::kSlots + C::kScoreWarps + row_group);
  }

  static __device__ __forceinline__ uint32_t stage_parity(uint32_t tile) { return tile / C::kStages & 1; }
  static __device__ __forceinline__ uint32_t slot_parity(uint32_t handoff) { return handoff / C::kSlots & 1; }
  static __device__ __forceinline__ uint32_t turn_parity(uint32_t tile) { return tile / C::kTurns & 1; }

  // Waits until the stage or slot of a number is free, that is, until the number that had it
  // before has been released.
  __device__ __forceinline__ void wait_tile_empty(uint32_t tile) const {
    if (tile >= C::kStages) barrier_wait(tile_empty(tile), stage_parity(tile - C::kStages));
  }
  __device__ __forceinline__ void wait_slot_empty(uint32_t handoff) const {
    if (handoff >= C::kSlots) barrier_wait(slot_empty(handoff), slot_parity(handoff - C::kSlots));
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      constexpr int kValueThreads = C::kValueWarps * 32;
      for (int i = 0; i < C::kStages; ++i) {
        barrier_init(tile_full(i), kValueThreads);
        barrier_init(tile_empty(i), kValueThreads);
      }
      for (int i = 0; i < C::kSlots; ++i) {
        barrier_init(slot_full(i), C::kRowGroups * 32);
        barrier_init(slot_empty(i), kValueThreads);
      }
      for (int i = 0; i < C::kTurns; ++i)
        for (int g = 0; g < C::kRowGroups; ++g) barrier_init(max_full(i, g), 32);
      for (int i = 0; i < C::kRowGroups; ++i) barrier_init(sums_full(i), C::kTurns * 32);
    }
    __syncthreads();  // the only one: from here on the roles meet at the barriers above
  }

  // -- places in shared memory -------------------------------------------------------------

  __device__ __forceinline__ uint32_t KV_smem(uint32_t tile) const {
    return smem + C::kKV + tile % C::kStages * C::kStageBytes;
  }
  __device__ __forceinline__ uint32_t P_smem(uint32_t handoff) const {
    return smem + C::kP + handoff % C::kSlots * C::kSlotBytes;
  }
  // This warp's part. It lies in shared memory since registers are scarce while a part runs.
  __device__ __forceinline__ uint32_t part_smem() const {
    return smem + C::kParts + threadIdx.x / 32 * sizeof(Part);
  }
  __device__ __forceinline__ void put_part(const Part& part) const {
    __syncwarp();
    const uint32_t* word = reinterpret_cast<const uint32_t*>(&part);
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < int(sizeof(Part) / 4); ++i) smem_store(part_smem() + i * 4, word[i]);
    __syncwarp();
  }
  __device__ __forceinline__ Part get_part() const {
    Part part;
    uint32_t* word = reinterpret_cast<uint32_t*>(&part);
#pragma unroll
    for (int i = 0; i < int(sizeof(Part) / 4); ++i) word[i] = smem_load_word(part_smem() + i * 4);
    return part;
  }

  // What O is multiplied by before the slot's P V is added: a float for each row.
  __device__ __forceinline__ uint32_t rescale_smem(uint32_t handoff) const {
    return smem + C::kRescale + handoff % C::kSlots * C::kRows * 4;
  }
  // Whether any of them differs from 1: a word for each row group.
  __device__ __forceinline__ uint32_t changed_smem(uint32_t handoff) const {
    return smem + C::kChanged + handoff % C::kSlots * C::kRowGroups * 4;
  }
};

// ---- score warps --------------------------------------------------------------------------

template <class Config>
struct ScoreWarp : VerifyBlock<Config> {
  using C = Config;
  using Base = VerifyBlock<Config>;
  using typename Base::Ops;
  using Base::lane;
  using Base::p;
  using Base::smem;

  const int warp;              // 0 .. 3
  const int row_group;         // which 16 of the block's rows
  const uint32_t turn;            // which tiles: those with number % kTurns == turn

  uint32_t Q_frag[C::kStepsInRegs][4];
  // For the lane's two rows, lane / 4 and that + 8 of the group. The maximum is the one that
  // P is relative to; the sum is this lane's share of this warp's tiles.
  float row_max[2], row_sum[2];

  __device__ __forceinline__ ScoreWarp(const VerifyParams& params, unsigned char* shared)
      : Base(params, shared),
        warp(threadIdx.x / 32),
        row_group(warp % C::kRowGroups),
        turn(warp / C::kRowGroups) {}

  // The fragment of a late step, in fragment order: one uint4 a lane. Warps that take turns
  // have the same rows and write the same values.
  __device__ __forceinline__ uint32_t Q_smem(int step) const {
    return smem + C::kQ +
           ((row_group * C::kStepsInSmem + step - C::kStepsInRegs) * 32 + lane) * 16;
  }

  // Q in the order of the cache row, so that a score needs no knowledge of it: from global
  // memory in 16-byte pieces, through a scratch of this warp's own, two steps at a time.
  __device__ __forceinline__ void load_queries(const RequestRows& rows) {
    const char *latent[2], *rope[2];
    bool present[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = Base::first_row() + row_group * 16 + lane / 4 + i * 8;
      present[i] = row < rows.num_queries(p);
      const int safe = present[i] ? row : 0;
      const int64_t token = rows.first_token + safe / p.num_heads, head = safe % p.num_heads;
      latent[i] = p.q_latent + token * p.q_latent_token_stride + head * p.q_latent_head_stride;
      rope[i] = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
    }
    const uint32_t scratch = smem + C::kP + warp * 16 * C::kQStagingStride;
    const uint32_t put = scratch + lane / 4 * C::kQStagingStride + lane % 4 * 16;
    const uint32_t get = scratch + lane % 16 * C::kQStagingStride + lane / 16 * 16;
    constexpr int kPairBytes = 64, kRopePairs = kRopeDim * 2 / kPairBytes;
    constexpr int kLatentPairs = kLatentDim * 2 / kPairBytes;
    const bool rope_first = p.latent_offset != 0;
#pragma unroll
    for (int pair = 0; pair < C::kSteps / 2; ++pair) {
      const bool in_rope = rope_first ? pair < kRopePairs : pair >= kLatentPairs;
      const int piece = (rope_first ? in_rope ? pair : pair - kRopePairs
                                    : in_rope ? pair - kLatentPairs : pair) * kPairBytes +
                        lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 x = make_uint4(0, 0, 0, 0);  // past the request: zeros, so that no score is NaN
        if (present[i])
          x = __ldg(reinterpret_cast<const uint4*>((in_rope ? rope[i] : latent[i]) + piece));
        smem_store(put + i * 8 * C::kQStagingStride, x);
      }
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = pair * 2 + half;
        if (step < C::kStepsInRegs) {
          ldmatrix(Q_frag[step < C::kStepsInRegs ? step : 0], get + half * 32);
        } else {
          uint32_t f[4];
          ldmatrix(f, get + half * 32);
          smem_store(Q_smem(step), make_uint4(f[0], f[1], f[2], f[3]));
        }
      }
      __syncwarp();
    }
  }

  // S = Q K^T for 16 rows and the tile's 16 tokens, as two n8 fragments.
  __device__ __forceinline__ void scores(float (&S_frag)[2][4], uint32_t tile) {
    const uint32_t K_smem = Base::KV_smem(tile) + (lane % 8 + lane / 16 * 8) * kRowStride +
                            lane / 8 % 2 * 16;
    float odd[2][4];  // odd steps add up apart: four chains of dependent multiplies, not two
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S_frag[j][e] = odd[j][e] = 0.f;
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t f[4];
      ldmatrix(f, K_smem + step * 32);
      auto& d = step % 2 ? odd : S_frag;
      if (step < C::kStepsInRegs) {
        Ops::mma(d[0], Q_frag[step < C::kStepsInRegs ? step : 0], f[0], f[1]);
        Ops::mma(d[1], Q_frag[step < C::kStepsInRegs ? step : 0], f[2], f[3]);
      } else {
        uint32_t a[4];
        smem_load(a, Q_smem(step));
        Ops::mma(d[0], a, f[0], f[1]);
        Ops::mma(d[1], a, f[2], f[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S_frag[j][e] += odd[j][e];
  }

  // Scores to logits in units of log2, and to -inf what a row does not see. `visible`: the
  // tile's tokens as bits, for the lane's two rows.
  __device__ __forceinline__ void mask_and_scale(float (&S_frag)[2][4],
                                                 const uint32_t (&visible)[2]) {
    if (p.logit_cap > 0.f) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          S_frag[j][e] = p.logit_cap * kLog2e * tanhf(S_frag[j][e] * p.logit_scale / p.logit_cap);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) S_frag[j][e] *= p.logit_scale * kLog2e;
    }
    if ((visible[0] & visible[1] & 0xffff) != 0xffff) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!(visible[e / 2] >> (j * 8 + lane % 4 * 2 + e % 2) & 1)) S_frag[j][e] = -INFINITY;
    }
  }

  // Turns S into P, moves maximum and sum on, and hands P over.
  __device__ __forceinline__ void softmax(float (&S_frag)[2][4], uint32_t tile, bool first_tile,
                                          uint32_t handoff) {
    float top[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(fmaxf(S_frag[0][2 * i], S_frag[0][2 * i + 1]),
                     fmaxf(S_frag[1][2 * i], S_frag[1][2 * i + 1]));
      top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
    }
    const uint32_t max_smem = smem + C::kMax + (row_group * 16 + lane / 4) * 4;
    if constexpr (C::kTurns > 1) {
      // The maximum so far comes from the warp that had the tile before.
      if (!first_tile) {
        barrier_wait(Base::max_full(tile - 1, row_group), Base::turn_parity(tile - 1));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float before = smem_load_float(max_smem + i * 32);
          if (before != row_max[i]) {
            row_sum[i] *= row_max[i] == -INFINITY ? 0.f : exp2_approx(row_max[i] - before);
            row_max[i] = before;
          }
        }
      }
    }
    float rescale[2];
    bool changed = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rescale[i] = 1.f;
      if (top[i] > row_max[i] + kLazyRescale || row_max[i] == -INFINITY) {
        rescale[i] = row_max[i] == -INFINITY ? 0.f : exp2_approx(row_max[i] - top[i]);
        row_max[i] = top[i];
        changed = true;
      }
    }
    if constexpr (C::kTurns > 1) {
      __syncwarp();  // all lanes have read the old maximum
      if (lane % 4 == 0) {
        smem_store(max_smem, row_max[0]);
        smem_store(max_smem + 32, row_max[1]);
      }
      barrier_arrive(Base::max_full(tile, row_group));
    }
    Base::wait_slot_empty(handoff);
    const uint32_t P_smem = Base::P_smem(handoff) +
                            (row_group * 16 + lane / 4) * C::kProbStride * 2 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float base = row_max[i] == -INFINITY ? 0.f : row_max[i];  // -inf - -inf is NaN
      row_sum[i] *= rescale[i];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float a = exp2_approx(S_frag[j][2 * i] - base);
        const float b = exp2_approx(S_frag[j][2 * i + 1] - base);
        row_sum[i] += a + b;
        smem_store(P_smem + i * 8 * C::kProbStride * 2 + j * 16, Ops::pack(a, b));
      }
    }
    hand_over(handoff, rescale, changed);
  }

  // Writes the rows' factors beside P and releases the slot to the value warps.
  __device__ __forceinline__ void hand_over(uint32_t handoff, const float (&factor)[2], bool changed) {
    if (lane % 4 == 0) {
      const uint32_t to = Base::rescale_smem(handoff) + (row_group * 16 + lane / 4) * 4;
      smem_store(to, factor[0]);
      smem_store(to + 32, factor[1]);
    }
    const bool any = __any_sync(0xffffffffu, changed);
    if (lane == 0) smem_store(Base::changed_smem(handoff) + row_group * 4, uint32_t{any});
    barrier_arrive(Base::slot_full(handoff));
  }

  __device__ __forceinline__ void run() {
    const Part part = Base::get_part();
    const RequestRows rows(p, part.request);
    // The slots serve as scratch for Q: all that was handed over must have been read, and no
    // warp may write P into another's scratch.
    const uint32_t handed_over = part.begin + part.number;
    if (handed_over > 0)
      barrier_wait(Base::slot_empty(handed_over - 1), Base::slot_parity(handed_over - 1));
    load_queries(rows);
    named_barrier_sync(1, C::kScoreWarps * 32);

    int mask_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = Base::first_row() + row_group * 16 + lane / 4 + i * 8;
      mask_row[i] = rows.first_token + min(row / p.num_heads, rows.num_drafts - 1);
      row_max[i] = -INFINITY;
      row_sum[i] = 0.f;
    }
    const int to_draft = part.first_position - rows.prefix_len;
    for (uint32_t tile = part.begin + (turn - part.begin) % C::kTurns;
         tile < part.end; tile += C::kTurns) {
      const int first = static_cast<int>(tile * C::kTokens) + to_draft;
      uint32_t visible[2] = {0xffffffffu, 0xffffffffu};
      if (first > -C::kTokens) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          visible[i] = visible_bits(p.mask_bits + static_cast<int64_t>(mask_row[i]) * p.mask_words,
                                    p.mask_words, first, rows.num_drafts);
      }
      barrier_wait(Base::tile_full(tile), Base::stage_parity(tile));
      float S_frag[2][4];
      scores(S_frag, tile);
      mask_and_scale(S_frag, visible);
      softmax(S_frag, tile, tile == part.begin, tile + part.number);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
    }
    if constexpr (C::kTurns > 1) {
      if (!merge_turns(Base::get_part())) return;
    }
    finish(Base::get_part());
  }

  // Brings the turns' sums to the last maximum and adds them up, in the order of the turns.
  // False for all warps of a row group but one.
  __device__ __forceinline__ bool merge_turns(const Part& part) {
    const uint32_t last_tile = part.end - 1;
    const uint32_t max_smem = smem + C::kMax + (row_group * 16 + lane / 4) * 4;
    const uint32_t sum_smem = smem + C::kSum + (row_group * 16 + lane / 4) * 4;
    barrier_wait(Base::max_full(last_tile, row_group), Base::turn_parity(last_tile));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = smem_load_float(max_smem + i * 32);
      if (row_max[i] != top)
        row_sum[i] *= row_max[i] == -INFINITY ? 0.f : exp2_approx(row_max[i] - top);
      row_max[i] = top;
      if (lane % 4 == 0) smem_store(sum_smem + (turn * C::kRows + i * 8) * 4, row_sum[i]);
    }
    barrier_arrive(Base::sums_full(row_group));
    barrier_wait(Base::sums_full(row_group), part.number & 1);
    if (turn != 0) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] = 0.f;
#pragma unroll
      for (int u = 0; u < C::kTurns; ++u)
        row_sum[i] += smem_load_float(sum_smem + (u * C::kRows + i * 8) * 4);
    }
    return true;
  }

  // Stores the rows' log-sum-exp and hands over what makes O the result.
  __device__ __forceinline__ void finish(const Part& part) {
    const RequestRows rows(p, part.request);
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = row_sum[i] > 0.f ? p.value_scale / row_sum[i] : 0.f;
      const float lse = row_sum[i] > 0.f ? row_max[i] + log2f(row_sum[i]) : -INFINITY;
      const int r = row_group * 16 + lane / 4 + i * 8;
      if (lane % 4 == 0) {
        if (!part.whole)
          p.partial_lse[part.partial(p) * C::kRows + r] = lse;
        else if (Base::first_row() + r < rows.num_queries(p))
          p.lse[static_cast<int64_t>(rows.first_token) * p.num_heads +
                Base::first_row() + r] = lse * kLn2;
      }
    }
    Base::wait_slot_empty(part.end + part.number);
    hand_over(part.end + part.number, factor, true);
  }
};

// ---- value warps --------------------------------------------------------------------------

template <class Config>
struct ValueWarp : VerifyBlock<Config> {
  using C = Config;
  using Base = VerifyBlock<Config>;
  using typename Base::Ops;
  using Base::lane;
  using Base::p;
  using Base::smem;

  const int warp;              // 0 .. 7
  float O_frag[C::kRowGroups][C::kValueTiles][4];

  __device__ __forceinline__ ValueWarp(const VerifyParams& params, unsigned char* shared)
      : Base(params, shared), warp(threadIdx.x / 32 - C::kScoreWarps) {}

  // -- copies: a warp has 2 rows of a tile, 16 lanes each ------------------------------------

  static_assert(C::kTokens == 2 * C::kValueWarps, "two rows a warp");
  // Where the row lies that this lane has a share in: looked up a tile ahead of its copy.
  __device__ __forceinline__ int copy_place(const RequestRows& rows, int first_position) const {
    return rows.locate(p, first_position + warp * 2 + lane / 16);
  }
  __device__ __forceinline__ void copy_tile(uint32_t tile, int place) const {
    Base::wait_tile_empty(tile);
    const char* from = row_address(p, place) + lane % 16 * 16;
    const uint32_t to = Base::KV_smem(tile) + (warp * 2 + lane / 16) * kRowStride + lane % 16 * 16;
#pragma unroll
    for (int c = 0; c < kRowChunks / 16; ++c) copy_async_16B(to + c * 256, from + c * 256);
    constexpr int kRest = kRowChunks / 16 * 16;  // 72 chunks: 4 a lane, and 8 for half the lanes
    if (lane % 16 < kRowChunks - kRest) copy_async_16B(to + kRest * 16, from + kRest * 16);
    copy_async_arrive(Base::tile_full(tile));
  }

  // -- O += P V -----------------------------------------------------------------------------

  // Multiplies the rows of O by the factors of a hand-off.
  __device__ __forceinline__ void scale_output(uint32_t handoff) {
    const uint32_t factor = Base::rescale_smem(handoff) + lane / 4 * 4;
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m) {
      const float low = smem_load_float(factor + m * 64);
      const float high = smem_load_float(factor + m * 64 + 32);
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j) {
        O_frag[m][j][0] *= low;
        O_frag[m][j][1] *= low;
        O_frag[m][j][2] *= high;
        O_frag[m][j][3] *= high;
      }
    }
  }

  __device__ __forceinline__ void rescale_if_changed(uint32_t handoff) {
    uint32_t any = 0;
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m) any |= smem_load_word(Base::changed_smem(handoff) + m * 4);
    if (any) scale_output(handoff);
  }

  __device__ __forceinline__ void accumulate(uint32_t tile, uint32_t handoff) {
    const uint32_t P_smem =
        Base::P_smem(handoff) + lane % 16 * C::kProbStride * 2 + lane / 16 * 16;
    const uint32_t V_smem = Base::KV_smem(tile) + lane % 16 * kRowStride + p.latent_offset +
                            warp * C::kValueTiles * 16 + lane / 16 * 16;
    uint32_t P_frag[C::kRowGroups][4];
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m)
      ldmatrix(P_frag[m], P_smem + m * 16 * C::kProbStride * 2);
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

  // -- one part -----------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
    const Part part = Base::get_part();
    const RequestRows rows(p, part.request);
    // The rows' places are looked up before they are needed: here for all stages at once, in
    // the loop a tile ahead.
    const auto look_up = [&](uint32_t tile) {
      return copy_place(rows, tile * C::kTokens + part.first_position);
    };
    int places[C::kStages];
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) places[i] = look_up(part.begin + i);
#pragma unroll
    for (int i = 0; i < C::kStages; ++i)
      if (part.begin + i < part.end) copy_tile(part.begin + i, places[i]);
    int place = look_up(part.begin + C::kStages);
#pragma unroll
    for (int m = 0; m < C::kRowGroups; ++m)
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) O_frag[m][j][e] = 0.f;

    for (uint32_t tile = part.begin; tile < part.end; ++tile) {
      const uint32_t handoff = tile + part.number;
      barrier_wait(Base::tile_full(tile), Base::stage_parity(tile));
      barrier_wait(Base::slot_full(handoff), Base::slot_parity(handoff));
      rescale_if_changed(handoff);
      accumulate(tile, handoff);
      barrier_arrive(Base::slot_empty(handoff));
      barrier_arrive(Base::tile_empty(tile));
      // Into the stage of the tile before: the other warps are done with it, or nearly.
      const uint32_t next = tile - 1 + C::kStages;
      if (tile > part.begin && next < part.end) {
        copy_tile(next, place);
        place = look_up(next + 1);
      }
    }
    const uint32_t last = part.end + part.number;
    barrier_wait(Base::slot_full(last), Base::slot_parity(last));
    scale_output(last);
    barrier_arrive(Base::slot_empty(last));
    store(Base::get_part());
  }

  __device__ __forceinline__ void store(const Part& part) const {
    if (part.whole) {
      const RequestRows rows(p, part.request);
#pragma unroll
      for (int m = 0; m < C::kRowGroups; ++m)
        store_rows(rows, Base::first_row() + m * 16 + lane / 4, O_frag[m]);
      return;
    }
    // Fragment order, 512 contiguous bytes a warp: the combine reads it the same way.
    uint4* to = static_cast<uint4*>(p.partial_out) +
                part.partial(p) * (C::kRows * kLatentDim * 2 / 16) +
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

  __device__ __forceinline__ void store_rows(const RequestRows& rows, int row,
                                             const float (&d)[C::kValueTiles][4]) const {
    const int num_rows = rows.num_queries(p);
    char* to = p.out + ((static_cast<int64_t>(rows.first_token) * p.num_heads + row) * kLatentDim +
                        warp * C::kValueTiles * 8 + lane % 4 * 2) * 2;
#pragma unroll
    for (int j = 0; j < C::kValueTiles; ++j) {
      if (row < num_rows) *reinterpret_cast<uint32_t*>(to + j * 16) = Ops::pack(d[j][0], d[j][1]);
      if (row + 8 < num_rows)
        *reinterpret_cast<uint32_t*>(to + j * 16 + 8 * kLatentDim * 2) =
            Ops::pack(d[j][2], d[j][3]);
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------

// Calls `role.run` for each part that a block has.
template <class Config, class Role>
__device__ __forceinline__ void for_each_part(const VerifyParams& p, Role& role) {
  Part part = {};
  while (true) {
    const Schedule<Config::kTokens> schedule(p);
    const int at = schedule.begin(blockIdx.y) + part.done;
    const int left = schedule.begin(blockIdx.y + 1) - at;
    if (left <= 0) return;
    int tile_in_request;
    schedule.locate(p, at, part.request, tile_in_request);
    const int request_tiles = schedule.tiles_of(p, part.request);
    const int count = min(request_tiles - tile_in_request, left);
    part.first = part.done == 0;
    part.done += count;
    // A request smaller than the largest has fewer row tiles.
    if (blockIdx.x * Config::kRows >= RequestRows(p, part.request).num_queries(p)) continue;
    part.end = part.begin + count;
    part.first_position = (tile_in_request - static_cast<int>(part.begin)) * Config::kTokens;
    part.whole = count == request_tiles;
    role.put_part(part);
    role.run();
    part = role.get_part();
    part.begin = part.end;
    ++part.number;
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
  VerifyBlock<Config>(p, smem).init_barriers();
  if (threadIdx.x < Config::kScoreWarps * 32) {
    ScoreWarp<Config> role(p, smem);
    for_each_part<Config>(p, role);
  } else {
    ValueWarp<Config> role(p, smem);
    for_each_part<Config>(p, role);
  }
}

}  // namespace mla
