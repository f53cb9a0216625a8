// What crosses from Python to the kernels: plain structs that a host compiler reads too.
#pragma once

#include <stdint.h>

namespace mla {

// Everything a launch needs, passed by value. Strides are in bytes. cuda.py fills it
// in and has checked all of it.
struct VerifyParams {
  const char* q_latent;        // [num_tokens, num_heads, 512]
  const char* q_rope;          // [num_tokens, num_heads, 64]
  const char* kv_pool;         // [slots, 576]
  const char* draft_kv;        // [num_tokens, 576], or null: the drafts lie in the pool
  const int* qo_indptr;        // [bs + 1]
  const int* kv_indptr;        // [bs + 1], in pages, prefix only
  const int* kv_indices;       // [pages]
  const int* kv_lens;          // [bs], in tokens, prefix only
  const int* draft_slots;      // [num_tokens], or null
  const uint32_t* mask_bits;   // [num_tokens, mask_words]
  char* out;                   // [num_tokens, num_heads, 512]
  float* lse;                  // [num_tokens, num_heads], natural log
  void* partial_out;           // [groups, row_tiles, 2, kRows * 512 elements], fragment order
  float* partial_lse;          // [groups, row_tiles, 2, kRows], log2
  int64_t q_latent_token_stride, q_latent_head_stride;
  int64_t q_rope_token_stride, q_rope_head_stride;
  int64_t kv_row_stride, draft_row_stride;
  int num_heads;
  int batch_size;
  int page_shift;              // log2 of page_size
  int mask_words;
  int latent_offset;           // in bytes: 0 (latent first) or 128 (rope first)
  int groups;                  // work groups that the batch's tiles are shared out to
  int row_tiles;               // row tiles of the largest request
  int batch_invariant;         // requests are cut by their own length alone (schedule.cuh)
  float logit_scale;           // sm_scale * k_scale
  float logit_cap;             // 0: none
  float value_scale;           // v_scale
};

// What the host decides about a launch.
struct LaunchShape {
  int rows;            // kRows: 16, 32 or 64
  bool half;           // fp16 elements instead of bf16
  bool dependent;      // launch the combine as a programmatic dependent (sm_90 and later)
  int combine_split;   // warps a fragment in the combine: 1, 4 or 8
};

}  // namespace mla
