#include "cpu.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
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

bool isa_supported(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {  // __builtin_cpu_supports also asks the operating system whether it saves the wide registers
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             isa_supported(Isa::avx2);
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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
