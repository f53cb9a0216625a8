// Counts what a GPU's memory pipes would do for a grid, by place in the source.
//
// A warp's instruction is one event. Where lanes meet (ldmatrix, mma) that is plain; elsewhere
// the n-th time that a lane comes to a place is taken for the same instruction as the n-th time
// of its warp's other lanes. Shared memory delivers 32 banks of 4 bytes a wavefront. An access of
// 16 bytes a lane goes by quarters of a warp, of 8 bytes by halves; lanes that want the same word
// share it. Global memory comes in sectors of 32 bytes.
#pragma once

#include <stdint.h>

#include <string>

#include "runtime.h"

namespace emulated {

enum Kind { kLdmatrix, kMma, kSharedLoad, kSharedStore, kGlobalLoad, kBulkCopy, kAsyncCopy, kKinds };

extern bool counting;

// A lane's access of `bytes` at `address`, in shared or global memory.
void count_lane(Kind kind, Site site, uint64_t address, int bytes);
// One instruction of a warp: ldmatrix with 32 row addresses, or mma with none.
void count_warp(Kind kind, Site site, const uint32_t* addresses);
// A bulk copy, by one lane. The engine fills 128 bytes of shared memory at a time: a sector whose
// bytes go to two such pieces is asked for twice.
void count_bulk(Site site, uint32_t shared, uint64_t global, int bytes);
// Bytes that copies bring from a named buffer.
void count_copied(const char* buffer, int bytes);

void begin_counts();
void end_block();              // what lanes did alone is counted here
std::string counts();          // lines of: kind, place, instructions, wavefronts, least, sectors,
                               // needed, bytes; and of copied bytes: "copied", buffer, bytes
}  // namespace emulated
