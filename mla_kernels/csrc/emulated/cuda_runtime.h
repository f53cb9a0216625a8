// Stands in for CUDA's headers where the kernels are compiled for the CPU: the built-ins that
// they use, and launches.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>
#include <type_traits>

#include "runtime.h"

#define __device__
#define __host__
#define __global__
#define __constant__ const
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (::emulated::self->thread_index)
#define blockIdx (::emulated::self->block_index)
static const emulated::Index &blockDim = emulated::block_dim, &gridDim = emulated::grid_dim;

// ---- vectors ----------------------------------------------------------------------------

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };

// ---- arithmetic -------------------------------------------------------------------------

#define MLA_MIN_MAX(type, a, b)                              \
  inline type min(a x, b y) { return type(x) < type(y) ? type(x) : type(y); } \
  inline type max(a x, b y) { return type(x) > type(y) ? type(x) : type(y); }
MLA_MIN_MAX(int, int, int)
MLA_MIN_MAX(unsigned, unsigned, unsigned)
MLA_MIN_MAX(unsigned, unsigned, int)
MLA_MIN_MAX(unsigned, int, unsigned)
MLA_MIN_MAX(long, long, long)
MLA_MIN_MAX(float, float, float)
#undef MLA_MIN_MAX

inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  shift &= 31;
  return shift ? low >> shift | high << (32 - shift) : low;
}

// ---- global memory ----------------------------------------------------------------------

template <class T>
T __ldg(const T* from, emulated::Site site = emulated::Site::here()) {
  T x;
  emulated::global_load(&x, from, sizeof(T), site);
  return x;
}
template <class T>
T __ldcg(const T* from, emulated::Site site = emulated::Site::here()) {
  return __ldg(from, site);
}

// ---- warps and blocks -------------------------------------------------------------------

inline void __syncthreads(emulated::Site site = emulated::Site::here()) {
  emulated::block_barrier(site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       emulated::Site site = emulated::Site::here()) {
  emulated::collective("__syncwarp", mask, nullptr, [](void* const*, uint32_t, emulated::Site) {},
                       site);
}

namespace emulated {

template <class T>
struct Shuffled {
  T value, result;
  int source;
};
// The value of lane `source`; the own one where that is no lane of the mask.
template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, Site site) {
  Shuffled<T> own{value, value, source};
  collective(name, mask, &own, [](void* const* operands, uint32_t lanes, Site) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      auto* to = static_cast<Shuffled<T>*>(operands[lane]);
      if (to->source >= 0 && to->source < 32 && lanes >> to->source & 1)
        to->result = static_cast<Shuffled<T>*>(operands[to->source])->value;
    }
  }, site);
  return own.result;
}

struct Vote {
  unsigned value, result;
};
// Each lane gets `combine` over all lanes' values, from `start`.
template <unsigned (*combine)(unsigned, unsigned, int)>
unsigned reduce(const char* name, unsigned mask, unsigned value, Site site) {
  Vote own{value, 0};
  collective(name, mask, &own, [](void* const* operands, uint32_t lanes, Site) {
    unsigned total = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1)
        total = combine(total, static_cast<Vote*>(operands[lane])->value, lane);
    for (int lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) static_cast<Vote*>(operands[lane])->result = total;
  }, site);
  return own.result;
}
inline unsigned add(unsigned a, unsigned b, int) { return a + b; }
inline unsigned bit(unsigned a, unsigned b, int lane) { return a | (b ? 1u << lane : 0); }

}  // namespace emulated

template <class T>
T __shfl_sync(unsigned mask, T value, int source,
              emulated::Site site = emulated::Site::here()) {
  return emulated::shuffle("__shfl_sync", mask, value, source & 31, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits,
                  emulated::Site site = emulated::Site::here()) {
  return emulated::shuffle("__shfl_xor_sync", mask, value, emulated::self->lane ^ bits, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, emulated::Site site = emulated::Site::here()) {
  return emulated::shuffle("__shfl_up_sync", mask, value, emulated::self->lane - by, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, emulated::Site site = emulated::Site::here()) {
  return emulated::shuffle("__shfl_down_sync", mask, value, emulated::self->lane + by, site);
}
inline unsigned __ballot_sync(unsigned mask, bool x,
                              emulated::Site site = emulated::Site::here()) {
  return emulated::reduce<emulated::bit>("__ballot_sync", mask, x, site);
}
inline bool __any_sync(unsigned mask, bool x, emulated::Site site = emulated::Site::here()) {
  return emulated::reduce<emulated::bit>("__any_sync", mask, x, site) != 0;
}
inline bool __all_sync(unsigned mask, bool x, emulated::Site site = emulated::Site::here()) {
  return emulated::reduce<emulated::bit>("__all_sync", mask, x, site) == mask;
}
inline int __reduce_add_sync(unsigned mask, int x, emulated::Site site = emulated::Site::here()) {
  return emulated::reduce<emulated::add>("__reduce_add_sync", mask, x, site);
}

// ---- launches ---------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

struct dim3 : emulated::Index {
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : emulated::Index{x_, y_, z_} {}
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  struct Closure {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } closure{kernel, {arguments...}};
  emulated::Launch launch{config->gridDim, config->blockDim, config->dynamicSmemBytes,
                          reinterpret_cast<const void*>(kernel), [](void* c) {
                            std::apply(static_cast<Closure*>(c)->kernel,
                                       static_cast<Closure*>(c)->parameters);
                          },
                          &closure, sizeof closure};
  return emulated::launch(launch) ? cudaSuccess : cudaErrorLaunchFailure;
}

inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulated::report() : "invalid value";
}
