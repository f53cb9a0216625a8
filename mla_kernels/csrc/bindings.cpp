// Python's way in. Pointers come as integers: without torch's headers this file and the
// kernels compile in seconds instead of minutes. cuda.py is the only caller and has checked
// everything.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "params.h"

namespace py = pybind11;

int launch_tree_verify(const mla::VerifyParams&, const mla::LaunchShape&, void* stream);
const char* describe_cuda_error(int code);

namespace {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // Local to the module: builds for several architectures may be loaded side by side.
  py::class_<mla::VerifyParams>(m, "VerifyParams", py::module_local())
      .def(py::init([] { return mla::VerifyParams{}; }))
#define POINTER(name)                                                                  \
  .def_property(                                                                       \
      #name, [](const mla::VerifyParams& p) { return (std::uintptr_t)p.name; },        \
      [](mla::VerifyParams& p, std::uintptr_t a) {                                     \
        p.name = pointer<std::remove_pointer_t<decltype(p.name)>>(a);                  \
      })
#define VALUE(name) .def_readwrite(#name, &mla::VerifyParams::name)
          POINTER(q_latent) POINTER(q_rope) POINTER(kv_pool) POINTER(draft_kv)
          POINTER(qo_indptr) POINTER(kv_indptr) POINTER(kv_indices) POINTER(kv_lens)
          POINTER(draft_slots) POINTER(mask_bits) POINTER(out) POINTER(lse)
          POINTER(partial_out) POINTER(partial_lse)
          VALUE(q_latent_token_stride) VALUE(q_latent_head_stride)
          VALUE(q_rope_token_stride) VALUE(q_rope_head_stride)
          VALUE(kv_row_stride) VALUE(draft_row_stride)
          VALUE(num_heads) VALUE(batch_size) VALUE(page_shift) VALUE(mask_words)
          VALUE(latent_offset) VALUE(groups) VALUE(row_tiles) VALUE(batch_invariant)
          VALUE(logit_scale) VALUE(logit_cap) VALUE(value_scale);
#undef POINTER
#undef VALUE
  m.def(
      "tree_verify",
      [](const mla::VerifyParams& params, int rows, bool half, bool dependent,
         int combine_split, std::uintptr_t stream) {
        const mla::LaunchShape shape{rows, half, dependent, combine_split};
        if (const int code = launch_tree_verify(params, shape, pointer<void>(stream)))
          throw std::runtime_error(std::string("tree_verify launch failed: ") +
                                   describe_cuda_error(code));
      },
      py::arg("params"), py::kw_only(), py::arg("rows"), py::arg("half"),
      py::arg("dependent"), py::arg("combine_split"), py::arg("stream"));
}
