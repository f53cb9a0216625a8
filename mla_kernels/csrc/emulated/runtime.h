// What the kernels see of the CPU that runs them: a site for every operation, and the
// operations that have to know of other threads or of shared memory. runtime.cpp explains.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace emulated {

// A place in the source. As a default argument, `Site::here()` is the place of the call.
struct Site {
  const char* file;            // null: `line` is an offset into the program, found by its access
  uintptr_t line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, static_cast<uintptr_t>(line)};
  }
};

// ---- who runs ---------------------------------------------------------------------------

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Identity {
  Index thread_index, block_index;
  int lane = 0;
};
extern Identity* self;         // the running thread, null on the host
extern Index block_dim, grid_dim;

// ---- warps: all lanes of `mask` meet, and the last to come computes for all -------------

// `operands[lane]` is what each lane passed; lanes that are not in `mask` have null.
using Compute = void (*)(void* const* operands, uint32_t mask, Site site);
void collective(const char* name, uint32_t mask, void* operands, Compute compute, Site site);

void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed, Site site);
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half, Site site);

// ---- shared memory ----------------------------------------------------------------------

void* dynamic_shared();
uint32_t shared_address(const void* pointer, Site site);
void shared_load(void* to, uint32_t address, int bytes, Site site);
void shared_store(uint32_t address, const void* from, int bytes, Site site);

// ---- global memory ----------------------------------------------------------------------

void global_load(void* to, const void* from, int bytes, Site site);

// A copy to shared memory is in flight from its issue until someone waits for the phase of a
// barrier that covers it.
void copy_async(uint32_t shared, const void* global, int bytes, Site site);
void copy_async_arrive(uint32_t barrier, Site site);
// The same by the copy engine, which tells a barrier of the bytes that it brings.
void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier, Site site);

// ---- barriers ---------------------------------------------------------------------------

void mbarrier_init(uint32_t barrier, int count, Site site);
void mbarrier_arrive(uint32_t barrier, Site site);
void mbarrier_expect(uint32_t barrier, int bytes, Site site);   // arrives as well
void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site);
void named_barrier(int name, int threads, Site site);
void block_barrier(Site site);

// ---- launches ---------------------------------------------------------------------------

struct Launch {
  Index grid, block;
  size_t shared_bytes;
  const void* kernel;
  void (*call)(void* closure);
  void* closure;
  size_t closure_bytes;
};
// Runs a grid to its end. False when something was found wrong; `report` says what.
bool launch(const Launch& launch);
const char* report();

// ---- elements ---------------------------------------------------------------------------

float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);
inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  __builtin_memcpy(&x, &word, 4);
  return x;
}
uint16_t float_to_bfloat16(float x);

}  // namespace emulated
