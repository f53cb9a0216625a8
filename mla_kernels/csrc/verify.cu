// The translation unit that load_inline compiles: everything behind one plain function.
#include "launch.cuh"

int launch_tree_verify(const mla::VerifyParams& params, const mla::LaunchShape& shape,
                       void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return shape.half ? mla::launch_element<__half>(params, shape, s)
                    : mla::launch_element<__nv_bfloat16>(params, shape, s);
}

const char* describe_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
