// Kernels against the memory: each phase of a one-bit round beside a plain loop with the same reads and writes, alternated
// in one run. `ratio` is the kernel's share of the plain loop's bandwidth.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "engine/exchange.h"
#include "kernels/kernels.h"
#include "zeroone/instruction_set.h"
#include "zeroone/thread_communicator.h"

namespace zeroone {
namespace {

constexpr std::int64_t kNumel = std::int64_t{1} << 24;

double seconds(auto body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs both in turn and reports bandwidths of `bytes` per call.
void compare(benchmark::State& state, double bytes, auto kernel, auto plain) {
  kernel();
  plain();
  std::vector<double> kernel_times;
  std::vector<double> plain_times;
  for (auto _ : state) {
    kernel_times.push_back(seconds(kernel));
    plain_times.push_back(seconds(plain));
    state.SetIterationTime(kernel_times.back());
  }
  const auto median = [](std::vector<double>& times) {
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
  };
  const double kernel_time = median(kernel_times);
  const double plain_time = median(plain_times);
  state.counters["GB/s"] = bytes / kernel_time / 1e9;
  state.counters["plain_GB/s"] = bytes / plain_time / 1e9;
  state.counters["ratio"] = plain_time / kernel_time;
  state.SetLabel(std::string(instruction_set()));
}

// One rank's one-bit exchange of one tensor.
struct Round {
  Round()
      : layout(std::vector<TensorSpec>{{"tensor", kNumel}}, 1),
        born{kNumel},
        z(kNumel),
        residual(kNumel, 1e-3f),
        server_error(kNumel),
        result(kNumel) {
    for (std::size_t i = 0; i < z.size(); ++i) z[i] = std::sin(static_cast<float>(i));
    ExchangeSlab slab;
    slab.layout = &layout;
    slab.server_error = server_error.data();
    slab.born = born;
    exchange.emplace(*code, std::vector<ExchangeSlab>{slab}, 0, 1);
    wire = Exchange::allocate(communicator, exchange->body_bytes());
  }

  void value(const Piece& piece, float* out) const {
    kernels().add_residual(piece.n, z.data() + piece.begin, 1.0f, residual.data() + piece.begin, nullptr, out);
  }
  void compress() {
    exchange->encode(wire, pool, 1, [&](std::size_t, const Piece& piece, float* out) {
      value(piece, out);
      return static_cast<const float*>(out);
    });
  }
  void update_residual() {
    alignas(64) float b[kTile];
    alignas(64) float decoded[kTile];
    for (const Piece& piece : layout.pieces) {
      value(piece, b);
      exchange->decode_own(wire, 0, piece, decoded);
      kernels().subtract(piece.n, b, decoded, residual.data() + piece.begin);
    }
  }
  void decompress() {
    for (const Piece& piece : layout.pieces) exchange->decode_own(wire, 0, piece, result.data() + piece.begin);
  }

  CodePtr code = sign_code();
  SlabLayout layout;
  std::vector<std::int64_t> born;
  std::vector<float> z, residual, server_error, result;
  std::optional<Exchange> exchange;
  LocalCommunicator communicator;
  Wire wire;
  ThreadPool pool;
};

// The plain loops: what a compiler makes of the same reads and writes.
float plain_compress(const Round& r, std::vector<std::uint8_t>& bits) {
  float sum[16] = {};
  for (std::size_t i = 0; i < r.z.size(); i += 16) {
    for (std::size_t j = 0; j < 16; ++j) sum[j] += r.z[i + j] + r.residual[i + j];
    bits[i / 8] = bits[i / 8 + 1] = static_cast<std::uint8_t>(i);
  }
  return std::accumulate(sum, sum + 16, 0.0f);
}

void plain_residual(Round& r, const std::vector<std::uint8_t>& bits) {
  for (std::size_t i = 0; i < r.z.size(); i += 8) {
    const auto byte = static_cast<float>(bits[i / 8]) * 1e-30f;
    for (std::size_t j = i; j < i + 8; ++j) r.residual[j] = (r.z[j] + r.residual[j]) * 0.5f + byte;
  }
}

void plain_decompress(Round& r, const std::vector<std::uint8_t>& bits) {
  for (std::size_t i = 0; i < r.result.size(); i += 8) {
    const auto byte = static_cast<float>(bits[i / 8]);
    for (std::size_t j = i; j < i + 8; ++j) r.result[j] = byte;
  }
}

constexpr double kCompressBytes = kNumel * (4 + 4 + 1.0 / 8);
constexpr double kResidualBytes = kNumel * (4 + 4 + 4 + 1.0 / 8);
constexpr double kDecompressBytes = kNumel * (4 + 1.0 / 8);

void compress(benchmark::State& state) {
  Round round;
  std::vector<std::uint8_t> bits(kNumel / 8);
  compare(state, kCompressBytes, [&] { round.compress(); },
          [&] { benchmark::DoNotOptimize(plain_compress(round, bits)); });
}

void residual(benchmark::State& state) {
  Round round;
  round.compress();
  const std::vector<std::uint8_t> bits(kNumel / 8, 1);
  compare(state, kResidualBytes, [&] { round.update_residual(); }, [&] { plain_residual(round, bits); });
}

void decompress(benchmark::State& state) {
  Round round;
  round.compress();
  const std::vector<std::uint8_t> bits(kNumel / 8, 1);
  compare(state, kDecompressBytes, [&] { round.decompress(); }, [&] { plain_decompress(round, bits); });
}

void compress_residual_decompress(benchmark::State& state) {
  Round round;
  std::vector<std::uint8_t> bits(kNumel / 8, 1);
  compare(
      state, kCompressBytes + kResidualBytes + kDecompressBytes,
      [&] {
        round.compress();
        round.update_residual();
        round.decompress();
      },
      [&] {
        benchmark::DoNotOptimize(plain_compress(round, bits));
        plain_residual(round, bits);
        plain_decompress(round, bits);
      });
}

BENCHMARK(compress)->UseManualTime()->Iterations(15)->Unit(benchmark::kMillisecond);
BENCHMARK(residual)->UseManualTime()->Iterations(15)->Unit(benchmark::kMillisecond);
BENCHMARK(decompress)->UseManualTime()->Iterations(15)->Unit(benchmark::kMillisecond);
BENCHMARK(compress_residual_decompress)->UseManualTime()->Iterations(15)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace zeroone

BENCHMARK_MAIN();
