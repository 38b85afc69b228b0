#include "cpu.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace offload {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::neon: return "neon";
    case Isa::scalar: return "scalar";
  }
  return "unknown";
}

#if defined(__x86_64__)
namespace {

// Asks the processor itself: __builtin_cpu_supports is false for everything in a library linked by zig.
bool has_vectors(unsigned leaf_7_bits, unsigned saved_registers) {
  unsigned a, b, c, d;
  constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;
  constexpr unsigned kNeeded = kFma | kOsxsave | kF16c;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kNeeded) != kNeeded) return false;
  unsigned saved, high;  // the registers that the operating system saves
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & saved_registers) != saved_registers) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & leaf_7_bits) == leaf_7_bits;
}

}  // namespace
#endif

bool isa_supported(Isa isa) {
#if defined(__x86_64__)
  constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  switch (isa) {
    case Isa::avx512: return has_vectors(kAvx2 | kAvx512, 0xe6);
    case Isa::avx2: return has_vectors(kAvx2, 0x6);
    case Isa::neon: return false;
    case Isa::scalar: return true;
  }
  return false;
#elif defined(__aarch64__)
  return isa == Isa::neon || isa == Isa::scalar;  // every processor has it
#else
  return isa == Isa::scalar;
#endif
}

int physical_cores() {
  const int logical = std::max(1u, std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return logical;
  std::set<std::string> cores;  // siblings of one core read the same list
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::string siblings = "cpu" + std::to_string(cpu);
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::getline(file, siblings);
    cores.insert(siblings);
  }
  return std::max<int>(1, static_cast<int>(cores.size()));
#else
  return logical;
#endif
}

}  // namespace offload
