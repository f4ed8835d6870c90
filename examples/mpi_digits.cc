// Trains a classifier of hand-written digits on several MPI ranks, with loops and zeroone and nothing else:
//
//   mpiexec -n 4 mpi_digits examples/digits.bin
//
// Every rank has a part of the data. Each of three optimizers starts anew; the table at the end compares what they
// learned with what they sent. Exits with 1 if one of them learned too little or left the ranks with different weights.
#include <zeroone/mpi_communicator.h>
#include <zeroone/zeroone.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <numbers>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kPixels = 64;
constexpr int kClasses = 10;
constexpr int kBatch = 16;  // per rank
constexpr int kSteps = 720;
constexpr double kPeakLearningRate = 2e-3;
constexpr double kRequiredAccuracy = 0.95;

struct Digit {
  std::array<float, kPixels> pixels;
  int label;
};

std::vector<Digit> load(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("can't open ") + path);
  std::vector<Digit> digits;
  std::array<char, kPixels + 1> record;
  while (file.read(record.data(), record.size())) {
    Digit& digit = digits.emplace_back();
    for (int i = 0; i < kPixels; ++i) digit.pixels[i] = static_cast<float>(record[i]) / 8.0f - 1.0f;
    digit.label = record[kPixels];
  }
  return digits;
}

// y = W x + b.
class Layer {
 public:
  Layer(int inputs, int outputs, std::mt19937& random)
      : inputs_(inputs), outputs_(outputs), w_(inputs * outputs), b_(outputs), dw_(w_.size()), db_(b_.size()) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(inputs)));
    for (float& w : w_) w = normal(random);
  }

  std::vector<float> forward(const std::vector<float>& x) const {
    std::vector<float> y = b_;
    for (int i = 0; i < inputs_; ++i) {
      for (int j = 0; j < outputs_; ++j) y[j] += x[i] * w_[i * outputs_ + j];
    }
    return y;
  }

  void add_gradient(const std::vector<float>& x, const std::vector<float>& dy) {
    for (int i = 0; i < inputs_; ++i) {
      for (int j = 0; j < outputs_; ++j) dw_[i * outputs_ + j] += x[i] * dy[j];
    }
    for (int j = 0; j < outputs_; ++j) db_[j] += dy[j];
  }

  std::vector<float> backward(const std::vector<float>& dy) const {
    std::vector<float> dx(inputs_);
    for (int i = 0; i < inputs_; ++i) dx[i] = std::transform_reduce(dy.begin(), dy.end(), &w_[i * outputs_], 0.0f);
    return dx;
  }

  void zero_gradient() {
    std::ranges::fill(dw_, 0.0f);
    std::ranges::fill(db_, 0.0f);
  }

  void add_parameters(const std::string& name, std::vector<zeroone::Parameter>& parameters) {
    parameters.push_back({name + ".weight", w_, dw_});
    parameters.push_back({name + ".bias", b_, db_});
  }

 private:
  int inputs_, outputs_;
  std::vector<float> w_, b_, dw_, db_;
};

// 64 - 256 - 64 - 10 with tanh between. Not rectifiers: units that rarely fire have gradients far smaller than others in
// their layer, which one scale for all suits badly.
class Network {
 public:
  explicit Network(std::mt19937& random)
      : layers_{Layer(kPixels, 256, random), Layer(256, 64, random), Layer(64, kClasses, random)} {}

  int classify(const Digit& digit) const {
    const std::vector<float> logits = activations(digit).back();
    return static_cast<int>(std::ranges::max_element(logits) - logits.begin());
  }

  // Leaves the gradient of the batch's mean loss in the layers; returns that loss.
  double learn(const std::vector<const Digit*>& batch) {
    for (Layer& layer : layers_) layer.zero_gradient();
    const float share = 1.0f / static_cast<float>(batch.size());
    double loss = 0;
    for (const Digit* digit : batch) {
      const std::vector<std::vector<float>> values = activations(*digit);
      const std::vector<float>& logits = values.back();
      const float largest = std::ranges::max(logits);
      float sum = 0;
      for (const float logit : logits) sum += std::exp(logit - largest);
      loss += share * (std::log(sum) + largest - logits[digit->label]);

      std::vector<float> gradient(kClasses);  // softmax minus target
      for (int c = 0; c < kClasses; ++c) {
        gradient[c] = share * (std::exp(logits[c] - largest) / sum - (c == digit->label ? 1.0f : 0.0f));
      }
      for (std::size_t l = layers_.size(); l-- > 0;) {
        layers_[l].add_gradient(values[l], gradient);
        if (l == 0) break;
        gradient = layers_[l].backward(gradient);
        for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] *= 1.0f - values[l][i] * values[l][i];  // tanh'
      }
    }
    return loss;
  }

  std::vector<zeroone::Parameter> parameters() {
    std::vector<zeroone::Parameter> result;
    for (std::size_t l = 0; l < layers_.size(); ++l) layers_[l].add_parameters("layer" + std::to_string(l), result);
    return result;
  }

 private:
  // The input of every layer, and the output of the last.
  std::vector<std::vector<float>> activations(const Digit& digit) const {
    std::vector<std::vector<float>> values{{digit.pixels.begin(), digit.pixels.end()}};
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      values.push_back(layers_[l].forward(values.back()));
      if (l + 1 == layers_.size()) break;
      for (float& value : values.back()) value = std::tanh(value);
    }
    return values;
  }

  std::array<Layer, 3> layers_;
};

// Rises for a twentieth of the run, then falls with the cosine.
double learning_rate(int step) {
  const double warm_up = kSteps / 20.0;
  if (step < warm_up) return kPeakLearningRate * (step + 1) / warm_up;
  return kPeakLearningRate * (0.51 + 0.49 * std::cos(std::numbers::pi * (step - warm_up) / (kSteps - warm_up)));
}

struct Result {
  double accuracy;
  bool replicas_equal;
  zeroone::Stats stats;
};

Result train(const zeroone::Recipe& recipe, zeroone::Communicator& communicator, const std::vector<Digit>& digits) {
  const int rank = communicator.rank();
  // Every fifth digit is for testing; of the others each rank has its own.
  std::vector<const Digit*> shard;
  std::vector<const Digit*> test;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i % 5 == 0) {
      test.push_back(&digits[i]);
    } else if (static_cast<int>(i % communicator.size()) == rank) {
      shard.push_back(&digits[i]);
    }
  }

  std::mt19937 random(rank + 1);
  Network network(random);  // differs by rank: the optimizer starts all ranks from rank 0's
  zeroone::Optimizer optimizer(recipe, communicator, {{.options = {}, .parameters = network.parameters()}});
  std::size_t next = shard.size();
  double loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<const Digit*> batch;
    while (batch.size() < kBatch) {
      if (next == shard.size()) {
        std::ranges::shuffle(shard, random);
        next = 0;
      }
      batch.push_back(shard[next++]);
    }
    loss += network.learn(batch);
    optimizer.options(0).lr = learning_rate(step);
    optimizer.step();
    if (rank == 0 && (step + 1) % 180 == 0) {
      std::printf("%-14s step %d, loss %.4f\n", recipe.name.c_str(), step + 1, loss / 180);
      std::fflush(stdout);
      loss = 0;
    }
  }
  optimizer.sync();  // the last steps may have been local

  Result result{.accuracy = 0, .replicas_equal = true, .stats = optimizer.stats()};
  for (const Digit* digit : test) result.accuracy += network.classify(*digit) == digit->label ? 1.0 : 0.0;
  result.accuracy /= static_cast<double>(test.size());

  int equal = 1;
  for (const zeroone::Parameter& parameter : network.parameters()) {
    std::vector<float> first(parameter.data.begin(), parameter.data.end());
    MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
    if (std::memcmp(first.data(), parameter.data.data(), parameter.data.size_bytes()) != 0) equal = 0;
  }
  MPI_Allreduce(MPI_IN_PLACE, &equal, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  result.replicas_equal = equal == 1;
  return result;
}

int run(const char* path) {
  const std::vector<Digit> digits = load(path);
  zeroone::MpiCommunicator communicator(MPI_COMM_WORLD);
  const std::array recipes{
      zeroone::adamw(),                             // dense: what the others are compared with
      zeroone::one_bit_adam(kSteps / 6),            // dense for a sixth of the run, then one bit
      zeroone::zero_one_adam(zeroone::doubling(4))  // refreshes ever more rarely: the run is short
  };
  std::vector<Result> results;
  for (const zeroone::Recipe& recipe : recipes) results.push_back(train(recipe, communicator, digits));

  bool good = true;
  if (communicator.rank() == 0) {
    std::printf("\n%lld parameters, %d ranks, %d steps\n", static_cast<long long>(results[0].stats.parameters),
                communicator.size(), kSteps);
    std::printf("%-14s %9s %13s %10s %18s %9s\n", "", "accuracy", "sent per rank", "less by", "bits per parameter", "replicas");
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& [accuracy, replicas_equal, stats] = results[i];
    good = good && accuracy >= kRequiredAccuracy && replicas_equal;
    if (communicator.rank() != 0) continue;
    std::printf("%-14s %7.1f %% %10.2f MB %8.1f x %18.2f %9s\n", recipes[i].name.c_str(), 100 * accuracy,
                static_cast<double>(stats.bytes_sent) / 1e6,
                static_cast<double>(stats.dense_bytes) / static_cast<double>(std::max<std::int64_t>(stats.bytes_sent, 1)),
                stats.bits_per_parameter_step(), replicas_equal ? "equal" : "DIFFER");
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int result = 1;
  try {
    result = run(argc > 1 ? argv[1] : "examples/digits.bin");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_digits: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // other ranks may be waiting for this one
  }
  MPI_Finalize();
  return result;
}
