// The Python module: addresses and sizes in, counters out. It knows no PyTorch header, so that one build serves every
// release. A communicator is a Python object; its call backs take the GIL, which `step` and its like release.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "engine/hash.h"
#include "zeroone/version.h"
#include "zeroone/zeroone.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zeroone {
namespace {

// Operations of a Python object: allocate(bytes) -> (id, address), release(id), and collectives that name buffers,
// offsets and lengths. It must not refer back to this communicator: the garbage collector can't see through it.
class PythonCommunicator : public Communicator {
 public:
  PythonCommunicator(int rank, int size, nb::object operations)
      : rank_(rank), size_(size), operations_(std::move(operations)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Buffer allocate(std::size_t bytes) override {
    const nb::gil_scoped_acquire gil;
    const auto [id, address] =
        nb::cast<std::pair<std::int64_t, std::uintptr_t>>(operations_.attr("allocate")(bytes));
    return {id, reinterpret_cast<std::byte*>(address), bytes};
  }
  void release(const Buffer& buffer) override {
    const nb::gil_scoped_acquire gil;
    operations_.attr("release")(buffer.id);
  }
  Work all_to_all(const Region& send, const Region& receive, Stream) override {
    return call("all_to_all", send, receive);
  }
  Work all_gather(const Region& send, const Region& receive, Stream) override {
    return call("all_gather", send, receive);
  }
  Work broadcast(const Region& region, int root, Stream) override {
    const nb::gil_scoped_acquire gil;
    operations_.attr("broadcast")(region.buffer.id, region.offset, region.bytes, root);
    return {};
  }

 private:
  Work call(const char* operation, const Region& send, const Region& receive) {
    const nb::gil_scoped_acquire gil;
    operations_.attr(operation)(send.buffer.id, send.offset, send.bytes, receive.buffer.id, receive.offset,
                                receive.bytes);
    return {};
  }

  int rank_;
  int size_;
  nb::object operations_;
};

// (address, gradient's address or 0, type, gradient's type, gradient's factor, frozen)
using TensorTuple = std::tuple<std::uintptr_t, std::uintptr_t, int, int, float, bool>;
// (lr, beta1, beta2, eps, weight_decay, maximize)
using OptionsTuple = std::tuple<double, double, double, double, double, bool>;

// The engine with the arguments of a call in C++ form, whose memory is used again.
class PythonEngine {
 public:
  PythonEngine(Recipe recipe, const std::vector<std::vector<std::pair<std::string, std::int64_t>>>& groups,
               std::function<std::uintptr_t(std::string_view, std::int64_t, std::int64_t)> allocate)
      : engine_(std::move(recipe), specs(groups),
                [allocate = std::move(allocate)](std::string_view name, std::int64_t group, std::int64_t numel) {
                  return reinterpret_cast<float*>(allocate(name, group, numel));
                }) {}

  void add_group(const std::vector<std::pair<std::string, std::int64_t>>& group) {
    engine_.add_group(std::move(specs({group})[0]));
  }

  void attach(Communicator& communicator, nb::handle tensors, const Fingerprint& settings, bool broadcast,
              int threads) {
    read(tensors, {});
    engine_.attach(communicator, tensors_, settings, broadcast, {}, threads);
  }
  void step(Communicator& communicator, nb::handle tensors, nb::handle options, int threads, double max_norm,
            const std::string& error) {
    read(tensors, options);
    const nb::gil_scoped_release release;
    engine_.step(communicator, tensors_, options_, threads, error, max_norm);
  }
  void write_mean(Communicator& communicator, nb::handle tensors, nb::handle options, int threads) {
    read(tensors, options);
    const nb::gil_scoped_release release;
    engine_.write_mean(communicator, tensors_, options_, threads);
  }
  int next_step(nb::handle options) {
    read({}, options);
    return static_cast<int>(engine_.next_step(options_));
  }
  void sync(Communicator& communicator, nb::handle tensors, nb::handle options, int threads,
            const std::string& error) {
    read(tensors, options);
    const nb::gil_scoped_release release;
    engine_.sync(communicator, tensors_, options_, threads, error);
  }
  void adopt(nb::handle tensors, nb::handle options, const std::vector<std::int64_t>& indices) {
    read(tensors, options);
    engine_.adopt(tensors_, options_, indices);
  }
  void adopt_all(nb::handle tensors, nb::handle options) {
    read(tensors, options);
    engine_.adopt_all(tensors_, options_);
  }
  void write_parameters(nb::handle tensors, nb::handle options) {
    read(tensors, options);
    engine_.write_parameters(tensors_, options_);
  }

  void settle() { engine_.settle(); }

  nb::dict counters() const {
    const Counters& c = engine_.counters();
    nb::list slabs;
    for (const SlabCounters& s : c.slabs) {
      nb::dict slab;
      slab["step"] = s.step;
      slab["refreshes"] = s.refreshes;
      slab["pending"] = s.pending;
      slab["sum"] = s.sum;
      slab["previous_sum"] = s.previous_sum;
      slab["decay"] = s.decay;
      slab["frozen"] = s.frozen;
      slabs.append(slab);
    }
    nb::dict result;
    result["step"] = c.step;
    result["last_sync"] = c.last_sync;
    result["refresh"] = schedule(c.refresh);
    result["sync"] = schedule(c.sync);
    result["births_due"] = c.births_due;
    result["slabs"] = slabs;
    return result;
  }

  void set_counters(const nb::dict& d) {
    Counters c;
    c.step = nb::cast<std::int64_t>(d["step"]);
    c.last_sync = nb::cast<std::int64_t>(d["last_sync"]);
    c.refresh = schedule(nb::cast<nb::dict>(d["refresh"]));
    c.sync = schedule(nb::cast<nb::dict>(d["sync"]));
    c.births_due = nb::cast<bool>(d["births_due"]);
    for (nb::handle item : nb::cast<nb::list>(d["slabs"])) {
      const auto slab = nb::cast<nb::dict>(item);
      c.slabs.push_back({nb::cast<std::int64_t>(slab["step"]), nb::cast<std::int64_t>(slab["refreshes"]),
                         nb::cast<std::int64_t>(slab["pending"]), nb::cast<double>(slab["sum"]),
                         nb::cast<double>(slab["previous_sum"]), nb::cast<double>(slab["decay"]),
                         nb::cast<std::vector<std::int64_t>>(slab["frozen"])});
    }
    engine_.set_counters(std::move(c));
  }

  nb::dict stats() const {
    const Stats& s = engine_.stats();
    nb::dict d;
    d["parameters"] = s.parameters;
    d["steps"] = s.steps;
    d["rounds"] = s.rounds;
    d["refreshes"] = s.refreshes;
    d["syncs"] = s.syncs;
    d["alike_refreshes"] = s.alike_refreshes;
    d["skipped_steps"] = s.skipped_steps;
    d["nonfinite_gradients"] = s.nonfinite_gradients;
    d["bytes_sent"] = s.bytes_sent;
    d["bytes_received"] = s.bytes_received;
    d["dense_bytes"] = s.dense_bytes;
    d["mean_bytes_sent"] = s.mean_bytes_sent;
    d["setup_bytes_sent"] = s.setup_bytes_sent;
    d["bits_per_parameter_step"] = s.bits_per_parameter_step();
    d["local_seconds"] = s.local_seconds;
    d["encode_seconds"] = s.encode_seconds;
    d["exchange_seconds"] = s.exchange_seconds;
    d["commit_seconds"] = s.commit_seconds;
    d["refresh_seconds"] = s.refresh_seconds;
    d["sync_seconds"] = s.sync_seconds;
    return d;
  }

 private:
  static std::vector<std::vector<TensorSpec>> specs(
      const std::vector<std::vector<std::pair<std::string, std::int64_t>>>& groups) {
    std::vector<std::vector<TensorSpec>> result;
    for (const auto& group : groups) {
      result.emplace_back();
      for (const auto& [name, numel] : group) result.back().push_back({name, numel});
    }
    return result;
  }

  static nb::dict schedule(const ScheduleState& state) {
    nb::dict d;
    d["next"] = state.next;
    d["index"] = state.index;
    d["peak_lr"] = state.peak_lr;
    d["last_lr"] = state.last_lr;
    return d;
  }
  static ScheduleState schedule(const nb::dict& d) {
    return {nb::cast<std::int64_t>(d["next"]), nb::cast<std::int64_t>(d["index"]),
            nb::cast<std::vector<double>>(d["peak_lr"]), nb::cast<std::vector<double>>(d["last_lr"])};
  }

  void read(nb::handle tensors, nb::handle options) {
    if (tensors.is_valid()) {
      tensors_.clear();
      for (nb::handle item : tensors) {
        const auto [data, gradient, dtype, gradient_dtype, factor, frozen] = nb::cast<TensorTuple>(item);
        tensors_.push_back({reinterpret_cast<void*>(data), reinterpret_cast<const void*>(gradient),
                            static_cast<DType>(dtype), static_cast<DType>(gradient_dtype), factor, frozen});
      }
    }
    if (options.is_valid()) {
      options_.clear();
      for (nb::handle item : options) {
        const auto [lr, beta1, beta2, eps, weight_decay, maximize] = nb::cast<OptionsTuple>(item);
        options_.push_back({lr, beta1, beta2, eps, weight_decay, maximize});
      }
    }
  }

  Engine engine_;
  std::vector<Tensor> tensors_;
  std::vector<GroupOptions> options_;
};

}  // namespace
}  // namespace zeroone

NB_MODULE(_core, m) {
  using namespace zeroone;

  m.attr("__version__") = kVersion;

  nb::exception<Error> error(m, "Error", PyExc_RuntimeError);
  nb::exception<DisagreementError>(m, "DisagreementError", error.ptr());
  nb::exception<CommunicationError>(m, "CommunicationError", error.ptr());
  nb::exception<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError);

  nb::class_<Communicator>(m, "Communicator").def_prop_ro("rank", &Communicator::rank).def_prop_ro(
      "size", &Communicator::size);
  nb::class_<PythonCommunicator, Communicator>(m, "PythonCommunicator")
      .def(nb::init<int, int, nb::object>(), "rank"_a, "size"_a, "operations"_a);
  nb::class_<LocalCommunicator, Communicator>(m, "LocalCommunicator").def(nb::init<>());
  m.def("agree", &agree, "communicator"_a, "fingerprint"_a, "error"_a = "");

  nb::class_<Schedule>(m, "Schedule").def("describe", &Schedule::describe);
  m.def(
      "every_step", [](std::optional<std::int64_t> until) { return every_step(until.value_or(kNever)); },
      "until"_a = nb::none());
  m.def("interval", &interval, "interval"_a);
  m.def(
      "doubling",
      [](std::int64_t kappa, std::optional<std::int64_t> until) { return doubling(kappa, until.value_or(kNever)); },
      "kappa"_a, "until"_a = nb::none());
  m.def("learning_rate_tied", &learning_rate_tied, "max_interval"_a);
  m.def("steps", &steps, "steps"_a);

  nb::enum_<Scale>(m, "Scale").value("L1", Scale::kL1).value("L2", Scale::kL2);

  nb::class_<Recipe>(m, "Recipe").def_ro("name", &Recipe::name);
  nb::class_<Code>(m, "Code").def("describe", &Code::describe);
  m.def("identity_code", &identity_code);
  m.def("bf16_code", [] { return half_code(DType::kBFloat16); });
  m.def("fp16_code", [] { return half_code(DType::kFloat16); });
  m.def("zero_one_adam", &zero_one_adam, "variance_schedule"_a, "sync_schedule"_a, "scale"_a, "bias_correction"_a,
        "dense"_a);
  m.def("one_bit_adam", &one_bit_adam, "warmup_steps"_a, "scale"_a, "bias_correction"_a, "dense"_a);
  m.def("adamw", &adamw, "bias_correction"_a, "dense"_a);
  m.def("algorithms", [] {
    std::vector<std::tuple<std::string, std::string, std::string, std::string, std::string, std::string>> rows;
    for (const Algorithm& a : algorithms()) {
      rows.emplace_back(a.name, a.paper, a.schedule, a.preconditioner, a.code, a.collective);
    }
    return rows;
  });

  nb::class_<PythonEngine>(m, "Engine")
      .def(nb::init<Recipe, const std::vector<std::vector<std::pair<std::string, std::int64_t>>>&,
                    std::function<std::uintptr_t(std::string_view, std::int64_t, std::int64_t)>>(),
           "recipe"_a, "groups"_a, "allocate"_a)
      .def("add_group", &PythonEngine::add_group, "tensors"_a)
      .def("attach", &PythonEngine::attach, "communicator"_a, "tensors"_a, "settings"_a, "broadcast"_a, "threads"_a)
      .def("step", &PythonEngine::step, "communicator"_a, "tensors"_a, "options"_a, "threads"_a, "max_norm"_a,
           "error"_a = "")
      .def("write_mean", &PythonEngine::write_mean, "communicator"_a, "tensors"_a, "options"_a, "threads"_a)
      .def("next_step", &PythonEngine::next_step, "options"_a)
      .def("sync", &PythonEngine::sync, "communicator"_a, "tensors"_a, "options"_a, "threads"_a, "error"_a = "")
      .def("adopt", &PythonEngine::adopt, "tensors"_a, "options"_a, "indices"_a)
      .def("adopt_all", &PythonEngine::adopt_all, "tensors"_a, "options"_a)
      .def("write_parameters", &PythonEngine::write_parameters, "tensors"_a, "options"_a)
      .def("settle", &PythonEngine::settle)
      .def_prop_ro("stats", &PythonEngine::stats)
      .def_prop_rw("counters", &PythonEngine::counters, &PythonEngine::set_counters);

  nb::class_<OneBitAllReduce>(m, "OneBitAllReduce")
      .def(
          "__init__",
          [](OneBitAllReduce* self, Communicator& communicator, std::int64_t numel, Scale scale,
             const std::function<std::uintptr_t(std::string_view, std::int64_t, std::int64_t)>& allocate) {
            new (self) OneBitAllReduce(communicator, numel, scale,
                                       [&](std::string_view name, std::int64_t group, std::int64_t n) {
                                         return reinterpret_cast<float*>(allocate(name, group, n));
                                       });
          },
          "communicator"_a, "numel"_a, "scale"_a, "allocate"_a)
      .def(
          "reduce",
          [](OneBitAllReduce& self, Communicator& communicator, std::uintptr_t values, int threads) {
            const nb::gil_scoped_release release;
            self.reduce(communicator, reinterpret_cast<float*>(values), threads);
          },
          "communicator"_a, "values"_a, "threads"_a)
      .def_prop_ro("bytes_sent", &OneBitAllReduce::bytes_sent);

  m.def(
      "prefer_huge_pages",
      [](std::uintptr_t address, std::size_t bytes) { prefer_huge_pages(reinterpret_cast<void*>(address), bytes); },
      "address"_a, "bytes"_a);
  m.def("skew_of", &skew_of, "index"_a);
  m.def(
      "hash_bytes",
      [](std::uintptr_t address, std::size_t bytes) { return hash_bytes(reinterpret_cast<const void*>(address), bytes); },
      "address"_a, "bytes"_a);

  m.def("available_instruction_sets", &available_instruction_sets);
  m.def("instruction_set", &instruction_set);
}
