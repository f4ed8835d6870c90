// The engine's parts, which engine.cc (layout, attachment), step.cc (the step loop) and state.cc (what a caller may do
// to the state) share.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/exchange.h"
#include "engine/layout.h"
#include "engine/thread_pool.h"
#include "zeroone/engine.h"
#include "zeroone/error.h"
#include "zeroone/state_memory.h"

namespace zeroone {

// Elements [begin, begin + n) of one tensor: the unit of work where chunks don't matter.
struct Run {
  std::size_t tensor;
  std::int64_t begin;
  std::int64_t n;
};

struct Slab {
  std::vector<TensorSpec> tensors;
  std::vector<std::int64_t> tensor_begin;  // in the slab
  std::vector<Run> runs;
  std::size_t first_tensor = 0;  // index of its first tensor among all groups'
  std::int64_t numel = 0;

  float* anchor = nullptr;
  float* momentum = nullptr;
  float* accumulated = nullptr;
  float lag = 0;  // u is what is stored plus lag times m: see Preconditioner::local_step
  StepScalars scalars;  // of the round under way
  std::vector<char> frozen;  // per tensor: counters' frozen, looked up
  std::vector<char> wanted;  // per tensor: whether the caller wants it frozen
  std::array<float*, 4> own{};  // the preconditioner's
  float* worker_error = nullptr;
  float* server_error = nullptr;  // [chunk]

  // Since attach.
  std::optional<SlabLayout> layout;
  std::vector<std::int64_t> piece_born;
  std::vector<float> piece_support;   // sum of the support
  std::vector<std::int64_t> born;     // per block
  std::vector<float> support_mean;    // per tensor, of its born coordinates; 0: there are none
  std::size_t wire_offset = 0;  // of its momentum of before a local step
  bool has_anchor = false;
};

inline bool any_pending(const Counters& counters) {
  return std::any_of(counters.slabs.begin(), counters.slabs.end(),
                     [](const SlabCounters& slab) { return slab.pending > 0; });
}

class Engine::Impl {
 public:
  Impl(Recipe recipe, std::vector<std::vector<TensorSpec>> groups, Allocator allocator)
      : recipe_(std::move(recipe)), allocator_(std::move(allocator)) {
    if (!allocator_) {
      allocator_ = [this](std::string_view, std::int64_t, std::int64_t numel) { return memory_.allocate(numel); };
    }
    std::size_t tensors = 0;
    for (std::vector<TensorSpec>& group : groups) {
      tensors += group.size();
      add_group(std::move(group));
    }
    if (tensors == 0) throw InvalidArgument("optimizer got an empty parameter list");
  }

  void add_group(std::vector<TensorSpec> tensors);
  void attach(Communicator& communicator, std::span<const Tensor> tensors, const Fingerprint& settings, bool broadcast,
              std::string_view error, int threads);
  StepKind step(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                int threads, std::string_view error, double max_norm);
  void write_mean(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                  int threads);
  StepKind next_step(std::span<const GroupOptions> options);
  void sync(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
            int threads, std::string_view error);
  void adopt(std::span<const Tensor> tensors, std::span<const GroupOptions> options,
             std::span<const std::int64_t> indices, bool everything);
  void write_parameters(std::span<const Tensor> tensors, std::span<const GroupOptions> options) const;
  void settle();
  void set_counters(Counters counters);
  float* vector(std::string_view name, std::int64_t group);
  std::vector<std::byte> save();
  void load(std::span<const std::byte> bytes);

  const Counters& counters() const { return counters_; }
  const Stats& stats() {
    stats_.bytes_sent = wire_.bytes_sent;
    stats_.bytes_received = wire_.bytes_received;
    return stats_;
  }
  const Recipe& recipe() const { return recipe_; }
  bool attached() const { return attached_to_ != nullptr; }

 private:
  // What is known of a round before it is encoded.
  struct Round {
    Communicator& communicator;
    std::span<const Tensor> tensors;
    std::span<const GroupOptions> options;
    int threads;
    std::string_view error;
    std::uint16_t kind;
    double max_norm = kNoClipping;
    float clip = 1;  // what this rank's gradient is multiplied by
  };

  void check_layout(std::span<const Tensor> tensors, std::span<const GroupOptions> options) const;
  void check_attached(const Communicator& communicator) const;
  void check_call(const Communicator& communicator, std::span<const Tensor> tensors,
                  std::span<const GroupOptions> options) const;

  /// This rank's own error: the caller's, or what is wrong with the arguments; empty if nothing is.
  std::string error_of_call(const Communicator& communicator, std::span<const Tensor> tensors,
                            std::span<const GroupOptions> options, std::string_view error) const;

  void start_next(std::span<const GroupOptions> options);
  /// Calls body; a failed collective's error names the step.
  template <typename Body>
  bool in_step(Body body) {
    try {
      return body();
    } catch (const CommunicationError& failed) {
      throw CommunicationError("step " + std::to_string(next_.step) + ": " + failed.what());
    }
  }
  /// Sets `next_` to the counters after a step of these options, without those of an exchange; says what is due.
  StepKind plan(std::span<const GroupOptions> options);
  StepScalars scalars(const Slab& slab, const SlabCounters& counters, const GroupOptions& options,
                      bool stepping) const;
  /// For Preconditioner::parameter, of a tensor as it is now.
  StepScalars tensor_scalars(std::size_t group, std::size_t tensor, const GroupOptions& options) const;
  /// The gradient of a tensor as the step sees it: with its sign, unscaled, clipped. Zeros if `zero`.
  const float* gradient(const Round& round, std::size_t group, std::size_t tensor, std::int64_t begin, std::int64_t n,
                        bool zero, float* scratch) const;
  /// Calls body(index, run, slab index of its first element) for the runs of tensors that are not frozen, on all threads.
  template <typename Body>
  void for_runs(std::size_t group, int threads, Body body);
  /// The same with the pieces of the layout.
  template <typename Body>
  void for_pieces(std::size_t group, int threads, Body body);
  /// min(1, max_norm / (norm + 1e-6)) from partial sums of squares, as torch.nn.utils.clip_grad_norm_; 1 if not finite.
  static float clip_factor(double max_norm, double squares);
  void clip_locally(Round& round);
  void read_wanted(std::span<const Tensor> tensors);
  void freeze_wanted();  // in next_
  void mark_frozen(const Counters& counters);
  bool any_born() const {
    return std::any_of(slabs_.begin(), slabs_.end(), [](const Slab& slab) {
      return std::any_of(slab.born.begin(), slab.born.end(), [](std::int64_t n) { return n > 0; });
    });
  }
  Tile tile(const Slab& slab, std::int64_t begin, std::int64_t n) const;

  // Each does the step that `next_` describes. False: no rank had a finite gradient, and nothing has changed.
  bool local_step(const Round& round);
  bool refresh_round(const Round& round);
  bool sync_round(const Round& round);

  bool gradient_finite(const Round& round, std::size_t group);
  StepScalars refresh_scalars(const Round& round, std::size_t group) const;
  /// The local step of one group, by a zero gradient if `zero`. False: the gradient is not finite.
  bool step_group(const Round& round, std::size_t group, bool zero);
  bool run_round(const Round& round, Exchange& exchange, bool finite, bool keeps = false);
  bool inspect_headers(const Round& round, const Header& own, std::span<const Header> headers);
  void broadcast_anchors(Communicator& communicator);
  void count_born(int threads);
  /// On one rank an exact exchange needs no wire.
  bool dense_through_wire() const { return ranks_ > 1 || !recipe_.refresh_code->exact(); }
  void finish_step(StepKind kind, double seconds);

  std::int64_t total_numel() const {
    std::int64_t numel = 0;
    for (const Slab& slab : slabs_) numel += slab.numel;
    return numel;
  }
  std::vector<std::pair<std::string_view, std::span<float>>> named_vectors(const Slab& slab) const;
  Fingerprint layout_fingerprint() const;

  Recipe recipe_;
  Allocator allocator_;
  StateMemory memory_;  // unless the caller has an allocator
  std::vector<Slab> slabs_;
  std::size_t tensors_ = 0;
  Counters counters_;
  Counters next_;            // of the step under way
  bool hold_born_ = false;   // the refresh under way serves births alone
  bool keeps_ = false;       // of the round under way: a rank keeps gradients of coordinates without support
  std::vector<double> squares_;  // partial sums for a norm
  std::vector<double> lr_;   // per group, of the step under way
  std::uint64_t adopted_ = 0;  // hash of what was adopted since the last round
  Stats stats_;
  ThreadPool pool_;

  const Communicator* attached_to_ = nullptr;  // compared, never called
  int rank_ = 0;
  int ranks_ = 1;
  Wire wire_;
  std::optional<Exchange> dense_;
  std::optional<Exchange> compressed_;
  std::optional<Exchange> mean_;  // of u, by call
  const CodePtr mean_code_ = identity_code();
};

template <typename Body>
void Engine::Impl::for_runs(std::size_t group, int threads, Body body) {
  const Slab& slab = slabs_[group];
  pool_.parallel_for(static_cast<std::int64_t>(slab.runs.size()), threads, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const Run& run = slab.runs[i];
      if (slab.frozen[run.tensor] == 0) body(i, run, slab.tensor_begin[run.tensor] + run.begin);
    }
  });
}

template <typename Body>
void Engine::Impl::for_pieces(std::size_t group, int threads, Body body) {
  const SlabLayout& layout = *slabs_[group].layout;
  pool_.parallel_for(static_cast<std::int64_t>(layout.pieces.size()), threads,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
                         body(i, layout.pieces[i]);
                       }
                     });
}

}  // namespace zeroone
