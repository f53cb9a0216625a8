// Attention of a batch of draft trees over a paged MLA cache: mma.sync, cp.async, at most
// 101,376 bytes of shared memory. Runs on sm_80 and later; built for sm_120.
//
// A query row is one (draft token, head) pair. A block owns kRows of them and walks its share
// of the prefix and drafts in tiles of 32 cache rows, each loaded once and used as key and as
// value. Two teams of four warps do so, each with barriers of its own, so that one can multiply
// while the other waits. A team's part of a tile:
//
//   S = Q K^T    a warp takes all the team's rows and a quarter of the 576 dimensions
//   P = 2^(S-m)  the quarters meet in shared memory; a warp finishes 8 rows
//   O += P V     a warp takes all the team's rows and 128 of the 512 value columns
#pragma once

#include "combine.cuh"
#include "kv_layout.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

namespace mla {

// What a block must know while it walks one segment. It waits in shared memory: registers are
// scarce there.
struct Walk {
  struct Span {                // in tiles of the block
    uint32_t begin, end;
    uint32_t plain_end;        // tiles before it hold prefix alone
    int to_request;            // tile n is the request's tile n + to_request
  } span;
  RequestRows rows;
  Segment segment;
};

template <class Element_, int kRows_>
struct VerifyConfig {
  using Element = Element_;
  static constexpr int kRows = kRows_;                      // 16, 32 or 64
  static constexpr int kRowGroups = kRows / 16;
  static constexpr int kTokens = 32;                        // cache rows a tile
  static constexpr int kStages = 2;                         // tiles in shared memory
  static constexpr int kTeams = 2, kTeamWarps = 4, kTeamThreads = kTeamWarps * 32;
  static constexpr int kThreads = kTeams * kTeamThreads;

  // With 64 rows a team takes half of them, and all tokens of every tile; with fewer it takes
  // all rows, and half of the tokens. Either way its output fits its registers.
  static constexpr bool kSplitRows = kRows == 64;
  static constexpr int kTeamRows = kSplitRows ? kRows / 2 : kRows;         // 16  32  32
  static constexpr int kTeamTokens = kSplitRows ? kTokens : kTokens / 2;   // 16  16  32
  static constexpr int kTeamGroups = kTeamRows / 16;        // 1   2   2   of 16 rows
  static constexpr int kTokenGroups = kTeamTokens / 16;     // 1   1   2   of 16 tokens
  static constexpr int kSteps = kRowDim / 16 / kTeamWarps;  // 9 k16 steps of Q K^T a warp
  static constexpr int kValueTiles = kLatentDim / kTeamWarps / 8;          // 16

  // Softmax: a warp finishes 8 rows, 4 neighbouring lanes a row. With 16 rows two warps do.
  static constexpr int kFinishers = kTeamRows / 8;          // 2   4   4
  static constexpr int kScores = kTeamTokens / 4;           // 4   4   8   a lane

  // A warp copies 4 rows of a tile: with 64 rows between the steps of the second half of the
  // scores, where that disturbs least and the teams need not be abreast; else as soon as the
  // stage is free, since the time until the rows land is what counts.
  static constexpr int kCopies = kTokens / (kThreads / 32);
#if __CUDA_ARCH__ >= 900
  static constexpr int kFullArrivals = 1;                   // a warp: bulk copies
#else
  static constexpr int kFullArrivals = 32;                  // a warp: copies of 16 bytes
#endif

  // A warp's mail to the finishers: its part of their scores, a letter for each but itself, in
  // fragment order. (With 16 rows two warps send one letter, and their room for two stays.)
  static constexpr int kLetterBytes = kTokenGroups * 512;   // 512    512    1,024
  static constexpr int kLetters = kFinishers == 2 ? 2 : 3;
  static constexpr int kMailBytes = kLetters * kLetterBytes;   // 1,024  1,536  3,072
  // A finisher's probabilities take the place of the letter from its neighbour.
  static constexpr int kProbStride = kTeamTokens + 8;       // elements: rows 12 or 20 banks apart
  static_assert(8 * kProbStride * 2 <= kLetterBytes, "probabilities in a letter");

  // Q passes through the mail on its way to registers, 16 rows and 3 steps at a time.
  static constexpr int kScratchStride = 3 * 32 + 16;        // rows 28 banks apart
  static constexpr int kScratchBytes = 16 * kScratchStride;

  // Shared memory, in bytes                                 16 rows   32 rows   64 rows
  static constexpr int kStageBytes = kTokens * kRowStride;  // 37,376 each
  static constexpr int kKV = 0;                             // 74,752    74,752    74,752
  static constexpr int kMail = kKV + kStages * kStageBytes; // 14,336    14,336    24,576
  static constexpr int kMailRoom = kTeams * kTeamWarps * kMailBytes;
  static constexpr int kScratchRoom = kTeams * kTeamWarps * kScratchBytes;
  static constexpr int kRescale = kMail + (kMailRoom > kScratchRoom ? kMailRoom : kScratchRoom);
  static constexpr int kChanged = kRescale + kTeams * kTeamRows * 4;  // 128  256    256
  static constexpr int kBarriers = kChanged + kTeams * 16;  //     32        32        32
  static constexpr int kSources = kBarriers + kTeams * 5 * 8;  //  80        80        80
  static constexpr int kWalk = kSources + kTokens * 8;      //    256       256       256
  static constexpr int kSmemBytes = kWalk + sizeof(Walk);   //     60        60        60
  static_assert(kWalk % 16 == 0, "loaded in 16-byte pieces");
  // Sum                                                      89,644    89,772   100,012
  static_assert(kSmemBytes <= 101376, "over the shared memory of an sm_120 block");
};

// A maximum may be exceeded by 2^8 before the accumulators are scaled down to a new one: the
// result is the same, and most tiles then scale nothing.
constexpr float kLazyRescale = 8.f;

extern __shared__ __align__(16) unsigned char dynamic_smem[];

template <class Config>
struct VerifyBlock {
  using C = Config;
  using Ops = ElementOps<typename C::Element>;

  const VerifyParams& p;
  uint32_t thread;             // of the block
  uint32_t tiles_before;       // the number of the next tile
  uint32_t Q_frag[C::kTeamGroups][C::kSteps][4];
  float O_frag[C::kTeamGroups][C::kValueTiles][4];
  float row_max, row_sum;      // of the lane's softmax row; the sum is this lane's share

  __device__ __forceinline__ explicit VerifyBlock(const VerifyParams& params)
      : p(params), thread(threadIdx.x), tiles_before(0) {}

  // Asked anew each time: a constant, which no register need hold.
  static __device__ __forceinline__ uint32_t smem() { return smem_address(dynamic_smem); }
  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32 % C::kTeamWarps; }
  __device__ __forceinline__ int team() const { return thread / C::kTeamThreads; }

  // The block's first query row in a request, and the team's.
  __device__ __forceinline__ int first_row() const { return blockIdx.x * C::kRows; }
  __device__ __forceinline__ int team_row() const {
    return first_row() + (C::kSplitRows ? team() * C::kTeamRows : 0);
  }
  // The team's first token of a tile.
  __device__ __forceinline__ int team_token() const {
    return C::kSplitRows ? 0 : team() * C::kTeamTokens;
  }
  // A member of Walk.
  template <class T>
  __device__ __forceinline__ T walk(int offset) const {
    return smem_get<T>(smem() + C::kWalk + offset);
  }
  __device__ __forceinline__ void team_sync() const {
    named_barrier_sync(1 + team(), C::kTeamThreads);
  }

  // ---- stages ---------------------------------------------------------------------------
  // Tiles are numbered through all segments of the block; tile n lies in stage n % kStages.
  // Where teams take different tokens, each has barriers of its own for its half of a stage.

  __device__ __forceinline__ uint32_t KV_smem(uint32_t tile) const {
    return smem() + C::kKV + tile % C::kStages * C::kStageBytes + team_token() * kRowStride;
  }
  __device__ __forceinline__ uint32_t barrier(int i) const { return smem() + C::kBarriers + i * 8; }
  __device__ __forceinline__ int stage(uint32_t tile) const {
    return tile % C::kStages + (C::kSplitRows ? 0 : team() * C::kStages);
  }
  // The tile's copies have landed.
  __device__ __forceinline__ uint32_t full(uint32_t tile) const { return barrier(stage(tile)); }
  // All are done with it: its stage may be filled again.
  __device__ __forceinline__ uint32_t empty(uint32_t tile) const {
    return barrier(C::kTeams * C::kStages + stage(tile));
  }
  // The team has read its probabilities: the mail may be used again.
  __device__ __forceinline__ uint32_t spent() const {
    return barrier(2 * C::kTeams * C::kStages + team());
  }
  static __device__ __forceinline__ uint32_t parity(uint32_t tile) {
    return tile / C::kStages & 1;
  }
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kTeams * C::kStages; ++i) {
        barrier_init(barrier(i),
                     (C::kSplitRows ? C::kTeams : 1) * C::kTeamWarps * C::kFullArrivals);
        barrier_init(barrier(C::kTeams * C::kStages + i),
                     C::kSplitRows ? C::kThreads : C::kTeamThreads);
      }
      for (int i = 0; i < C::kTeams; ++i)
        barrier_init(barrier(2 * C::kTeams * C::kStages + i), C::kTeamThreads);
    }
    // With 16 rows two warps finish, and two of the words that all read are no one's.
    if (C::kFinishers < C::kTeamWarps && threadIdx.x < C::kTeams * 4)
      smem_store(smem() + C::kChanged + threadIdx.x * 4, 0u);
    fence_before_bulk();
    __syncthreads();
  }

  // ---- loads ----------------------------------------------------------------------------

  // Lane l of a warp finds where row l % kCopies of its rows comes from.
  __device__ __forceinline__ int copy_position(int tile) const {
    return tile * C::kTokens + threadIdx.x / 32 * C::kCopies + lane() % C::kCopies;
  }
  // All lanes' answers, for whichever of them copies.
  __device__ __forceinline__ uint32_t source_smem(int row) const {
    return smem() + C::kSources + (threadIdx.x / 32 * C::kCopies + row) * 8;
  }
  // A tile's copies: begin, each row, end. Waits until the stage's last readers are done.
  __device__ __forceinline__ void copy_begin(uint32_t tile, const char* from) const {
    smem_store(source_smem(lane() % C::kCopies), from);
    if (tile >= C::kStages) barrier_wait(empty(tile), parity(tile - C::kStages));
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (elect_one()) barrier_expect(full(tile), C::kCopies * kRowBytes);
#endif
  }
  __device__ __forceinline__ void copy_row(uint32_t tile, int row) const {
    const uint32_t to = smem() + C::kKV + tile % C::kStages * C::kStageBytes +
                        (threadIdx.x / 32 * C::kCopies + row) * kRowStride;
#if __CUDA_ARCH__ >= 900
    if (elect_one()) copy_bulk(to, smem_load_pointer(source_smem(row)), kRowBytes, full(tile));
#else
    const char* from = smem_load_pointer(source_smem(row));
    for (int chunk = lane(); chunk < kRowChunks; chunk += 32)
      copy_async_16B(to + chunk * 16, from + chunk * 16);
#endif
  }
  __device__ __forceinline__ void copy_end(uint32_t tile) const {
#if __CUDA_ARCH__ < 900
    copy_async_arrive(full(tile));
#endif
  }
  __device__ __forceinline__ void copy(uint32_t tile, const char* from) const {
    copy_begin(tile, from);
#pragma unroll
    for (int row = 0; row < C::kCopies; ++row) copy_row(tile, row);
    copy_end(tile);
    __syncwarp();  // the sources are read
  }

  // The team's rows and a quarter of the dimensions of Q, in the order of the cache row, so that
  // a dot product needs no knowledge of it: in 16-byte pieces, all under way at once ...
  static constexpr int kRounds = C::kSteps / 3;
  __device__ __forceinline__ void fetch_queries(uint4 (&piece)[C::kTeamGroups][kRounds][3],
                                                const RequestRows& rows) const {
    const int latent_chunk = p.latent_offset / 16;
#pragma unroll
    for (int m = 0; m < C::kTeamGroups; ++m)
#pragma unroll
      for (int i = 0; i < 3; ++i) {                        // 16 rows x 6 pieces
        const int row = team_row() + m * 16 + (lane() + i * 32) / 6;
        const bool present = row < rows.num_queries(p);
        const int safe = present ? row : 0;
        const int64_t token = rows.first_token + safe / p.num_heads, head = safe % p.num_heads;
        const char* latent =
            p.q_latent + token * p.q_latent_token_stride + head * p.q_latent_head_stride;
        const char* rope = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
          const int chunk = warp() * C::kSteps * 2 + round * 6 + (lane() + i * 32) % 6;
          const int in_latent = chunk - latent_chunk;
          const int in_rope = latent_chunk ? chunk : chunk - kLatentDim * 2 / 16;
          const bool is_latent = in_latent >= 0 && in_latent < kLatentDim * 2 / 16;
          piece[m][round][i] = make_uint4(0, 0, 0, 0);     // rows past the request: zeros
          if (present)
            piece[m][round][i] = __ldg(reinterpret_cast<const uint4*>(
                is_latent ? latent + in_latent * 16 : rope + in_rope * 16));
        }
      }
  }
  // ... and through a scratch of this warp's own to fragments.
  __device__ __forceinline__ void queries_to_fragments(
      const uint4 (&piece)[C::kTeamGroups][kRounds][3]) {
    const uint32_t scratch = smem() + C::kMail + threadIdx.x / 32 * C::kScratchBytes;
    const uint32_t get = scratch + lane() % 16 * C::kScratchStride + lane() / 16 * 16;
#pragma unroll
    for (int m = 0; m < C::kTeamGroups; ++m)
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
#pragma unroll
        for (int i = 0; i < 3; ++i)
          smem_store(scratch + (lane() + i * 32) / 6 * C::kScratchStride +
                         (lane() + i * 32) % 6 * 16,
                     piece[m][round][i]);
        __syncwarp();
#pragma unroll
        for (int s = 0; s < 3; ++s) ldmatrix(Q_frag[m][round * 3 + s], get + s * 32);
        __syncwarp();
      }
  }

  // ---- S = Q K^T ------------------------------------------------------------------------

  // The row of the team's whose softmax this lane shares, in the warps that finish rows.
  __device__ __forceinline__ bool finishes() const { return warp() < C::kFinishers; }
  __device__ __forceinline__ int softmax_row() const { return warp() * 8 + lane() / 4; }
  // The token of the tile that score `i` of this lane belongs to: first_token + token_step(i).
  __device__ __forceinline__ int first_token() const { return team_token() + lane() % 4 * 2; }
  static __device__ __forceinline__ constexpr int token_step(int i) {
    return i / 2 * 8 + i % 2;
  }
  // The letters of a warp of the team's, by finisher, without the one to itself.
  __device__ __forceinline__ uint32_t mail(int of_warp) const {
    return smem() + C::kMail + (team() * C::kTeamWarps + of_warp) * C::kMailBytes;
  }
  // Where the probabilities of finisher f lie, which alone reads the letter there before.
  __device__ __forceinline__ uint32_t prob_smem(int f) const {
    return mail(f ^ 1) + (f / 2 * 2) * C::kLetterBytes;
  }

  // The warp's part of the scores goes to those who finish them, 16 tokens at a time; `own` is
  // what it finishes itself. With 64 rows it copies its rows of the next tile meanwhile, if
  // `begin()`, called half way, begins that.
  template <class Begin>
  __device__ __forceinline__ void scores(float (&own)[C::kScores], uint32_t tile, Begin begin) {
    const uint32_t K_smem = KV_smem(tile) + (lane() % 8 + lane() / 16 * 8) * kRowStride +
                            lane() / 8 % 2 * 16 + warp() * C::kSteps * 32;
    constexpr int kAll = C::kTokenGroups * C::kSteps, kHalf = kAll / 2;
    bool copying = false;
    uint32_t f[2][4];          // a step's fragment is loaded during the step before
    ldmatrix(f[0], K_smem);
    // A multiply waits for the one before that adds to the same sums: four sums side by side.
    constexpr int kChains = C::kTeamGroups == 1 ? 2 : 1;
    float S_frag[C::kTeamGroups * kChains][2][4];
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      const int t = i / C::kSteps, k = i % C::kSteps;
      if (k == 0) {
#pragma unroll
        for (int m = 0; m < C::kTeamGroups * kChains; ++m)
#pragma unroll
          for (int e = 0; e < 8; ++e) S_frag[m][e / 4][e % 4] = 0.f;
      }
      if (i + 1 < kAll)
        ldmatrix(f[(i + 1) % 2], K_smem + (i + 1) / C::kSteps * 16 * kRowStride +
                                     (i + 1) % C::kSteps * 32);
      if constexpr (C::kSplitRows) {
        static_assert(kAll - kHalf == 2 * C::kCopies + 1, "a row every other step");
        if (i == kHalf) copying = begin();
        if (copying && i > kHalf && (i - kHalf) % 2) copy_row(tile + 1, (i - kHalf) / 2);
        if (copying && i == kAll - 1) copy_end(tile + 1);
      }
#pragma unroll
      for (int m = 0; m < C::kTeamGroups; ++m) {
        float(&S)[2][4] = S_frag[m + k % kChains];
        Ops::mma(S[0], Q_frag[m][k], f[i % 2][0], f[i % 2][1]);
        Ops::mma(S[1], Q_frag[m][k], f[i % 2][2], f[i % 2][3]);
      }
      if (k + 1 < C::kSteps) continue;
      if constexpr (kChains == 2)
#pragma unroll
        for (int e = 0; e < 8; ++e) S_frag[0][e / 4][e % 4] += S_frag[1][e / 4][e % 4];
      if (t == 0 && tile > 0) barrier_wait(spent(), (tile - 1) & 1);
      // What the warp keeps of the first 16 tokens is parked where its letters of the others
      // will lie, for want of registers.
      static_assert(C::kTokenGroups <= 2, "one place to park");
      const uint32_t parked = mail(warp()) + lane() * 16 + 512;
      if (t == 1) {
        float first[4];
        smem_load(first, parked);
#pragma unroll
        for (int e = 0; e < 4; ++e) own[e] = first[e];
      }
#pragma unroll
      for (int finisher = 0; finisher < C::kFinishers; ++finisher) {
        const float(&S)[2][4] = S_frag[finisher / 2];
        const int e = finisher % 2 * 2;            // rows 0 .. 7 or 8 .. 15 of the fragment
        const uint32_t letter = mail(warp()) + lane() * 16 + t * 512;
        if (finisher == 0 || finisher == warp()) {  // the first time all of it, as a start
          own[4 * t] = S[0][e];
          own[4 * t + 1] = S[0][e + 1];
          own[4 * t + 2] = S[1][e];
          own[4 * t + 3] = S[1][e + 1];
        }
        if (finisher < warp())
          smem_store(letter + finisher * C::kLetterBytes, S[0][e], S[0][e + 1], S[1][e],
                     S[1][e + 1]);
        if (finisher > warp())
          smem_store(letter + (finisher - 1) * C::kLetterBytes, S[0][e], S[0][e + 1], S[1][e],
                     S[1][e + 1]);
      }
      if (t + 1 < C::kTokenGroups) smem_store(parked, own[0], own[1], own[2], own[3]);
    }
  }

  // Adds the other warps' parts.
  __device__ __forceinline__ void read_mail(float (&s)[C::kScores]) const {
#pragma unroll
    for (int i = 1; i < C::kTeamWarps; ++i) {
      const int from = (warp() + i) % C::kTeamWarps;
      const uint32_t letter =
          mail(from) + (warp() - (warp() > from)) * C::kLetterBytes + lane() * 16;
#pragma unroll
      for (int t = 0; t < C::kTokenGroups; ++t) {
        float x[4];
        smem_load(x, letter + t * 512);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * t + e] += x[e];
      }
    }
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
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
    const bool change = tile_max > row_max + kLazyRescale || row_max == -INFINITY;
    const bool any = __any_sync(0xffffffffu, change);
    if (any) {
      float rescale = 1.f;
      if (change) {
        rescale = row_max == -INFINITY ? 0.f : exp2_approx(row_max - tile_max);
        row_max = tile_max;
      }
      row_sum *= rescale;
      if (lane() % 4 == 0) smem_store(rescale_smem(softmax_row()), rescale);
    }
    if (lane() == 0) smem_store(changed_smem() + warp() * 4, uint32_t(any));
    const float base = row_max == -INFINITY ? 0.f : row_max;  // -inf - -inf is NaN
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      s[i] = exp2_approx(s[i] - base);
      row_sum += s[i];
    }
    __syncwarp();  // the mail is read; the probabilities lie in its place
    const uint32_t to = prob_smem(warp()) + lane() / 4 * C::kProbStride * 2 + lane() % 4 * 4;
#pragma unroll
    for (int i = 0; i < C::kScores; i += 2)
      smem_store(to + token_step(i) * 2, Ops::pack(s[i], s[i + 1]));
  }

  // What O is multiplied by before P V is added, for each of the team's rows, ...
  __device__ __forceinline__ uint32_t rescale_smem(int row) const {
    return smem() + C::kRescale + (team() * C::kTeamRows + row) * 4;
  }
  // ... written only by those warps that say here that it is not 1 for all of theirs.
  __device__ __forceinline__ uint32_t changed_smem() const {
    return smem() + C::kChanged + team() * 16;
  }

  // ---- O += P V -------------------------------------------------------------------------

  __device__ __forceinline__ void scale_output(int group, float low, float high) {
#pragma unroll
    for (int j = 0; j < C::kValueTiles; ++j) {
      O_frag[group][j][0] *= low;
      O_frag[group][j][1] *= low;
      O_frag[group][j][2] *= high;
      O_frag[group][j][3] *= high;
    }
  }

  __device__ __forceinline__ void accumulate(uint32_t tile) {
    uint32_t changed[4];
    smem_load(changed, changed_smem());
#pragma unroll
    for (int m = 0; m < C::kTeamGroups; ++m)
      if (changed[2 * m] | changed[2 * m + 1])
        scale_output(m, changed[2 * m] ? smem_load_float(rescale_smem(m * 16 + lane() / 4)) : 1.f,
                     changed[2 * m + 1] ? smem_load_float(rescale_smem(m * 16 + lane() / 4 + 8))
                                        : 1.f);

    const uint32_t P_smem =
        prob_smem(lane() / 8 % 2) + lane() % 8 * C::kProbStride * 2 + lane() / 16 * 16;
    const uint32_t V_smem = KV_smem(tile) + lane() % 16 * kRowStride + p.latent_offset +
                            warp() * C::kValueTiles * 16 + lane() / 16 * 16;
#if __CUDA_ARCH__ < 900        // unrolled, sm_80's compiler loads so far ahead that it spills
#pragma unroll 1
#else
#pragma unroll
#endif
    for (int t = 0; t < C::kTokenGroups; ++t) {
      uint32_t P_frag[C::kTeamGroups][4];
#pragma unroll
      for (int m = 0; m < C::kTeamGroups; ++m)
        ldmatrix(P_frag[m],
                 P_smem + m * (2 * C::kMailBytes + 2 * C::kLetterBytes) + t * 32);
#pragma unroll
      for (int j = 0; j < C::kValueTiles; j += 2) {
        uint32_t f[4];
        ldmatrix_trans(f, V_smem + t * 16 * kRowStride + j * 16);
#pragma unroll
        for (int m = 0; m < C::kTeamGroups; ++m) {
          Ops::mma(O_frag[m][j], P_frag[m], f[0], f[1]);
          Ops::mma(O_frag[m][j + 1], P_frag[m], f[2], f[3]);
        }
      }
    }
  }

  // ---- results --------------------------------------------------------------------------

  // Each team's maximum and sum of a row, where the mail was.
  __device__ __forceinline__ uint32_t stats_smem(int of_team, int row) const {
    return smem() + C::kMail + (of_team * C::kTeamRows + row) * 8;
  }
  // A row's log2-sum-exp, and the factor that makes its share of the output of this team's sums.
  __device__ __forceinline__ float row_lse(int row, float& factor) const {
    float own[2], other[2] = {-INFINITY, 0.f};
    smem_load(own, stats_smem(team(), row));
    if (!C::kSplitRows) smem_load(other, stats_smem(1 - team(), row));
    const float top = fmaxf(own[0], other[0]), base = top == -INFINITY ? 0.f : top;
    const float weight = exp2_approx(own[0] - base);
    const float sum = own[1] * weight + other[1] * exp2_approx(other[0] - base);
    factor = sum > 0.f ? weight * p.value_scale / sum : 0.f;
    return sum > 0.f ? base + log2f(sum) : -INFINITY;
  }

  __device__ __forceinline__ void store() {
    pin(thread);
    const Segment segment = walk<Segment>(offsetof(Walk, segment));
    const RequestRows rows = walk<RequestRows>(offsetof(Walk, rows));
    const int slot = partial_slot(p, segment.owner, blockIdx.x, segment.tile_begin == 0);
    const int num_rows = rows.num_queries(p);
    __syncthreads();  // every warp has read its last probabilities, and is done with the tiles
    if (finishes()) {
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 1);
      row_sum += __shfl_xor_sync(0xffffffffu, row_sum, 2);
      if (lane() % 4 == 0) smem_store(stats_smem(team(), softmax_row()), row_max, row_sum);
    }
    __syncthreads();  // the statistics are there
    if (finishes() && lane() % 4 == 0 && (C::kSplitRows || team() == 0)) {
      float factor;
      const float lse = row_lse(softmax_row(), factor);
      const int row = team_row() + softmax_row();
      if (!segment.whole)
        p.partial_lse[partial_row<C>(slot, row - first_row())] = lse;
      else if (row < num_rows)
        p.lse[static_cast<int64_t>(rows.first_token) * p.num_heads + row] = lse * kLn2;
    }
#pragma unroll
    for (int m = 0; m < C::kTeamGroups; ++m) {
      float low, high;
      row_lse(m * 16 + lane() / 4, low);
      row_lse(m * 16 + lane() / 4 + 8, high);
      scale_output(m, low, high);
    }
    if constexpr (!C::kSplitRows) {  // team 0 adds what team 1 found, in fragment order
      const uint32_t at =
          smem() + C::kKV + warp() * C::kTeamGroups * C::kValueTiles * 512 + lane() * 16;
      if (team() == 1) {
#pragma unroll
        for (int m = 0; m < C::kTeamGroups; ++m)
#pragma unroll
          for (int j = 0; j < C::kValueTiles; ++j)
            smem_store(at + (m * C::kValueTiles + j) * 512, O_frag[m][j][0], O_frag[m][j][1],
                       O_frag[m][j][2], O_frag[m][j][3]);
      }
      __syncthreads();
      if (team() == 1) return;
#pragma unroll
      for (int m = 0; m < C::kTeamGroups; ++m)
#pragma unroll
        for (int j = 0; j < C::kValueTiles; ++j) {
          float x[4];
          smem_load(x, at + (m * C::kValueTiles + j) * 512);
#pragma unroll
          for (int e = 0; e < 4; ++e) O_frag[m][j][e] += x[e];
        }
    }
    const int group = (team_row() - first_row()) / 16;
#pragma unroll
    for (int m = 0; m < C::kTeamGroups; ++m) {
      if (segment.whole)
        store_rows(rows, team_row() + m * 16 + lane() / 4, num_rows, O_frag[m]);
      else
        store_partial(slot, group + m, O_frag[m]);
    }
  }

  __device__ __forceinline__ void store_rows(const RequestRows& rows, int row, int num_rows,
                                             const float (&d)[C::kValueTiles][4]) {
    char* to = p.out + ((static_cast<int64_t>(rows.first_token) * p.num_heads + row) * kLatentDim +
                        warp() * C::kValueTiles * 8 + lane() % 4 * 2) * 2;
#pragma unroll
    for (int j = 0; j < C::kValueTiles; ++j) {
      if (row < num_rows) *reinterpret_cast<uint32_t*>(to + j * 16) = Ops::pack(d[j][0], d[j][1]);
      if (row + 8 < num_rows)
        *reinterpret_cast<uint32_t*>(to + j * 16 + 8 * kLatentDim * 2) =
            Ops::pack(d[j][2], d[j][3]);
    }
  }
  // Fragments of 16 rows x 16 columns, 512 contiguous bytes: the combine reads them so.
  __device__ __forceinline__ void store_partial(int slot, int group,
                                                const float (&d)[C::kValueTiles][4]) {
    uint4* to = static_cast<uint4*>(p.partial_out) +
                partial_fragment<C>(slot, group, warp() * C::kValueTiles / 2) + lane();
#pragma unroll
    for (int j = 0; j < C::kValueTiles; j += 2)
      to[j / 2 * 32] = make_uint4(Ops::pack(d[j][0], d[j][1]), Ops::pack(d[j][2], d[j][3]),
                                  Ops::pack(d[j + 1][0], d[j + 1][1]),
                                  Ops::pack(d[j + 1][2], d[j + 1][3]));
  }

  // ---- one request's tiles --------------------------------------------------------------

  __device__ __forceinline__ void run(const Segment& segment) {
    pin(thread);
    fence_before_bulk();
    __syncthreads();  // the previous segment's last accesses to shared memory are over
    const RequestRows rows(p, segment.request);
    const int to_request = segment.tile_begin - tiles_before;
    const uint32_t end = tiles_before + segment.tile_end - segment.tile_begin;
    const uint32_t plain_end = max(0, rows.prefix_len / C::kTokens - to_request);
    if (threadIdx.x == 0)
      smem_put(smem() + C::kWalk,
               Walk{{tiles_before, end, min(end, plain_end), to_request}, rows, segment});
    // The index of the row that the lane copies next, looked up a tile ahead.
    int index;
    {
      int indices[C::kStages];
#pragma unroll
      for (int i = 0; i < C::kStages; ++i)
        indices[i] = rows.look_up(p, copy_position(tiles_before + i + to_request));
      // Q comes while the indices do.
      uint4 piece[C::kTeamGroups][kRounds][3];
      fetch_queries(piece, rows);
#pragma unroll
      for (int i = 0; i < C::kStages; ++i)
        if (const uint32_t tile = tiles_before + i; tile < end)
          copy(tile, rows.address(p, copy_position(tile + to_request), indices[i]));
      index = rows.look_up(p, copy_position(tiles_before + C::kStages + to_request));
      queries_to_fragments(piece);
    }
    __syncthreads();  // all warps are done with their scratch
#pragma unroll
    for (int m = 0; m < C::kTeamGroups; ++m)
#pragma unroll
      for (int j = 0; j < C::kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) O_frag[m][j][e] = 0.f;
    row_max = -INFINITY;
    row_sum = 0.f;

    // Where the lane's part of its row of a tile lies; and looks up the row of the tile after.
    const auto next_source = [&](uint32_t tile, const Walk::Span& span) {
      const int position = copy_position(tile + span.to_request);
      const char* from;
      const RequestRows rows = walk<RequestRows>(offsetof(Walk, rows));
      if (tile + 1 < span.plain_end) {
        from = RequestRows::prefix_address(p, position, index);
        index = p.kv_indices[rows.first_page + ((position + C::kTokens) >> p.page_shift)];
      } else {
        from = rows.address(p, position, index);
        index = rows.look_up(p, position + C::kTokens);
      }
      return from;
    };
    const char* noted = nullptr;  // the next source, where copies go out at once
    if constexpr (!C::kSplitRows)
      noted = next_source(tiles_before + C::kStages, walk<Walk::Span>(offsetof(Walk, span)));
    while (true) {
      const uint32_t tile = tiles_before++;
      pin(thread);
      barrier_wait(full(tile), parity(tile));
      float s[C::kScores];
      scores(s, tile, [&] {  // the stage of the tile before this one takes the next
        pin(thread);
        const auto span = walk<Walk::Span>(offsetof(Walk, span));
        const bool next = tile > span.begin && tile + 1 < span.end;
        if (next) copy_begin(tile + 1, next_source(tile + 1, span));
        return next;
      });
      team_sync();  // all parts of S are there
      pin(thread);
      if (finishes()) {
        read_mail(s);
        uint32_t visible = 0xffffffffu;
        const auto span = walk<Walk::Span>(offsetof(Walk, span));
        if (tile >= span.plain_end) {
          const RequestRows rows = walk<RequestRows>(offsetof(Walk, rows));
          const int first = (tile + span.to_request) * C::kTokens - rows.prefix_len;
          const int draft = min((team_row() + softmax_row()) / p.num_heads, rows.num_drafts - 1);
          visible = visible_bits(
              p.mask_bits + static_cast<int64_t>(rows.first_token + draft) * p.mask_words,
              p.mask_words, first, rows.num_drafts);
        }
        softmax(s, visible);
      }
      team_sync();  // P and its factors are there
      pin(thread);
      accumulate(tile);
      pin(thread);
      barrier_arrive(spent());
      barrier_arrive(empty(tile));
      const auto last = walk<Walk::Span>(offsetof(Walk, span));
      if (!C::kSplitRows && tile + C::kStages < last.end) {
        copy(tile + C::kStages, noted);
        noted = next_source(tile + C::kStages + 1, last);
      }
      if (tiles_before == last.end) break;
    }
    store();
  }
};

// Grid (row_tiles, groups). Row tiles vary fastest: the blocks of one group read the same
// cache rows at about the same time, so that all but one find them in L2.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tree_verify(const __grid_constant__ VerifyParams p) {
  VerifyBlock<Config> block(p);
  block.init_barriers();
  grid_dependency_wait();
  grid_dependency_release();
  // What can be computed again is, after each segment: while one runs, registers are scarce.
  Segment segment = {};
  while (true) {
    const Schedule<Config::kTokens> schedule(p);
    if (!schedule.next(p, blockIdx.y, segment)) break;
    // A request smaller than the largest has fewer row tiles.
    if (block.first_row() >= RequestRows(p, segment.request).num_queries(p)) continue;
    block.run(segment);
    if (block.template walk<int>(offsetof(Walk, segment.last))) break;
    segment.done = block.template walk<int>(offsetof(Walk, segment.done));
  }
}

}  // namespace mla
