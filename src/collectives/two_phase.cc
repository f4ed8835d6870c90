// The one scheme of all exchanges: chunk j of everyone goes to rank j, which combines it and gives it back to everyone.
#include "zeroone/collective.h"

namespace zeroone {
namespace {

class TwoPhase final : public Collective {
 public:
  std::string_view name() const override { return "two-phase all-reduce"; }

  bool run(Communicator& communicator, Wire& wire, Payload& payload) const override {
    const std::size_t header = payload.header_bytes();
    const std::size_t body = payload.body_bytes();
    const auto ranks = static_cast<std::size_t>(communicator.size());
    if (ranks == 1) {  // nothing is sent
      if (!payload.inspect(wire.headers.data)) return false;
      payload.combine(wire.send.data, wire.receive.data);
      return true;
    }
    const Region headers{wire.headers, 0, ranks * header};
    const Region all_headers{wire.headers, ranks * header, ranks * header};
    communicator.all_to_all(headers, all_headers).wait();
    count(wire, (ranks - 1) * header);
    if (!payload.inspect(all_headers.data())) return false;

    const Region bodies{wire.receive, 0, ranks * body};
    communicator.all_to_all({wire.send, 0, ranks * body}, bodies).wait();
    count(wire, (ranks - 1) * body);

    const Region result{wire.receive, 0, ranks * (header + body)};
    const Region contribution{wire.receive, result.bytes, header + body};
    payload.combine(bodies.data(), contribution.data());
    communicator.all_gather(contribution, result).wait();
    count(wire, (ranks - 1) * (header + body));
    payload.inspect_result(result.data());
    return true;
  }

 private:
  static void count(Wire& wire, std::size_t bytes) {
    wire.bytes_sent += static_cast<std::int64_t>(bytes);
    wire.bytes_received += static_cast<std::int64_t>(bytes);
  }
};

}  // namespace

CollectivePtr two_phase_collective() {
  static const CollectivePtr collective = std::make_shared<TwoPhase>();
  return collective;
}

}  // namespace zeroone
