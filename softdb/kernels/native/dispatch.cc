// Choose the level (instruction set) of the kernels: the best that the processor has, or one that the caller names.
#include <cstring>

#include "table.h"

#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <unistd.h>
#endif

namespace softdb {

#if defined(__x86_64__)
namespace v2 { extern const Kernels kTable; }
namespace v3 { extern const Kernels kTable; }
namespace v4 { extern const Kernels kTable; }
#else
namespace neon { extern const Kernels kTable; }
#endif

namespace {

struct Choice {
    const Kernels* tables[4] = {};
    const char* names[4] = {};
    const Kernels* used = nullptr;

    Choice() {
        int count = 0;
        auto add = [&](const Kernels& table) {
            tables[count] = &table;
            names[count++] = table.level;
        };
#if defined(__x86_64__)
        __builtin_cpu_init();
        bool second = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
        bool third = second && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");  // such processors have F16C, too
        bool fourth = third && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
        if (fourth) add(v4::kTable);
        if (third) add(v3::kTable);
        if (second) add(v2::kTable);
#else
        add(neon::kTable);
#endif
        used = tables[0];
    }
};

Choice& choice() {
    static Choice made;
    return made;
}

}  // namespace

const Kernels& kernels() { return *choice().used; }

const char* const* levels() { return choice().names; }

bool use_level(const char* level) {
    Choice& made = choice();
    for (int i = 0; made.tables[i]; i++)
        if (!std::strcmp(level, made.names[i])) {
            made.used = made.tables[i];
            return true;
        }
    return false;
}

int64_t cache_bytes(int level) {
    int64_t result = 0;
#ifdef __APPLE__
    size_t size = sizeof result;
    if (sysctlbyname(level == 1 ? "hw.l1dcachesize" : "hw.l2cachesize", &result, &size, nullptr, 0)) result = 0;
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
    result = sysconf(level == 1 ? _SC_LEVEL1_DCACHE_SIZE : _SC_LEVEL2_CACHE_SIZE);
#endif
    if (result > 0) return result;
    return level == 1 ? 32 << 10 : 512 << 10;  // if the system does not report the size
}

}  // namespace softdb
