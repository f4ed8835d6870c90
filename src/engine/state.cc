// What a caller may do to the state between steps: look, save, load, write parameters anew, adopt what others wrote.
#include <cstring>
#include <string>

#include "engine/hash.h"
#include "engine/impl.h"
#include "engine/memory.h"
#include "engine/state_blob.h"

namespace zeroone {

void Engine::Impl::settle() {
  for (Slab& slab : slabs_) {
    if (slab.lag == 0) continue;
    StepScalars s;
    s.lag = slab.lag;
    for (const Run& run : slab.runs) {
      if (slab.frozen[run.tensor] != 0) continue;
      recipe_.preconditioner->settle(s, tile(slab, slab.tensor_begin[run.tensor] + run.begin, run.n));
    }
    slab.lag = 0;
  }
}

void Engine::Impl::write_parameters(std::span<const Tensor> tensors, std::span<const GroupOptions> options) const {
  check_layout(tensors, options);
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    const Slab& slab = slabs_[g];
    for (const Run& run : slab.runs) {
      const StepScalars s = tensor_scalars(g, run.tensor, options[g]);
      alignas(64) float x[kTile];
      recipe_.preconditioner->parameter(s, tile(slab, slab.tensor_begin[run.tensor] + run.begin, run.n), x);
      const Tensor& tensor = tensors[slab.first_tensor + run.tensor];
      write_floats(tensor.data, tensor.dtype, run.begin, run.n, x);
    }
  }
}

void Engine::Impl::adopt(std::span<const Tensor> tensors, std::span<const GroupOptions> options,
                         std::span<const std::int64_t> indices, bool everything) {
  check_layout(tensors, options);
  settle();
  if (everything) adopted_ = 0;
  for (const std::int64_t index : indices) {
    if (index < 0 || static_cast<std::size_t>(index) >= tensors_) {
      throw InvalidArgument("there is no tensor " + std::to_string(index));
    }
    const auto after = std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& slab) {
      return static_cast<std::size_t>(index) < slab.first_tensor + slab.tensors.size();
    });
    const auto g = static_cast<std::size_t>(after - slabs_.begin());
    const Slab& slab = *after;
    const std::size_t i = static_cast<std::size_t>(index) - slab.first_tensor;
    const Tensor& tensor = tensors[static_cast<std::size_t>(index)];
    const StepScalars s = tensor_scalars(g, i, options[g]);
    const std::int64_t slab_begin = slab.tensor_begin[i];
    const std::int64_t numel = slab.tensors[i].numel;

    alignas(64) float written[kTile];
    alignas(64) float now[kTile];
    const auto for_changed = [&](auto body) {  // body(index in the tensor, new value), where it is not what was written
      for (std::int64_t begin = 0; begin < numel; begin += kTile) {
        const std::int64_t n = std::min(kTile, numel - begin);
        recipe_.preconditioner->parameter(s, tile(slab, slab_begin + begin, n), written);
        if (tensor.dtype != DType::kFloat32) {  // round as it was rounded
          std::array<std::uint16_t, kTile> rounded;
          write_floats(rounded.data(), tensor.dtype, 0, n, written);
          read_floats(rounded.data(), tensor.dtype, 0, n, written);
        }
        const float* values = read_floats(tensor.data, tensor.dtype, begin, n, now);
        for (std::int64_t e = 0; e < n; ++e) {
          if (std::memcmp(&values[e], &written[e], sizeof(float)) != 0) body(begin + e, values[e]);
        }
      }
    };

    bool changed = false;
    if (counters_.slabs[g].pending == 0) {
      for_changed([&](std::int64_t e, float value) {
        slab.anchor[slab_begin + e] = value;
        changed = true;
      });
    } else {
      // Inside an interval ranks have written different values: element by element they would decide differently, and
      // anchors must stay equal on all ranks.
      for_changed([&](std::int64_t, float) { changed = true; });
      for (std::int64_t begin = 0; changed && begin < numel; begin += kTile) {
        const std::int64_t n = std::min(kTile, numel - begin);
        const float* values = read_floats(tensor.data, tensor.dtype, begin, n, now);
        for (std::int64_t e = 0; e < n; ++e) slab.anchor[slab_begin + begin + e] = values[e] / s.decay;
        std::fill_n(slab.accumulated + slab_begin + begin, n, 0.0f);
      }
    }
    if (!changed && !everything) continue;
    adopted_ = hash_bytes(&index, sizeof index, adopted_);
    adopted_ = hash_bytes(slab.anchor + slab_begin, static_cast<std::size_t>(numel) * sizeof(float), adopted_);
  }
}

void Engine::Impl::set_counters(Counters counters) {
  if (counters.slabs.size() != slabs_.size()) {
    throw InvalidArgument("counters of " + std::to_string(counters.slabs.size()) + " parameter groups, the layout has " +
                          std::to_string(slabs_.size()));
  }
  for (std::size_t g = 0; g < slabs_.size(); ++g) {
    for (const std::int64_t i : counters.slabs[g].frozen) {
      if (i >= 0 && static_cast<std::size_t>(i) < slabs_[g].tensors.size()) continue;
      throw InvalidArgument("counters with a frozen tensor " + std::to_string(i) + ", parameter group " +
                            std::to_string(g) + " has " + std::to_string(slabs_[g].tensors.size()));
    }
  }
  counters_ = std::move(counters);
  adopted_ = 0;
  mark_frozen(counters_);
  for (Slab& slab : slabs_) {
    slab.lag = 0;            // saved vectors are settled
    slab.has_anchor = true;  // and complete: a later attach leaves them as they are
  }
  if (attached()) count_born(1);
}

std::vector<std::pair<std::string_view, std::span<float>>> Engine::Impl::named_vectors(const Slab& slab) const {
  const auto n = static_cast<std::size_t>(slab.numel);
  std::vector<std::pair<std::string_view, std::span<float>>> vectors = {
      {"anchor", {slab.anchor, n}}, {"exp_avg", {slab.momentum, n}}, {"accumulated", {slab.accumulated, n}}};
  const auto names = recipe_.preconditioner->vectors();
  for (std::size_t i = 0; i < names.size(); ++i) vectors.emplace_back(names[i], std::span<float>(slab.own[i], n));
  if (slab.worker_error != nullptr) vectors.emplace_back("worker_error", std::span<float>(slab.worker_error, n));
  if (slab.server_error != nullptr) {
    vectors.emplace_back("server_error", std::span<float>(slab.server_error,
                                                          static_cast<std::size_t>(slab.layout->chunk.elements)));
  }
  return vectors;
}

float* Engine::Impl::vector(std::string_view name, std::int64_t group) {
  if (name == "accumulated") settle();
  if (group < 0 || static_cast<std::size_t>(group) >= slabs_.size()) return nullptr;
  for (const auto& [vector_name, values] : named_vectors(slabs_[static_cast<std::size_t>(group)])) {
    if (vector_name == name) return values.data();
  }
  return nullptr;
}

std::vector<std::byte> Engine::Impl::save() {
  settle();
  BlobWriter blob;
  Fingerprint layout = layout_fingerprint();
  layout.emplace_back("rank", std::to_string(rank_) + " of " + std::to_string(ranks_));
  blob.text(layout);
  blob.counters(counters_);
  for (const Slab& slab : slabs_) {
    for (const auto& [name, values] : named_vectors(slab)) blob.floats(values);
  }
  return std::move(blob).finish();
}

void Engine::Impl::load(std::span<const std::byte> bytes) {
  if (!attached()) throw InvalidArgument("attach the engine before its state is loaded");
  BlobReader blob(bytes);  // checks the length and the hash
  Fingerprint layout = layout_fingerprint();
  layout.emplace_back("rank", std::to_string(rank_) + " of " + std::to_string(ranks_));
  blob.expect(layout);
  Counters counters = blob.counters(slabs_.size());
  std::size_t floats = 0;
  for (const Slab& slab : slabs_) {
    for (const auto& [name, values] : named_vectors(slab)) floats += values.size();
  }
  blob.expect_floats(floats);
  for (const Slab& slab : slabs_) {
    for (const auto& [name, values] : named_vectors(slab)) blob.floats(values);
  }
  set_counters(std::move(counters));
}

}  // namespace zeroone
