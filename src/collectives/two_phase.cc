// The one scheme of all exchanges: chunk j of everyone goes to rank j, which combines it and gives it back to everyone.
#include "zeroone/collective.h"

namespace zeroone {
namespace {

class TwoPhase final : public Collective {
 public:
  std::string_view name() const override { return "two-phase all-reduce"; }

  bool run(Communicator& communicator, Wire& wire, Payload& payload) const override {
    const std::size_t message = payload.message_bytes();
    const auto ranks = static_cast<std::size_t>(communicator.size());
    if (ranks == 1) {  // nothing is sent
      if (!payload.inspect(wire.send.data)) return false;
      payload.combine(wire.send.data, wire.receive.data);
      return true;
    }
    const Region to_all{wire.send, 0, ranks * message};
    const Region from_all{wire.receive, 0, ranks * message};
    const Region contribution{wire.receive, ranks * message, message};

    communicator.all_to_all(to_all, from_all).wait();
    count(wire, ranks, message);
    if (!payload.inspect(from_all.data())) return false;
    payload.combine(from_all.data(), contribution.data());
    communicator.all_gather(contribution, from_all).wait();
    count(wire, ranks, message);
    payload.inspect_result(from_all.data());
    return true;
  }

 private:
  static void count(Wire& wire, std::size_t ranks, std::size_t message) {
    wire.bytes_sent += static_cast<std::int64_t>((ranks - 1) * message);
    wire.bytes_received += static_cast<std::int64_t>((ranks - 1) * message);
  }
};

}  // namespace

CollectivePtr two_phase_collective() {
  static const CollectivePtr collective = std::make_shared<TwoPhase>();
  return collective;
}

}  // namespace zeroone
