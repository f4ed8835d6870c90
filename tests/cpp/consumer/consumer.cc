// What a user's first program does: minimises |w - 3|^2 and succeeds if it gets there.
#include <zeroone/zeroone.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  std::vector<float> w(1000, 0.0f);
  std::vector<float> gradient(w.size());
  zeroone::LocalCommunicator communicator;
  zeroone::Optimizer optimizer(zeroone::zero_one_adam(), communicator,
                               {{.options = {.lr = 0.05, .weight_decay = 0}, .parameters = {{"w", w, gradient}}}});
  for (int step = 0; step < 300; ++step) {
    for (std::size_t i = 0; i < w.size(); ++i) gradient[i] = w[i] - 3.0f;
    optimizer.step();
  }
  optimizer.sync();
  std::printf("w = %g after %lld steps\n", w[0], static_cast<long long>(optimizer.stats().steps));
  return std::abs(w[0] - 3.0f) < 0.1f ? 0 : 1;
}
