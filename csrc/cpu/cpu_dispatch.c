/* SPDX-License-Identifier: Apache-2.0
 *
 * What this machine's CPU can do, and what SINKATTN_CPU_LEVEL lets it do; the workspace of the backend's rows.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "cpu/cpu.h"

static const char *const level_names[] = {"oracle", "scalar", "avx2", "avx512", "avx512_bf16"};
enum { NUM_LEVELS = sizeof level_names / sizeof *level_names };

#if defined(__x86_64__)
/* Asked of the compiler's runtime, which also asks whether the system saves the registers; F16C has no name in every compiler. */
static int32_t read_level(void) {
    unsigned eax, ebx, ecx = 0, edx;
    __builtin_cpu_init();
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    if (!has_f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return SINKATTN_CPU_SCALAR;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return SINKATTN_CPU_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? SINKATTN_CPU_AVX512_BF16 : SINKATTN_CPU_AVX512;
}

static void read_name(char *name) {
    unsigned words[3][4] = {{0}};
    for (unsigned leaf = 0; leaf < 3; leaf++) {
        unsigned *w = words[leaf];
        if (!__get_cpuid(0x80000002u + leaf, &w[0], &w[1], &w[2], &w[3])) break;
    }
    memcpy(name, words, sizeof words);
}
#else
static int32_t read_level(void) { return SINKATTN_CPU_SCALAR; }

static void read_name(char *name) { memcpy(name, "cpu", 4); }
#endif

/* Read once, when the library is loaded: cpuid traps in a virtual machine, and takes longer there than a small call. */
static uint8_t cpu_level;
static char cpu_name[48];

__attribute__((constructor)) static void read_cpu(void) {
    cpu_level = (uint8_t)read_level();
    read_name(cpu_name);
}

int32_t sa_cpu_level(void) { return cpu_level; }

sinkattn_status sinkattn_query_cpu(int32_t workers, sinkattn_device *device) {
    if (!device) return sa_status(SINKATTN_INVALID, "device is NULL; it must be given");
    if (workers < 1) return sa_status(SINKATTN_INVALID, "workers is %" PRId32 "; it must be at least 1", workers);
    int32_t level = cpu_level;
    const char *wanted = getenv("SINKATTN_CPU_LEVEL");
    if (wanted && *wanted) {
        int32_t named = 0;
        while (named < NUM_LEVELS && strcmp(wanted, level_names[named]) != 0) named++;
        if (named == NUM_LEVELS)
            return sa_status(SINKATTN_INVALID, "SINKATTN_CPU_LEVEL is %.100s; it must be oracle, scalar, avx2, avx512 or avx512_bf16",
                             wanted);
        if (named > level)
            return sa_status(SINKATTN_UNSUPPORTED, "SINKATTN_CPU_LEVEL is %s; it must be at most %s on this CPU", wanted,
                             level_names[level]);
        level = named;
    }
    *device = (sinkattn_device){.backend = SINKATTN_CPU, .arch = level, .workers = workers};
    memcpy(device->name, cpu_name, sizeof cpu_name);
    return sa_ok();
}

int64_t sa_cpu_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    if (sinkattn_variant(plan->variant)->arch == SINKATTN_CPU_ORACLE) return 0;
    if (problem->op == SINKATTN_FWD) return sa_cpu_fwd_workspace(problem, plan);
    return problem->op == SINKATTN_BWD ? sa_cpu_bwd_workspace(problem, plan) : sa_cpu_decode_workspace(problem, plan);
}
