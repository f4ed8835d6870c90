// Gaps that double: 2202.06009, section 5 (kappa there counts the refreshes between doublings).
#include <algorithm>
#include <string>

#include "schedules/until.h"
#include "zeroone/error.h"
#include "zeroone/schedule.h"

namespace zeroone {
namespace {

class Doubling final : public Schedule {
 public:
  Doubling(std::int64_t kappa, std::int64_t until) : kappa_(kappa), until_(until) {
    if (kappa < 1) throw InvalidArgument("Invalid kappa: " + std::to_string(kappa) + " (must be at least 1)");
    if (until < 1) throw InvalidArgument("Invalid until: " + std::to_string(until) + " (must be at least 1)");
  }

  std::string describe() const override {
    return "Doubling(kappa=" + std::to_string(kappa_) + ", until=" + describe_until(until_) + ")";
  }

  std::int64_t until() const override { return until_; }

 protected:
  std::int64_t next_after(const ScheduleState& state, std::int64_t step, std::span<const double>) const override {
    constexpr std::int64_t kMaxDoublings = 40;  // a gap no run outlives, and no overflow
    return step + (std::int64_t{1} << std::min(state.index / kappa_, kMaxDoublings));
  }

 private:
  std::int64_t kappa_;
  std::int64_t until_;
};

}  // namespace

SchedulePtr doubling(std::int64_t kappa, std::int64_t until) { return std::make_shared<Doubling>(kappa, until); }

}  // namespace zeroone
