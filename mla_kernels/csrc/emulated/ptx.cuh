// The twin of ptx.cuh for the CPU: the same functions, each with the place of its call as a last
// argument, so that a report can name it.
#pragma once

#include "cuda_runtime.h"

namespace mla {

using emulated::Site;

inline uint32_t smem_address(const void* pointer, Site site = Site::here()) {
  return emulated::shared_address(pointer, site);
}

// ---- 16-bit element types ---------------------------------------------------------------

template <class Element>
struct ElementOps;

template <>
struct ElementOps<__nv_bfloat16> {
  static uint32_t pack(float low, float high) {
    return emulated::float_to_bfloat16(low) |
           static_cast<uint32_t>(emulated::float_to_bfloat16(high)) << 16;
  }
  static float2 unpack(uint32_t word) {
    return {emulated::bfloat16_to_float(word & 0xffff), emulated::bfloat16_to_float(word >> 16)};
  }
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  Site site = Site::here()) {
    emulated::mma(d, a, b0, b1, false, site);
  }
};

template <>
struct ElementOps<__half> {
  static uint32_t pack(float low, float high) {
    return emulated::float_to_half(low) |
           static_cast<uint32_t>(emulated::float_to_half(high)) << 16;
  }
  static float2 unpack(uint32_t word) {
    return {emulated::half_to_float(word & 0xffff), emulated::half_to_float(word >> 16)};
  }
  static void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  Site site = Site::here()) {
    emulated::mma(d, a, b0, b1, true, site);
  }
};

// ---- shared memory ----------------------------------------------------------------------

inline void ldmatrix(uint32_t (&r)[4], uint32_t address, Site site = Site::here()) {
  emulated::ldmatrix(r, address, false, site);
}
inline void ldmatrix_trans(uint32_t (&r)[4], uint32_t address, Site site = Site::here()) {
  emulated::ldmatrix(r, address, true, site);
}

inline void smem_store(uint32_t address, uint32_t x, Site site = Site::here()) {
  emulated::shared_store(address, &x, 4, site);
}
inline void smem_store(uint32_t address, float x, Site site = Site::here()) {
  emulated::shared_store(address, &x, 4, site);
}
inline void smem_store(uint32_t address, uint4 x, Site site = Site::here()) {
  emulated::shared_store(address, &x, 16, site);
}
inline void smem_store(uint32_t address, float x, float y, Site site = Site::here()) {
  const float pair[2] = {x, y};
  emulated::shared_store(address, pair, 8, site);
}
inline void smem_store(uint32_t address, float x, float y, float z, float w,
                       Site site = Site::here()) {
  const float four[4] = {x, y, z, w};
  emulated::shared_store(address, four, 16, site);
}
inline void smem_load(float (&x)[2], uint32_t address, Site site = Site::here()) {
  emulated::shared_load(x, address, 8, site);
}
inline void smem_load(float (&x)[4], uint32_t address, Site site = Site::here()) {
  emulated::shared_load(x, address, 16, site);
}
inline void smem_load(uint32_t (&x)[4], uint32_t address, Site site = Site::here()) {
  emulated::shared_load(x, address, 16, site);
}
inline float smem_load_float(uint32_t address, Site site = Site::here()) {
  float x;
  emulated::shared_load(&x, address, 4, site);
  return x;
}
inline uint32_t smem_load_word(uint32_t address, Site site = Site::here()) {
  uint32_t x;
  emulated::shared_load(&x, address, 4, site);
  return x;
}

inline void smem_store(uint32_t address, const void* x, Site site = Site::here()) {
  emulated::shared_store(address, &x, 8, site);
}
inline const char* smem_load_pointer(uint32_t address, Site site = Site::here()) {
  const char* x;
  emulated::shared_load(&x, address, 8, site);
  return x;
}

template <class T>
void smem_put(uint32_t address, const T& x, Site site = Site::here()) {
  uint32_t word[sizeof(T) / 4];
  memcpy(word, &x, sizeof(T));
  for (size_t i = 0; i < sizeof(T) / 4; ++i) smem_store(address + i * 4, word[i], site);
}
template <class T>
T smem_get(uint32_t address, Site site = Site::here()) {
  uint32_t word[sizeof(T) / 4];
  if constexpr (sizeof(T) == 16) {
    smem_load(word, address, site);
  } else {
    for (size_t i = 0; i < sizeof(T) / 4; ++i) word[i] = smem_load_word(address + i * 4, site);
  }
  T x;
  memcpy(&x, word, sizeof(T));
  return x;
}

// ---- global memory ----------------------------------------------------------------------

inline void prefetch(const void*) {}

inline void copy_async_16B(uint32_t smem, const void* global, Site site = Site::here()) {
  emulated::copy_async(smem, global, 16, site);
}
inline void copy_async_arrive(uint32_t barrier, Site site = Site::here()) {
  emulated::copy_async_arrive(barrier, site);
}

inline void copy_bulk(uint32_t smem, const void* global, int bytes, uint32_t barrier,
                      Site site = Site::here()) {
  emulated::copy_bulk(smem, global, bytes, barrier, site);
}
inline void barrier_expect(uint32_t barrier, int bytes, Site site = Site::here()) {
  emulated::mbarrier_expect(barrier, bytes, site);
}
// All lanes must be here; the first is the one.
inline bool elect_one(Site site = Site::here()) {
  emulated::collective("elect.sync", 0xffffffffu, nullptr,
                       [](void* const*, uint32_t, Site) {}, site);
  return emulated::self->lane == 0;
}
inline void fence_before_bulk() {}

// ---- barriers ---------------------------------------------------------------------------

inline void barrier_init(uint32_t barrier, int count, Site site = Site::here()) {
  emulated::mbarrier_init(barrier, count, site);
}
inline void barrier_arrive(uint32_t barrier, Site site = Site::here()) {
  emulated::mbarrier_arrive(barrier, site);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity, Site site = Site::here()) {
  emulated::mbarrier_wait(barrier, parity, site);
}
inline void named_barrier_sync(int name, int threads, Site site = Site::here()) {
  emulated::named_barrier(name, threads, site);
}

// Grids run one after another.
inline void grid_dependency_wait() {}
inline void grid_dependency_release() {}

// ---- registers and arithmetic -----------------------------------------------------------

inline void pin(int&) {}
inline void pin(uint32_t&) {}
inline void pin(const char*&) {}
inline int lane_id() { return emulated::self->lane; }
inline float exp2_approx(float x) { return exp2f(x); }

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace mla
