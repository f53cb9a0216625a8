// Runs a grid on the CPU, one fiber a thread. A fiber gives way only where its thread may have
// to wait: where a warp meets, and at barriers. Then the next that can run does; when none can,
// the grid is done or stuck.
//
// Shared memory has a state for each byte: never written, written, or the target of a copy that
// is in flight. Such a copy lands when someone waits for the phase of a barrier that covers it,
// and not before, which a GPU may do as well: until then its target holds NaN.
#include "runtime.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "counts.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

Identity* self = nullptr;
Index block_dim, grid_dim;

namespace {

// ---- fibers -----------------------------------------------------------------------------

constexpr size_t kStackBytes = 256 << 10;

struct Fiber {
  void* pointer = nullptr;     // of its stack, while it does not run
  char* stack = nullptr;       // null for the host's own
  size_t bytes = 0;
  void* shadow = nullptr;      // AddressSanitizer's
  ucontext_t context;
};

#if defined(__x86_64__)
extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.text
.local emulated_switch
.type emulated_switch, @function
emulated_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
void prepare(Fiber& fiber, void (*entry)()) {
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.bytes) - 1;
  *top-- = nullptr;            // keeps the alignment that a call would leave
  *top = reinterpret_cast<void*>(entry);
  fiber.pointer = top - 6;
}
void change(Fiber& from, Fiber& to) { emulated_switch(&from.pointer, to.pointer); }
#else
void prepare(Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}
void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

// ---- a grid -----------------------------------------------------------------------------

struct Block;

struct Copy {
  uint32_t to;
  const char* from;
  int bytes;
  Site site;
};

struct Thread : Identity {
  int number = 0, warp = 0;    // in the block
  Block* block = nullptr;
  Fiber fiber;
  bool done = false;
  const char* waits_for = nullptr;   // null while it can run
  Site waits_at{};
  std::vector<Copy> copies;    // issued, and covered by no barrier yet
};

struct Meeting {               // of a warp's lanes
  uint32_t mask = 0, here = 0;
  const char* name = nullptr;
  Site site{};
  void* operands[32];
};
struct NamedBarrier {
  int expected = 0;
  std::vector<Thread*> here;
};
struct MBarrier {
  int count = 0, pending = 0;
  int bytes = 0;               // announced, and not brought yet
  uint32_t phase = 0;          // the one that is not complete
  std::vector<std::pair<uint32_t, Copy>> copies;   // by the phase that covers them
  std::vector<Thread*> waiting;
};

enum State : uint8_t { kUnwritten, kWritten, kInFlight, kBarrierBytes };
constexpr uint32_t kBase = 1024;     // shared addresses begin here: 0 is none

struct Block {
  std::unique_ptr<char[]> memory;
  char* shared = nullptr;
  uint32_t bytes = 0;
  std::vector<uint8_t> state;
  std::map<uint32_t, Site> in_flight;          // by 16-byte piece: where it was issued
  std::vector<Thread> threads;
  std::vector<Meeting> meetings;               // one a warp
  NamedBarrier named[16];
  std::map<uint32_t, MBarrier> barriers;
};

struct Buffer {
  std::string name;
  const char* begin;
  size_t bytes;
};

std::vector<Buffer> buffers;
Block block;                   // blocks run one after another
std::deque<Thread*> ready;
Launch current;
Fiber host;
bool failed = false;
std::string message;

Thread& me() { return *static_cast<Thread*>(self); }

std::string text(const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}
std::string name_of(Site site) {
  const char* slash = strrchr(site.file, '/');
  return text("%s:%zu", slash ? slash + 1 : site.file, static_cast<size_t>(site.line));
}
std::string name_of(const Thread& t) {
  return text("thread %d (warp %d, lane %d) of block (%u, %u)", t.number, t.warp, t.lane,
              t.block_index.x, t.block_index.y);
}

void run(Fiber& from, Fiber& to, Identity* next) {
  self = next;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.shadow, to.stack, to.bytes);
  change(from, to);
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(from.shadow, &bottom, &bytes);
#else
  change(from, to);
#endif
}

void give_way() {
  Fiber& own = me().fiber;
  if (failed || ready.empty()) {
    run(own, host, nullptr);
    return;
  }
  Thread* next = ready.front();
  ready.pop_front();
  if (next == self) return;
  run(own, next->fiber, next);
}
void wait(const char* what, Site site) {
  me().waits_for = what;
  me().waits_at = site;
  give_way();
}
void wake(Thread* t) {
  t->waits_for = nullptr;
  ready.push_back(t);
}

[[noreturn]] void fault(Site site, const std::string& what) {
  message = name_of(site) + ": " + name_of(me()) + " " + what;
  failed = true;
  while (true) run(me().fiber, host, nullptr);
}

void body() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!host.stack) {
    host.stack = static_cast<char*>(const_cast<void*>(bottom));
    host.bytes = bytes;
  }
#endif
  current.call(current.closure);
  me().done = true;
  while (true) give_way();
}

// ---- shared memory ----------------------------------------------------------------------

char* shared_at(uint32_t address, int bytes, Site site, const char* what) {
  Block& b = *me().block;
  if (address % bytes)
    fault(site, text("%s %d bytes at shared address %u, which is no multiple of %d", what, bytes,
                     address - kBase, bytes));
  if (address < kBase || address - kBase + bytes > b.bytes)
    fault(site, text("%s %d bytes at shared address %d, outside the block's %u bytes", what,
                     bytes, static_cast<int>(address - kBase), b.bytes));
  return b.shared + (address - kBase);
}
const char* readable(uint32_t address, int bytes, Site site, const char* what) {
  const char* at = shared_at(address, bytes, site, what);
  Block& b = *me().block;
  const uint8_t* state = &b.state[address - kBase];
  for (int i = 0; i < bytes; ++i) {
    if (state[i] == kWritten) continue;
    const uint32_t byte = address - kBase + i;
    if (state[i] == kInFlight)
      fault(site, text("%s shared byte %u, the target of a copy in flight: it was issued at %s, "
                       "and no wait covers it", what, byte,
                       name_of(b.in_flight[byte / 16]).c_str()));
    if (state[i] == kBarrierBytes) fault(site, text("%s shared byte %u of a barrier", what, byte));
    fault(site, text("%s shared byte %u, which nobody wrote", what, byte));
  }
  return at;
}
char* writable(uint32_t address, int bytes, Site site, const char* what) {
  char* at = shared_at(address, bytes, site, what);
  Block& b = *me().block;
  uint8_t* state = &b.state[address - kBase];
  for (int i = 0; i < bytes; ++i) {
    if (state[i] == kInFlight)
      fault(site, text("%s shared byte %u, the target of a copy in flight: it was issued at %s, "
                       "and no wait covers it", what, address - kBase + i,
                       name_of(b.in_flight[(address - kBase + i) / 16]).c_str()));
    if (state[i] == kBarrierBytes)
      fault(site, text("%s shared byte %u of a barrier", what, address - kBase + i));
  }
  return at;
}

const char* global_at(const void* pointer, int bytes, Site site, const char* what) {
  const char* at = static_cast<const char*>(pointer);
  if (reinterpret_cast<uintptr_t>(at) % bytes)
    fault(site, text("%s %d bytes at a global address that is no multiple of %d", what, bytes,
                     bytes));
  const Buffer* nearest = nullptr;
  for (const Buffer& b : buffers) {
    if (at >= b.begin && at + bytes <= b.begin + b.bytes) return at;
    if (at >= b.begin && (!nearest || b.begin > nearest->begin)) nearest = &b;
  }
  if (nearest)
    fault(site, text("%s %d bytes at %s + %zu; it has %zu", what, bytes, nearest->name.c_str(),
                     static_cast<size_t>(at - nearest->begin), nearest->bytes));
  fault(site, text("%s %d bytes at a global address before every buffer", what, bytes));
}

const char* buffer_of(const char* at) {
  for (const Buffer& b : buffers)
    if (at >= b.begin && at < b.begin + b.bytes) return b.name.c_str();
  return "nothing known";
}

// ---- barriers ---------------------------------------------------------------------------

void meet(NamedBarrier& barrier, int expected, const char* name, Site site) {
  if (barrier.here.empty()) barrier.expected = expected;
  if (barrier.expected != expected)
    fault(site, text("comes to %s with %d threads, where others wait with %d", name, expected,
                     barrier.expected));
  if (static_cast<int>(barrier.here.size()) + 1 < expected) {
    barrier.here.push_back(&me());
    wait(name, site);
    return;
  }
  for (Thread* t : barrier.here) wake(t);
  barrier.here.clear();
}

MBarrier& mbarrier(uint32_t address, Site site) {
  shared_at(address, 8, site, "uses a barrier of");
  const auto found = me().block->barriers.find(address);
  if (found == me().block->barriers.end())
    fault(site, text("uses a barrier at shared address %u that was not initialised",
                     address - kBase));
  return found->second;
}
void land(Block& b, MBarrier& barrier) {
  for (auto& [phase, copy] : barrier.copies) {
    if (phase >= barrier.phase) continue;
    memcpy(b.shared + copy.to - kBase, copy.from, copy.bytes);
    memset(&b.state[copy.to - kBase], kWritten, copy.bytes);
  }
  barrier.copies.erase(
      std::remove_if(barrier.copies.begin(), barrier.copies.end(),
                     [&](const auto& entry) { return entry.first < barrier.phase; }),
      barrier.copies.end());
}
void complete_if_done(MBarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.count;
  ++barrier.phase;
  for (Thread* t : barrier.waiting) wake(t);
  barrier.waiting.clear();
}
void arrive(MBarrier& barrier) {
  --barrier.pending;
  complete_if_done(barrier);
}

// ---- running ----------------------------------------------------------------------------

void begin_block(Block& b, Index index) {
  const int threads = current.block.x * current.block.y * current.block.z;
  if (!b.memory) b.memory.reset(new char[(256 << 10) + 1024]);
  b.bytes = current.shared_bytes;
  b.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(b.memory.get()) + 1023) & ~1023ull);
  memset(b.shared, 0xff, b.bytes);   // NaN, as floats and as halves
  b.state.assign(b.bytes, kUnwritten);
  b.in_flight.clear();
  b.barriers.clear();
  for (auto& n : b.named) n.here.clear();
  b.meetings.assign((threads + 31) / 32, {});
  b.threads.resize(threads);
  for (int i = 0; i < threads; ++i) {
    Thread& t = b.threads[i];
    t.block = &b;
    t.block_index = index;
    t.number = i;
    t.thread_index = {static_cast<unsigned>(i), 0, 0};
    t.lane = i % 32;
    t.warp = i / 32;
    t.done = false;
    t.waits_for = nullptr;
    t.copies.clear();
    if (!t.fiber.stack) {
      t.fiber.stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      t.fiber.bytes = kStackBytes;
    }
#if defined(__SANITIZE_ADDRESS__)
    // The last block's frames were left, not returned from.
    __asan_unpoison_memory_region(t.fiber.stack, t.fiber.bytes);
#endif
    prepare(t.fiber, body);
    ready.push_back(&t);
  }
}

// Who waits where, once nobody can run.
void check_stuck() {
  std::map<std::tuple<std::string, std::string>, std::pair<int, std::string>> waiting;
  int left = 0, stuck = 0;
  for (const Thread& t : block.threads) {
    if (t.done) {
      ++left;
      continue;
    }
    ++stuck;
    auto& entry = waiting[{t.waits_for ? t.waits_for : "nothing", name_of(t.waits_at)}];
    if (!entry.first++) entry.second = name_of(t);
  }
  if (!stuck) return;
  failed = true;
  message = text("stuck: %d threads wait for what will not come, %d have left the kernel", stuck,
                 left);
  for (const auto& [where, entry] : waiting)
    message += text("\n  %s: %d wait for %s, the first %s", std::get<1>(where).c_str(),
                    entry.first, std::get<0>(where).c_str(), entry.second.c_str());
}

void run_block() {
  while (!failed && !ready.empty()) {
    Thread* next = ready.front();
    ready.pop_front();
    run(host, next->fiber, next);
  }
  if (!failed) check_stuck();
}

template <float (*convert)(uint16_t)>
void multiply(void* const* operands, uint32_t, Site);

struct MmaOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

template <float (*convert)(uint16_t)>
void multiply(void* const* operands, uint32_t, Site site) {
  if (counting) count_warp(kMma, site, nullptr);
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const MmaOperands*>(operands[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[g + i % 2 * 8][t + i / 2 * 8 + half] = convert(own.a[i] >> (16 * half) & 0xffff);
      for (int i = 0; i < 2; ++i) b[t + i * 8 + half][g] = convert(own.b[i] >> (16 * half) & 0xffff);
      for (int i = 0; i < 2; ++i) d[g + i * 8][t + half] = own.d[i * 2 + half];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; ++lane) {
    float* to = static_cast<const MmaOperands*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) to[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

struct MatrixOperands {
  uint32_t* r;
  uint32_t address;
};

template <bool kTransposed>
void load_matrices(void* const* operands, uint32_t, Site site) {
  if (counting) {
    uint32_t addresses[32];
    for (int lane = 0; lane < 32; ++lane)
      addresses[lane] = static_cast<MatrixOperands*>(operands[lane])->address;
    count_warp(kLdmatrix, site, addresses);
  }
  for (int m = 0; m < 4; ++m) {
    uint16_t x[8][8];
    for (int row = 0; row < 8; ++row)
      memcpy(x[row], readable(static_cast<MatrixOperands*>(operands[m * 8 + row])->address, 16,
                              site, "reads by ldmatrix"), 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = kTransposed ? x[j][i] : x[i][j];
      const uint32_t high = kTransposed ? x[j + 1][i] : x[i][j + 1];
      static_cast<MatrixOperands*>(operands[lane])->r[m] = low | high << 16;
    }
  }
}

}  // namespace

// ---- what the kernels call --------------------------------------------------------------

void collective(const char* name, uint32_t mask, void* operands, Compute compute, Site site) {
  Thread& t = me();
  Meeting& meeting = t.block->meetings[t.warp];
  if (!(mask >> t.lane & 1)) fault(site, text("calls %s with a mask without itself", name));
  if (!meeting.here) {
    meeting.mask = mask;
    meeting.name = name;
    meeting.site = site;
  } else if (meeting.mask != mask || strcmp(meeting.name, name) ||
             meeting.site.line != site.line) {
    fault(site, text("is at %s, where others of its warp are at %s of %s", name, meeting.name,
                     name_of(meeting.site).c_str()));
  }
  meeting.operands[t.lane] = operands;
  meeting.here |= 1u << t.lane;
  if (meeting.here != mask) {
    wait(name, site);
    return;
  }
  compute(meeting.operands, mask, site);
  meeting.here = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && lane != t.lane) wake(&t.block->threads[t.warp * 32 + lane]);
}

void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed, Site site) {
  MatrixOperands own{r, address};
  collective("ldmatrix", 0xffffffffu, &own,
             transposed ? load_matrices<true> : load_matrices<false>, site);
}
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half, Site site) {
  MmaOperands own{d, a, {b0, b1}};
  collective("mma", 0xffffffffu, &own,
             half ? multiply<half_to_float> : multiply<bfloat16_to_float>, site);
}

void* dynamic_shared() { return me().block->shared; }
uint32_t shared_address(const void* pointer, Site site) {
  const Block& b = *me().block;
  const char* at = static_cast<const char*>(pointer);
  if (at < b.shared || at > b.shared + b.bytes)
    fault(site, "takes the shared address of something that is not in shared memory");
  return static_cast<uint32_t>(at - b.shared) + kBase;
}
void shared_load(void* to, uint32_t address, int bytes, Site site) {
  memcpy(to, readable(address, bytes, site, "reads"), bytes);
  if (counting) count_lane(kSharedLoad, site, address, bytes);
}
void shared_store(uint32_t address, const void* from, int bytes, Site site) {
  memcpy(writable(address, bytes, site, "writes"), from, bytes);
  memset(&me().block->state[address - kBase], kWritten, bytes);
  if (counting) count_lane(kSharedStore, site, address, bytes);
}
void global_load(void* to, const void* from, int bytes, Site site) {
  memcpy(to, global_at(from, bytes, site, "reads"), bytes);
  if (counting) count_lane(kGlobalLoad, site, reinterpret_cast<uintptr_t>(from), bytes);
}

void copy_async(uint32_t shared, const void* global, int bytes, Site site) {
  char* to = writable(shared, bytes, site, "copies to");
  const char* from = global_at(global, bytes, site, "copies");
  memset(to, 0xff, bytes);
  Block& b = *me().block;
  memset(&b.state[shared - kBase], kInFlight, bytes);
  b.in_flight[(shared - kBase) / 16] = site;
  me().copies.push_back({shared, from, bytes, site});
  if (counting) {
    count_lane(kAsyncCopy, site, reinterpret_cast<uintptr_t>(from), bytes);
    count_copied(buffer_of(from), bytes);
  }
}
void copy_async_arrive(uint32_t barrier, Site site) {
  MBarrier& to = mbarrier(barrier, site);
  for (const Copy& copy : me().copies) to.copies.push_back({to.phase, copy});
  me().copies.clear();
  arrive(to);
}

void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier, Site site) {
  MBarrier& to = mbarrier(barrier, site);
  if (bytes < 16 || bytes % 16) fault(site, text("copies %d bytes, which is no multiple of 16", bytes));
  Block& b = *me().block;
  for (int at = 0; at < bytes; at += 16) {
    char* target = writable(shared + at, 16, site, "copies to");
    global_at(static_cast<const char*>(global) + at, 16, site, "copies");
    memset(target, 0xff, 16);
    b.in_flight[(shared - kBase + at) / 16] = site;
  }
  memset(&b.state[shared - kBase], kInFlight, bytes);
  to.copies.push_back({to.phase, {shared, static_cast<const char*>(global), bytes, site}});
  to.bytes -= bytes;
  if (counting) {
    count_bulk(site, shared, reinterpret_cast<uintptr_t>(global), bytes);
    count_copied(buffer_of(static_cast<const char*>(global)), bytes);
  }
  complete_if_done(to);
}

void mbarrier_init(uint32_t barrier, int count, Site site) {
  shared_at(barrier, 8, site, "makes a barrier of");
  if (count < 1) fault(site, text("makes a barrier for %d arrivals", count));
  Block& b = *me().block;
  memset(&b.state[barrier - kBase], kBarrierBytes, 8);
  MBarrier& made = b.barriers[barrier];
  made = {};
  made.count = made.pending = count;
}
void mbarrier_arrive(uint32_t barrier, Site site) { arrive(mbarrier(barrier, site)); }
void mbarrier_expect(uint32_t barrier, int bytes, Site site) {
  MBarrier& to = mbarrier(barrier, site);
  to.bytes += bytes;
  arrive(to);
}
void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site) {
  MBarrier& on = mbarrier(barrier, site);
  while ((on.phase & 1) == parity) {
    on.waiting.push_back(&me());
    wait("the phase of a barrier in shared memory", site);
  }
  land(*me().block, on);
}
void named_barrier(int name, int threads, Site site) {
  if (name < 0 || name > 15) fault(site, text("comes to barrier %d of 16", name));
  meet(me().block->named[name], threads, "a named barrier", site);
}
void block_barrier(Site site) {
  meet(me().block->named[0], me().block->threads.size(), "__syncthreads", site);
}

bool launch(const Launch& asked) {
  current = asked;
  failed = false;
  message.clear();
  ready.clear();
  block_dim = asked.block;
  grid_dim = asked.grid;
  host = {};
  for (unsigned i = 0; i < asked.grid.x * asked.grid.y && !failed; ++i) {
    begin_block(block, {i % asked.grid.x, i / asked.grid.x, 0});
    run_block();
    if (counting) end_block();
  }
  self = nullptr;
  return !failed;
}
const char* report() { return message.c_str(); }

// ---- elements ---------------------------------------------------------------------------

float half_to_float(uint16_t bits) {
  uint32_t word = (bits & 0x7fffu) << 13;
  float x;
  if ((bits & 0x7c00u) == 0x7c00u) {
    word |= 0x7f800000u;
    memcpy(&x, &word, 4);
  } else {
    memcpy(&x, &word, 4);
    x *= 0x1p112f;             // subnormals too
  }
  return bits & 0x8000u ? -x : x;
}
uint16_t float_to_half(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  const uint16_t sign = word >> 16 & 0x8000u;
  const float magnitude = fabsf(x);
  if (isnan(x)) return sign | 0x7fffu;
  if (magnitude >= 65520.f) return sign | 0x7c00u;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(lrintf(magnitude * 0x1p24f));
  word = (word & 0x7fffffffu) - (112u << 23);
  return sign | static_cast<uint16_t>((word + 0xfffu + (word >> 13 & 1)) >> 13);
}
uint16_t float_to_bfloat16(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  if (isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((word + 0x7fffu + (word >> 16 & 1)) >> 16);
}

}  // namespace emulated

// Names a piece of global memory that kernels may touch; all are forgotten with a null name.
extern "C" void emulated_buffer(const char* name, uint64_t address, uint64_t bytes) {
  if (!name) return emulated::buffers.clear();
  emulated::buffers.push_back({name, reinterpret_cast<const char*>(address), bytes});
}
