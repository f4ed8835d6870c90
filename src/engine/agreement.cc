// How ranks find out that they differ before they exchange anything that matters.
#include <algorithm>
#include <cstring>
#include <string>

#include "engine/hash.h"
#include "engine/wire_memory.h"
#include "zeroone/engine.h"
#include "zeroone/error.h"

namespace zeroone {
namespace {

// First round: a digest of everything, so that the usual case costs one small exchange.
struct Digest {
  std::uint64_t hash = 0;
  std::uint64_t bytes = 0;
  std::uint64_t failed = 0;
};

// Unit and record separators of ASCII: they occur in no name.
constexpr char kUnit = '\x1f';
constexpr char kRecord = '\x1e';

std::string serialize(const Fingerprint& fingerprint) {
  std::string text;
  for (const auto& [what, value] : fingerprint) text += what + kUnit + value + kRecord;
  return text;
}

Fingerprint parse(std::string_view text) {
  Fingerprint fingerprint;
  while (!text.empty()) {
    const std::size_t unit = text.find(kUnit);
    const std::size_t record = text.find(kRecord);
    fingerprint.emplace_back(text.substr(0, unit), text.substr(unit + 1, record - unit - 1));
    text.remove_prefix(record + 1);
  }
  return fingerprint;
}

// The first line in which two fingerprints differ.
std::string difference(int rank_a, const Fingerprint& a, int rank_b, const Fingerprint& b) {
  const auto describe = [](const Fingerprint& f, std::size_t i, const std::string& what) {
    if (i >= f.size() || f[i].first != what) return std::string("nothing");
    return f[i].second;
  };
  const std::size_t lines = std::max(a.size(), b.size());
  for (std::size_t i = 0; i < lines; ++i) {
    if (i < a.size() && i < b.size() && a[i] == b[i]) continue;
    const std::string what = i < a.size() ? a[i].first : b[i].first;
    return "ranks disagree on " + what + ": rank " + std::to_string(rank_a) + " has " + describe(a, i, what) +
           ", rank " + std::to_string(rank_b) + " has " + describe(b, i, what);
  }
  return "ranks disagree";  // equal texts of unequal hashes cannot be
}

std::vector<std::byte> gather(Communicator& communicator, const void* bytes, std::size_t count, std::size_t padded) {
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const WireMemory memory(communicator, (ranks + 1) * padded);
  std::memset(memory.buffer().data, 0, (ranks + 1) * padded);
  std::memcpy(memory.buffer().data + ranks * padded, bytes, count);
  communicator.all_gather({memory.buffer(), ranks * padded, padded}, {memory.buffer(), 0, ranks * padded}).wait();
  return {memory.buffer().data, memory.buffer().data + ranks * padded};
}

}  // namespace

void agree(Communicator& communicator, const Fingerprint& fingerprint, std::string_view error) {
  const int ranks = communicator.size();
  const bool failed = !error.empty();
  if (ranks == 1) {
    if (failed) throw DisagreementError(std::string(error));
    return;
  }
  const std::string text = failed ? std::string(error) : serialize(fingerprint);
  const Digest own{hash_bytes(text.data(), text.size()), text.size(), failed};
  const std::vector<std::byte> digests = gather(communicator, &own, sizeof own, sizeof own);
  std::vector<Digest> all(static_cast<std::size_t>(ranks));
  std::memcpy(all.data(), digests.data(), digests.size());
  const bool agreed = std::all_of(all.begin(), all.end(), [&](const Digest& d) {
    return d.failed == 0 && d.hash == all[0].hash && d.bytes == all[0].bytes;
  });
  if (agreed) return;

  std::size_t longest = 1;
  for (const Digest& d : all) longest = std::max<std::size_t>(longest, d.bytes);
  const std::vector<std::byte> texts = gather(communicator, text.data(), text.size(), longest);
  const auto text_of = [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    return std::string_view(reinterpret_cast<const char*>(texts.data()) + r * longest, all[r].bytes);
  };
  std::string message;
  for (int r = 0; r < ranks; ++r) {
    if (all[static_cast<std::size_t>(r)].failed == 0) continue;
    message += (message.empty() ? "rank " : "; rank ") + std::to_string(r) + " failed: " + std::string(text_of(r));
  }
  for (int r = 1; r < ranks && message.empty(); ++r) {
    if (text_of(r) != text_of(0)) message = difference(0, parse(text_of(0)), r, parse(text_of(r)));
  }
  throw DisagreementError(message);
}

}  // namespace zeroone
