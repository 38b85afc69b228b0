// Instruction sets and cores available to this process.
#pragma once

namespace offload {

// In order of preference, best first; the numbers are the ones that Python passes.
enum class Isa : int { avx512 = 0, avx2 = 1, neon = 2, scalar = 3 };
constexpr int kNumIsas = 4;

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);

// Physical cores in this process's affinity mask (hyper-threads of one core count once), at least 1.
int physical_cores();

}  // namespace offload
