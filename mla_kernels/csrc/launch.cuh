// The host side: instantiations, and launches that a CUDA graph may capture. No allocation, no
// synchronisation, no look at device data; the launch shape comes from capacities alone.
#pragma once

#include <cuda_runtime.h>

#include "combine.cuh"
#include "tree_verify.cuh"

namespace mla {

// Unnamed, so that builds loaded side by side have a `done` each: the statics of templates are
// otherwise one for the whole process.
namespace {

template <class Config>
cudaError_t allow_shared_memory() {
  // Once for each kernel (each Config has its own `done`) and device.
  static unsigned long long done = 0;
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (device < 64 && done >> device & 1) return cudaSuccess;
  if (cudaError_t e = cudaFuncSetAttribute(
          tree_verify<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes))
    return e;
  if (device < 64) done |= 1ull << device;
  return cudaSuccess;
}

}  // namespace

template <class Config, int kSplit>
cudaError_t launch_combine(const VerifyParams& p, const LaunchShape& shape, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.row_tiles * Combine<Config, kSplit>::kUnitsPerTile, p.batch_size);
  config.blockDim = dim3(256);
  config.dynamicSmemBytes = Combine<Config, kSplit>::kSmemBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, combine<Config, kSplit>, p);
}

template <class Config>
cudaError_t launch_config(const VerifyParams& p, const LaunchShape& shape, cudaStream_t stream) {
  if (cudaError_t e = allow_shared_memory<Config>()) return e;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.row_tiles, p.groups);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSmemBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.dependent ? 1 : 0;
  if (cudaError_t e = cudaLaunchKernelEx(&config, tree_verify<Config>, p)) return e;
  if (p.groups == 1 && !p.batch_invariant) return cudaSuccess;  // nothing to merge
  switch (shape.combine_split) {
    case 8: return launch_combine<Config, 8>(p, shape, stream);
    case 4: return launch_combine<Config, 4>(p, shape, stream);
    case 1: return launch_combine<Config, 1>(p, shape, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Element>
cudaError_t launch_element(const VerifyParams& p, const LaunchShape& shape, cudaStream_t stream) {
  switch (shape.rows) {
    case 16: return launch_config<VerifyConfig<Element, 16>>(p, shape, stream);
    case 32: return launch_config<VerifyConfig<Element, 32>>(p, shape, stream);
    case 64: return launch_config<VerifyConfig<Element, 64>>(p, shape, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mla
