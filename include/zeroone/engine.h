// Engine: the only step loop. It carries out a recipe on memory that the caller owns.
//
// A step either takes place as a whole or, if it throws, leaves no trace: encoding writes wire memory only, and
// parameters, state and counters change after the last collective has succeeded.
//
// Not thread-safe: one call at a time. The communicator is passed per call and never kept; it must be the same one
// (same wire memory) from `attach` on.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zeroone/communicator.h"
#include "zeroone/recipe.h"
#include "zeroone/types.h"

namespace zeroone {

/// Provides the memory of a state vector: `numel` zeroed floats that outlive the engine. `group` is the slab.
using Allocator = std::function<float*(std::string_view name, std::int64_t group, std::int64_t numel)>;

/// What ranks must have in common: (what, value), e.g. ("group 0 lr", "0.001").
using Fingerprint = std::vector<std::pair<std::string, std::string>>;

/// A collective. Compares `fingerprint` among the ranks; `error` (empty: none) is this rank's own failure, told to the others.
/// Throws DisagreementError on every rank if any rank differs or has an error, naming the first difference.
void agree(Communicator& communicator, const Fingerprint& fingerprint, std::string_view error = {});

/// Scalars of one slab (parameter group). All equal on all ranks.
struct SlabCounters {
  std::int64_t step = 0;      // steps taken since the group exists; bias correction of m
  std::int64_t refreshes = 0;  // k; bias correction of v
  std::int64_t pending = 0;   // local steps since the anchor
  double sum = 0;             // S, of the pending steps
  double previous_sum = 0;    // S of the last compressed round; 0: there was none
  double decay = 1;           // P, of the pending steps
  std::vector<std::int64_t> frozen;  // tensors that take no part in the interval

  friend bool operator==(const SlabCounters&, const SlabCounters&) = default;
};

/// All scalars of the state.
struct Counters {
  std::int64_t step = 0;
  std::int64_t last_sync = 0;
  ScheduleState refresh;
  ScheduleState sync;
  bool births_due = false;  // at the last sync some rank kept gradients of unborn coordinates
  std::vector<SlabCounters> slabs;

  friend bool operator==(const Counters&, const Counters&) = default;
};

/// What happened so far. Not part of the state: starts at zero in every process.
struct Stats {
  std::int64_t parameters = 0;
  std::int64_t steps = 0;               // skipped ones not included
  std::int64_t rounds = 0;              // exchanges: refreshes + syncs
  std::int64_t refreshes = 0;
  std::int64_t syncs = 0;
  std::int64_t alike_refreshes = 0;     // in which all ranks sent the same, not zero
  std::int64_t skipped_steps = 0;       // no rank had a finite gradient: nothing was changed
  std::int64_t nonfinite_gradients = 0;  // steps in which this rank's gradient counted as zero
  std::int64_t bytes_sent = 0;          // handed to the network by this rank in rounds, headers and padding included
  std::int64_t bytes_received = 0;
  std::int64_t dense_bytes = 0;         // what averaging the gradients in fp32 would have sent: 8 n (W - 1) / W per step
  std::int64_t mean_bytes_sent = 0;     // by write_mean
  std::int64_t setup_bytes_sent = 0;    // parameters broadcast by `attach`
  double local_seconds = 0;             // local steps
  double encode_seconds = 0;
  double exchange_seconds = 0;          // in collectives, the server step included
  double commit_seconds = 0;
  // Of all these, those of refreshes and of syncs, each but the first, which also connects and touches new memory.
  double refresh_seconds = 0;
  double sync_seconds = 0;

  /// Bits of message per parameter and step, in which a dense fp32 exchange has 32 and a one-bit round about 1:
  /// 32 bytes_sent / dense_bytes. 0 on one rank.
  double bits_per_parameter_step() const;
};

/// No clipping.
inline constexpr double kNoClipping = std::numeric_limits<double>::infinity();

/// What a step did.
enum class StepKind : std::uint8_t { kLocal = 0, kRefresh = 1, kSync = 2, kSkipped = 3 };

class Engine {
 public:
  /// `groups[g]` lists the tensors of parameter group g; groups and their tensors may be empty of elements, but
  /// there must be one tensor. State is allocated here: five vectors of the group's size (anchor, exp_avg,
  /// exp_avg_sq, accumulated, worker_error) and two of a chunk's (server_error). Throws InvalidArgument.
  Engine(Recipe recipe, std::vector<std::vector<TensorSpec>> groups, Allocator allocator = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Adds a parameter group, before or after `attach`, which must be called (again) before the next step.
  void add_group(std::vector<TensorSpec> tensors);

  /// Prepares exchanges among the communicator's ranks; a collective, needed once before the first step. Checks that
  /// ranks agree on the recipe, the layout and `settings`, then takes `tensors` (of rank 0, if `broadcast`) as the
  /// anchor of groups that are new, and writes them to every rank's parameters. `tensors` are all groups' in order.
  /// `error`: see `agree`.
  void attach(Communicator& communicator, std::span<const Tensor> tensors, const Fingerprint& settings = {},
              bool broadcast = true, std::string_view error = {}, int threads = 1);
  bool attached() const;

  /// One optimizer step. `tensors` are all groups' parameters in order. `error`, if not empty, is a failure of this
  /// rank's caller: at a step with an exchange it reaches all ranks, which throw. The gradient over all groups is
  /// clipped to l2 norm `max_norm`: at a refresh the mean over the ranks, otherwise this rank's own.
  StepKind step(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                int threads = 1, std::string_view error = {}, double max_norm = kNoClipping);

  /// What the next `step` will do if some rank's gradient is finite.
  StepKind next_step(std::span<const GroupOptions> options) const;

  /// Makes all replicas equal now; sends nothing if no local step is pending. A collective. `error`: see `step`.
  void sync(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
            int threads = 1, std::string_view error = {});

  /// Writes to the parameters what they would be if all ranks' pending steps were averaged exactly: equal on all
  /// ranks. The state does not change; `write_parameters` goes back. A collective: one dense fp32 exchange, none if no
  /// local step is pending.
  void write_mean(Communicator& communicator, std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                  int threads = 1);

  /// The caller has written new values to the parameters `indices`: the anchor takes them, and pending local steps
  /// of these parameters are dropped. Where the values are those the engine wrote, nothing changes. The next round
  /// verifies that all ranks adopted the same.
  void adopt(std::span<const Tensor> tensors, std::span<const GroupOptions> options,
             std::span<const std::int64_t> indices);

  /// Adopts all parameters, and has the next round verify that all of them are equal on all ranks. Takes back what was
  /// adopted before: the way out after ranks adopted different values.
  void adopt_all(std::span<const Tensor> tensors, std::span<const GroupOptions> options);

  /// Writes the parameters anew from the state (after the state was loaded).
  void write_parameters(std::span<const Tensor> tensors, std::span<const GroupOptions> options) const;

  /// Makes the vector "accumulated" complete: between calls it may lack the last local step's term. `save` and
  /// `vector("accumulated", ...)` do this by themselves.
  void settle();

  const Counters& counters() const;
  /// Replaces the scalars; throws InvalidArgument if they are of another layout. The caller has filled the vectors, and
  /// if that is before `attach`, the anchor too: `attach` then leaves it, and the parameters, as they are.
  void set_counters(Counters counters);

  const Stats& stats() const;
  const Recipe& recipe() const;

  /// The vectors of slab `group`; `name` as given to the allocator. Null if there is no such vector.
  float* vector(std::string_view name, std::int64_t group) const;

  /// All of this rank's state (vectors, counters, layout) as bytes; `load` checks everything before it changes
  /// anything, and throws InvalidArgument.
  std::vector<std::byte> save() const;
  void load(std::span<const std::byte> bytes);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroone
