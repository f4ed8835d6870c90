// Schedules: at which steps something is exchanged. A schedule never touches a vector.
//
// A schedule is an immutable policy; where it stands is a ScheduleState that the engine owns and saves. Steps count
// from 1, once per optimizer step. All ranks see the same steps and learning rates, so all decide alike.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroone {

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// The position in a schedule.
struct ScheduleState {
  std::int64_t next = 1;        // the step from which the next event is due
  std::int64_t index = 0;       // how many events there were
  std::vector<double> peak_lr;  // per group, the largest learning rate seen
  std::vector<double> last_lr;  // per group, the learning rate at the last event

  friend bool operator==(const ScheduleState&, const ScheduleState&) = default;
};

class Schedule {
 public:
  virtual ~Schedule() = default;

  /// Parsable text, e.g. "Doubling(kappa=16, until=None)"; part of the ranks' agreement.
  virtual std::string describe() const = 0;

  /// Whether a point of the schedule has been reached. It stays so until `advance` is called.
  virtual bool reached(const ScheduleState& state, std::int64_t step) const { return step >= state.next; }

  /// The last step at which a point is an event. The points after it serve the births of late coordinates alone.
  virtual std::int64_t until() const { return kNever; }

  /// Whether an event is due at `step`.
  bool due(const ScheduleState& state, std::int64_t step) const { return step <= until() && reached(state, step); }

  /// The event took place, or the point was passed, at `step` under the groups' learning rates `lr`: fixes the next one.
  void advance(ScheduleState& state, std::int64_t step, std::span<const double> lr) const;

  /// Called once per step, before `due`.
  static void observe(ScheduleState& state, std::span<const double> lr);

 protected:
  /// The step of the point after the one at `step`, whose index is state.index; > step, or kNever.
  virtual std::int64_t next_after(const ScheduleState& state, std::int64_t step, std::span<const double> lr) const = 0;
};

using SchedulePtr = std::shared_ptr<const Schedule>;

/// At steps 1, 2, 3, ..., `until` (inclusive; kNever: no end); points after `until` as sparse as those of doubling(16)
/// at that step. Throws InvalidArgument if until < 1.
SchedulePtr every_step(std::int64_t until = kNever);

/// At step 1 and then `interval` steps after the event before. Throws InvalidArgument if interval < 1.
SchedulePtr interval(std::int64_t interval);

/// Gaps of 2^floor(j / kappa) after event j = 0, 1, ...; no event after step `until`. 2202.06009, section 5.
SchedulePtr doubling(std::int64_t kappa = 16, std::int64_t until = kNever);

/// Gap min(max_interval, 2^floor(log2(peak lr / lr))) of the group with the largest lr / peak, and 1 when a learning
/// rate has risen since the event before. A constant learning rate stays at 1.
SchedulePtr learning_rate_tied(std::int64_t max_interval = 16);

/// At these steps, which must be positive and increasing, and never after the last. (The first step of all is a refresh
/// whatever the variance schedule says.)
SchedulePtr steps(std::vector<std::int64_t> steps);

}  // namespace zeroone
