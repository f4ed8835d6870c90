// Chooses the instruction set: once, at the first use, or by name.
#include <atomic>
#include <cstdlib>
#include <string>

#include "kernels.h"
#include "zeroone/error.h"
#include "zeroone/instruction_set.h"

namespace zeroone {
namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> tables;
#if defined(ZEROONE_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back(&kAvx512Kernels);
  }
#endif
#if defined(ZEROONE_HAVE_AVX2)
  // Every processor with AVX2, FMA and BMI2 has the F16C, AES and CLMUL that the file is compiled with.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    tables.push_back(&kAvx2Kernels);
  }
#endif
#if defined(ZEROONE_HAVE_NEON)
  tables.push_back(&kNeonKernels);  // part of every AArch64
#endif
  tables.push_back(&kScalarKernels);
  return tables;
}

const Kernels* find(std::string_view name) {
  std::string names;
  for (const Kernels* table : available()) {
    if (name == table->name) return table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  throw InvalidArgument("instruction set '" + std::string(name) + "' is not available here; available: " + names);
}

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = current.load(std::memory_order_acquire);
  if (table == nullptr) {
    const char* forced = std::getenv("ZEROONE_INSTRUCTION_SET");
    table = forced != nullptr && *forced != '\0' ? find(forced) : available().front();
    current.store(table, std::memory_order_release);
  }
  return *table;
}

std::vector<std::string_view> available_instruction_sets() {
  std::vector<std::string_view> names;
  for (const Kernels* table : available()) names.emplace_back(table->name);
  return names;
}

std::string_view instruction_set() { return kernels().name; }

int instruction_set_lanes() { return kernels().lanes; }

void select_instruction_set(std::string_view name) { current.store(find(name), std::memory_order_release); }

}  // namespace zeroone
