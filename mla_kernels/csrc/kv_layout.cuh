// What the kernels know of a cache row and of where a batch's rows lie: the CUDA side of
// layout.py and batch.py.
#pragma once

#include "params.h"

namespace mla {

constexpr int kLatentDim = 512;                    // kv_lora_rank; also the value
constexpr int kRopeDim = 64;                       // qk_rope_head_dim
constexpr int kRowDim = kLatentDim + kRopeDim;     // 576
constexpr int kRowBytes = kRowDim * 2;             // 1,152: elements are 16 bits wide
constexpr int kRowChunks = kRowBytes / 16;         // 72 copies of 16 bytes
// A row in shared memory is 16 bytes longer than in the cache. 1,168 B is 292 words, which is
// 4 modulo the 32 banks: the 8 rows of an ldmatrix phase, 4 banks each, then cover all banks
// once, and no swizzle is needed.
constexpr int kRowStride = kRowBytes + 16;
static_assert(kRowStride / 4 % 32 == 4, "rows must be 4 banks apart");

// One request's rows, by position: the prefix first, then the drafts.
struct RequestRows {
  int first_token;             // its first row of q and out
  int num_drafts;
  int prefix_len;
  int first_page;              // in kv_indices

  RequestRows() = default;
  __device__ __forceinline__ RequestRows(const VerifyParams& p, int request)
      : first_token(p.qo_indptr[request]),
        num_drafts(p.qo_indptr[request + 1] - first_token),
        prefix_len(p.kv_lens[request]),
        first_page(p.kv_indptr[request]) {}

  __device__ __forceinline__ int num_queries(const VerifyParams& p) const {
    return num_drafts * p.num_heads;
  }

  // A row is found in two steps, so that a kernel can look up a row well before it copies it
  // and not wait for the answer: `look_up` loads an index, `address` is the first to use it.
  // Positions past the end give the last row: they are masked, but what is multiplied by
  // their zero weight must be a number, and only referenced rows are sure to hold one.
  __device__ __forceinline__ int clamp(int position) const {
    return min(position, prefix_len + num_drafts - 1);
  }
  __device__ __forceinline__ int look_up(const VerifyParams& p, int position) const {
    position = clamp(position);
    const int* from = p.kv_indices + first_page + (position >> p.page_shift);
    if (position >= prefix_len) {
      if (!p.draft_slots) return 0;
      from = p.draft_slots + first_token + position - prefix_len;
    }
    return *from;
  }
  // 64-bit offsets: 2^31 elements are passed at slot 3,728,271.
  static __device__ __forceinline__ const char* prefix_address(const VerifyParams& p,
                                                               int position, int looked_up) {
    const int64_t slot = (static_cast<int64_t>(looked_up) << p.page_shift) +
                         (position & ((1 << p.page_shift) - 1));
    return p.kv_pool + slot * p.kv_row_stride;
  }
  __device__ __forceinline__ const char* address(const VerifyParams& p, int position,
                                                 int looked_up) const {
    position = clamp(position);
    if (position < prefix_len) return prefix_address(p, position, looked_up);
    return p.draft_slots ? p.kv_pool + looked_up * p.kv_row_stride
                         : p.draft_kv + (first_token + position - prefix_len) * p.draft_row_stride;
  }
};

// Which of 32 consecutive positions a draft token sees, as bits. `first` is the first
// position's number among the drafts: negative in the prefix, which every token sees.
__device__ __forceinline__ uint32_t visible_bits(const uint32_t* mask, int mask_words, int first,
                                                 int num_drafts) {
  if (first <= -32) return 0xffffffffu;
  uint32_t bits;
  if (first < 0) {
    bits = (mask[0] << -first) | ((1u << -first) - 1);
  } else {
    const int word = first >> 5;
    const uint32_t low = word < mask_words ? mask[word] : 0;
    const uint32_t high = word + 1 < mask_words ? mask[word + 1] : 0;
    bits = __funnelshift_r(low, high, first & 31);
  }
  const int left = num_drafts - first;  // positions before the end
  return left >= 32 ? bits : left <= 0 ? 0 : bits & ((1u << left) - 1);
}

}  // namespace mla
