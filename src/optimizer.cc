#include "zeroone/optimizer.h"

#include "zeroone/error.h"

namespace zeroone {
namespace {

std::vector<std::vector<TensorSpec>> specs(const std::vector<ParameterGroup>& groups) {
  std::vector<std::vector<TensorSpec>> result;
  for (const ParameterGroup& group : groups) {
    result.emplace_back();
    for (const Parameter& parameter : group.parameters) {
      result.back().push_back({parameter.name, static_cast<std::int64_t>(parameter.data.size())});
    }
  }
  return result;
}

}  // namespace

Optimizer::Optimizer(Recipe recipe, Communicator& communicator, std::vector<ParameterGroup> groups, int threads)
    : communicator_(communicator), engine_(std::move(recipe), specs(groups)), threads_(threads) {
  std::string error;
  for (const ParameterGroup& group : groups) {
    options_.push_back(group.options);
    try {
      validate(group.options);
    } catch (const InvalidArgument& invalid) {
      error = invalid.what();
    }
    for (const Parameter& parameter : group.parameters) {
      if (parameter.gradient.size() != parameter.data.size()) {
        error = "the gradient of '" + parameter.name + "' has " + std::to_string(parameter.gradient.size()) +
                " elements, the parameter has " + std::to_string(parameter.data.size());
      }
      tensors_.push_back({parameter.data.data(), parameter.gradient.data()});
    }
  }
  engine_.attach(communicator_, tensors_, {}, true, error, threads_);
}

StepKind Optimizer::step() { return engine_.step(communicator_, tensors_, options_, threads_); }

void Optimizer::sync() { engine_.sync(communicator_, tensors_, options_, threads_); }

void Optimizer::adopt_parameters() {
  engine_.adopt_all(tensors_, options_);
}

}  // namespace zeroone
