// The bytes of a saved state: magic, hash of the rest, layout text, counters, vectors. Little-endian, as the wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zeroone/engine.h"

namespace zeroone {

class BlobWriter {
 public:
  BlobWriter();
  void text(const Fingerprint& lines);
  void counters(const Counters& counters);
  void floats(std::span<const float> values);
  std::vector<std::byte> finish() &&;

 private:
  void bytes(const void* data, std::size_t count);
  void integer(std::int64_t value) { bytes(&value, sizeof value); }
  void doubles(const std::vector<double>& values);
  void string(const std::string& value);
  void schedule(const ScheduleState& state);

  std::vector<std::byte> blob_;
};

/// Every member function throws InvalidArgument if the bytes are not what it expects.
class BlobReader {
 public:
  explicit BlobReader(std::span<const std::byte> blob);
  void expect(const Fingerprint& lines);
  Counters counters(std::size_t slabs);
  void expect_floats(std::size_t count) const;
  void floats(std::span<float> values);

 private:
  void bytes(void* data, std::size_t count);
  std::int64_t integer();
  std::vector<double> doubles();
  std::string string();
  ScheduleState schedule();

  std::span<const std::byte> rest_;
};

}  // namespace zeroone
