#include "zeroone/types.h"

#include <cmath>
#include <sstream>

#include "zeroone/error.h"

namespace zeroone {
namespace {

void require(bool valid, const char* what, double value) {
  if (valid) return;
  std::ostringstream text;  // as torch words it, and as short as Python prints it
  text << "Invalid " << what << ": " << value;
  throw InvalidArgument(text.str());
}

}  // namespace

void validate(const GroupOptions& options) {
  require(options.lr >= 0 && std::isfinite(options.lr), "learning rate", options.lr);
  require(options.beta1 >= 0 && options.beta1 < 1, "beta parameter at index 0", options.beta1);
  require(options.beta2 >= 0 && options.beta2 < 1, "beta parameter at index 1", options.beta2);
  require(options.eps >= 0 && std::isfinite(options.eps), "epsilon value", options.eps);
  require(options.weight_decay >= 0 && std::isfinite(options.weight_decay), "weight_decay value",
          options.weight_decay);
}

}  // namespace zeroone
