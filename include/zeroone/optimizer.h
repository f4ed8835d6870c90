// Optimizer: the C++ front end. Parameters are the caller's memory; a communicator carries the rounds.
//
//   std::vector<float> w(1000), gradient(1000);
//   zeroone::LocalCommunicator communicator;
//   zeroone::Optimizer optimizer(zeroone::zero_one_adam(), communicator,
//                                {{.options = {.lr = 1e-3}, .parameters = {{"w", w, gradient}}}});
//   optimizer.step();      // after every backward pass
#pragma once

#include <span>
#include <string>
#include <vector>

#include "zeroone/engine.h"

namespace zeroone {

/// A parameter and its gradient, fp32, of equal size, owned by the caller and alive as long as the optimizer.
struct Parameter {
  std::string name;
  std::span<float> data;
  std::span<const float> gradient;
};

struct ParameterGroup {
  GroupOptions options;
  std::vector<Parameter> parameters;
};

/// Not thread-safe. Every member function that is named a collective is called by all ranks.
class Optimizer {
 public:
  /// A collective: ranks agree on layout and settings, then rank 0's parameters are written to all. `communicator`
  /// outlives the optimizer.
  Optimizer(Recipe recipe, Communicator& communicator, std::vector<ParameterGroup> groups, int threads = 1);

  /// A collective.
  StepKind step();

  /// A collective: makes all replicas equal, before evaluation or export.
  void sync();

  /// Learning rate and other settings of group `g`; may be changed between steps, alike on all ranks.
  GroupOptions& options(std::size_t g) { return options_.at(g); }

  /// The caller has written to the parameters: the next step starts from what they are now.
  void adopt_parameters();

  const Stats& stats() const { return engine_.stats(); }
  Engine& engine() { return engine_; }

 private:
  Communicator& communicator_;
  std::vector<GroupOptions> options_;
  std::vector<Tensor> tensors_;
  Engine engine_;
  int threads_;
};

}  // namespace zeroone
