#include "counts.h"

#include <string.h>

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

namespace emulated {

bool counting = false;

namespace {

constexpr const char* kNames[kKinds] = {"ldmatrix",     "mma",         "shared load",
                                        "shared store", "global load", "bulk copy",
                                        "cp.async"};

struct Count {
  uint64_t instructions = 0, wavefronts = 0, least = 0;   // of shared memory
  uint64_t sectors = 0, needed = 0;                       // of global memory
  uint64_t bytes = 0;
};
using Place = std::tuple<Kind, const char*, uintptr_t>;

struct Event {                 // one instruction of a warp, as far as its lanes have come
  uint32_t mask = 0;
  uint64_t address[32];
};
struct Stream {                // a warp at a place
  uint32_t times[32] = {}, first = 0;
  int bytes = 0;
  std::deque<Event> events;
};

std::map<Place, Count> table;
std::map<std::pair<int, Place>, Stream> streams;
std::map<std::string, uint64_t> copied;

// Wavefronts for some lanes' accesses: the most words that one bank has to deliver.
int wavefronts(const std::vector<uint32_t>& addresses, int bytes) {
  std::vector<uint32_t> words[32];
  for (uint32_t address : addresses)
    for (int i = 0; i < bytes; i += 4) {
      const uint32_t word = (address + i) / 4;
      auto& bank = words[word % 32];
      if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
    }
  size_t most = 0;
  for (const auto& bank : words) most = std::max(most, bank.size());
  return static_cast<int>(most);
}

void account(Kind kind, Count& count, const Event& event, int bytes) {
  ++count.instructions;
  if (kind == kSharedLoad || kind == kSharedStore) {
    const int together = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
    std::vector<uint32_t> all;
    for (int lane = 0; lane < 32; lane += together) {
      std::vector<uint32_t> some;
      for (int i = lane; i < lane + together; ++i)
        if (event.mask >> i & 1) some.push_back(static_cast<uint32_t>(event.address[i]));
      if (some.empty()) continue;
      count.wavefronts += wavefronts(some, bytes);
      all.insert(all.end(), some.begin(), some.end());
      count.bytes += some.size() * bytes;
    }
    std::vector<uint32_t> words;
    for (uint32_t address : all)
      for (int i = 0; i < bytes; i += 4) words.push_back((address + i) / 4);
    std::sort(words.begin(), words.end());
    const size_t distinct = std::unique(words.begin(), words.end()) - words.begin();
    count.least += std::max<size_t>(1, (distinct + 31) / 32);
    return;
  }
  std::vector<uint64_t> sectors;
  size_t distinct = 0;
  std::vector<uint64_t> seen;
  for (int lane = 0; lane < 32; ++lane)
    if (event.mask >> lane & 1) {
      for (uint64_t s = event.address[lane] / 32; s <= (event.address[lane] + bytes - 1) / 32; ++s)
        sectors.push_back(s);
      seen.push_back(event.address[lane]);
    }
  std::sort(seen.begin(), seen.end());
  distinct = std::unique(seen.begin(), seen.end()) - seen.begin();
  std::sort(sectors.begin(), sectors.end());
  count.sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
  count.needed += (distinct * bytes + 31) / 32;
  count.bytes += distinct * bytes;
}

Place place(Kind kind, Site site) { return {kind, site.file, site.line}; }

}  // namespace

void count_lane(Kind kind, Site site, uint64_t address, int bytes) {
  const int lane = self->lane, warp = static_cast<int>(self->thread_index.x / 32);
  const Place where = place(kind, site);
  Stream& stream = streams[{warp, where}];
  stream.bytes = bytes;
  const uint32_t n = stream.times[lane]++ - stream.first;
  while (stream.events.size() <= n) stream.events.emplace_back();
  Event& event = stream.events[n];
  event.mask |= 1u << lane;
  event.address[lane] = address;
  while (!stream.events.empty() && stream.events.front().mask == 0xffffffffu) {
    account(kind, table[where], stream.events.front(), bytes);
    stream.events.pop_front();
    ++stream.first;
  }
}

void count_warp(Kind kind, Site site, const uint32_t* addresses) {
  Count& count = table[place(kind, site)];
  ++count.instructions;
  if (!addresses) return;
  for (int m = 0; m < 32; m += 8)
    count.wavefronts += wavefronts({addresses + m, addresses + m + 8}, 16);
  count.least += 4;
  count.bytes += 512;
}

void count_bulk(Site site, uint32_t shared, uint64_t global, int bytes) {
  Count& count = table[place(kBulkCopy, site)];
  ++count.instructions;
  count.bytes += bytes;
  count.needed += (bytes + 31) / 32;
  for (int at = 0; at < bytes;) {
    const int piece = std::min<int>(bytes - at, 128 - (shared + at) % 128);
    count.sectors += (global + at + piece - 1) / 32 - (global + at) / 32 + 1;
    at += piece;
  }
}

void count_copied(const char* buffer, int bytes) { copied[buffer] += bytes; }

void begin_counts() {
  table.clear();
  streams.clear();
  copied.clear();
}

void end_block() {
  for (auto& [key, stream] : streams)
    for (const Event& event : stream.events)
      if (event.mask) account(std::get<0>(key.second), table[key.second], event, stream.bytes);
  streams.clear();
}

std::string counts() {
  std::string text;
  for (const auto& [where, c] : table) {
    const char* file = std::get<1>(where);
    const char* slash = strrchr(file, '/');
    text += std::string(kNames[std::get<0>(where)]) + "\t" + (slash ? slash + 1 : file) + ":" +
            std::to_string(std::get<2>(where));
    for (uint64_t x : {c.instructions, c.wavefronts, c.least, c.sectors, c.needed, c.bytes})
      text += "\t" + std::to_string(x);
    text += "\n";
  }
  for (const auto& [buffer, bytes] : copied)
    text += "copied\t" + buffer + "\t" + std::to_string(bytes) + "\n";
  return text;
}

}  // namespace emulated

extern "C" void emulated_count(int on) {
  emulated::counting = on;
  emulated::begin_counts();
}
// The counts since then, as text; valid until the next call.
extern "C" const char* emulated_counts() {
  static std::string text;
  text = emulated::counts();
  return text.c_str();
}
