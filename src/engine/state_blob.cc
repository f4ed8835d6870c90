#include "engine/state_blob.h"

#include <cstring>
#include <utility>

#include "engine/hash.h"
#include "zeroone/error.h"

namespace zeroone {
namespace {

constexpr std::uint64_t kMagic = 0x32306574617453ff;  // and a version: another format gets another magic
constexpr std::size_t kPrefix = 2 * sizeof(std::uint64_t);

}  // namespace

BlobWriter::BlobWriter() : blob_(kPrefix) {}

void BlobWriter::bytes(const void* data, std::size_t count) {
  const auto* first = static_cast<const std::byte*>(data);
  blob_.insert(blob_.end(), first, first + count);
}

void BlobWriter::string(const std::string& value) {
  integer(static_cast<std::int64_t>(value.size()));
  bytes(value.data(), value.size());
}

void BlobWriter::doubles(const std::vector<double>& values) {
  integer(static_cast<std::int64_t>(values.size()));
  bytes(values.data(), values.size() * sizeof(double));
}

void BlobWriter::schedule(const ScheduleState& state) {
  integer(state.next);
  integer(state.index);
  doubles(state.peak_lr);
  doubles(state.last_lr);
}

void BlobWriter::text(const Fingerprint& lines) {
  integer(static_cast<std::int64_t>(lines.size()));
  for (const auto& [what, value] : lines) {
    string(what);
    string(value);
  }
}

void BlobWriter::counters(const Counters& counters) {
  integer(counters.step);
  integer(counters.last_sync);
  schedule(counters.refresh);
  schedule(counters.sync);
  integer(counters.births_due ? 1 : 0);
  for (const SlabCounters& slab : counters.slabs) {
    integer(slab.step);
    integer(slab.refreshes);
    integer(slab.pending);
    doubles({slab.sum, slab.previous_sum, slab.decay});
    integer(static_cast<std::int64_t>(slab.frozen.size()));
    for (const std::int64_t tensor : slab.frozen) integer(tensor);
  }
}

void BlobWriter::floats(std::span<const float> values) { bytes(values.data(), values.size_bytes()); }

std::vector<std::byte> BlobWriter::finish() && {
  const std::uint64_t prefix[] = {kMagic, hash_bytes(blob_.data() + kPrefix, blob_.size() - kPrefix)};
  std::memcpy(blob_.data(), prefix, sizeof prefix);
  return std::move(blob_);
}

BlobReader::BlobReader(std::span<const std::byte> blob) : rest_(blob) {
  std::uint64_t prefix[2];
  bytes(prefix, sizeof prefix);
  if (prefix[0] != kMagic) throw InvalidArgument("these bytes are not a saved state of this version of zeroone");
  if (prefix[1] != hash_bytes(rest_.data(), rest_.size())) {
    throw InvalidArgument("the saved state is damaged: its hash does not match its " + std::to_string(blob.size()) +
                          " bytes");
  }
}

void BlobReader::bytes(void* data, std::size_t count) {
  if (count > rest_.size()) throw InvalidArgument("the saved state is cut short");
  if (count > 0) std::memcpy(data, rest_.data(), count);
  rest_ = rest_.subspan(count);
}

std::int64_t BlobReader::integer() {
  std::int64_t value;
  bytes(&value, sizeof value);
  return value;
}

std::string BlobReader::string() {
  std::string value(static_cast<std::size_t>(integer()), '\0');
  bytes(value.data(), value.size());
  return value;
}

std::vector<double> BlobReader::doubles() {
  std::vector<double> values(static_cast<std::size_t>(integer()));
  bytes(values.data(), values.size() * sizeof(double));
  return values;
}

ScheduleState BlobReader::schedule() {
  ScheduleState state;
  state.next = integer();
  state.index = integer();
  state.peak_lr = doubles();
  state.last_lr = doubles();
  return state;
}

void BlobReader::expect(const Fingerprint& lines) {
  const auto count = static_cast<std::size_t>(integer());
  for (std::size_t i = 0; i < count || i < lines.size(); ++i) {
    const std::string what = i < count ? string() : lines[i].first;
    const std::string value = i < count ? string() : "nothing";
    if (i < lines.size() && what == lines[i].first && value == lines[i].second) continue;
    throw InvalidArgument("the saved state has " + what + ": " + value + ", here it is " +
                          (i < lines.size() ? lines[i].first + ": " + lines[i].second : "nothing"));
  }
}

Counters BlobReader::counters(std::size_t slabs) {
  Counters counters;
  counters.step = integer();
  counters.last_sync = integer();
  counters.refresh = schedule();
  counters.sync = schedule();
  counters.births_due = integer() != 0;
  for (std::size_t g = 0; g < slabs; ++g) {
    SlabCounters slab;
    slab.step = integer();
    slab.refreshes = integer();
    slab.pending = integer();
    const std::vector<double> sums = doubles();
    if (sums.size() != 3) throw InvalidArgument("the saved state is damaged");
    slab.sum = sums[0];
    slab.previous_sum = sums[1];
    slab.decay = sums[2];
    for (std::int64_t n = integer(); n > 0; --n) slab.frozen.push_back(integer());
    counters.slabs.push_back(slab);
  }
  return counters;
}

void BlobReader::expect_floats(std::size_t count) const {
  if (rest_.size() != count * sizeof(float)) {
    throw InvalidArgument("the saved state has " + std::to_string(rest_.size()) + " bytes of vectors, here there are " +
                          std::to_string(count * sizeof(float)));
  }
}

void BlobReader::floats(std::span<float> values) { bytes(values.data(), values.size_bytes()); }

}  // namespace zeroone
