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
#if defined(__x86_64__) && defined(__linux__)
#include <stdatomic.h>
#include <sys/syscall.h>

long syscall(long number, ...); /* which unistd.h hides from C11 */
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "cpu/cpu.h"

#if defined(__aarch64__)
#define SA_LEVELS "oracle, scalar, neon or neon_bf16"
static const char *const level_names[] = {"oracle", "scalar", "neon", "neon_bf16"};
#else
#define SA_LEVELS "oracle, scalar, avx2, avx512, avx512_bf16 or amx_bf16"
static const char *const level_names[] = {"oracle", "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
#endif
enum { NUM_LEVELS = sizeof level_names / sizeof *level_names };

#if defined(__x86_64__)
/* AMX tiles, bf16 products of them, and an operating system that saves both: bits 24 and 22 of leaf 7, 17 and 18 of XCR0, which may be
 * read where AVX-512 is. Not every compiler's runtime knows their names. */
static bool has_tiles(void) {
    unsigned eax, ebx, ecx, edx, saved;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx >> 22 & 5u) != 5u) return false;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    return (saved >> 17 & 3u) == 3u;
}

/* Asked of the compiler's runtime, which also asks whether the system saves the registers; F16C has no name in every compiler. */
static int32_t read_level(void) {
    unsigned eax, ebx, ecx = 0, edx;
    __builtin_cpu_init();
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    if (!has_f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return SINKATTN_CPU_SCALAR;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
            !__builtin_cpu_supports("avx512vl"))
        return SINKATTN_CPU_AVX2;
    if (!__builtin_cpu_supports("avx512bf16")) return SINKATTN_CPU_AVX512;
    return has_tiles() ? SINKATTN_CPU_AMX_BF16 : SINKATTN_CPU_AVX512_BF16;
}

static void read_name(char *name) {
    unsigned words[3][4] = {{0}};
    for (unsigned leaf = 0; leaf < 3; leaf++) {
        unsigned *w = words[leaf];
        if (!__get_cpuid(0x80000002u + leaf, &w[0], &w[1], &w[2], &w[3])) break;
    }
    memcpy(name, words, sizeof words);
}
#elif defined(__aarch64__) && defined(__linux__)
/* BFDOT, BFMMLA and the conversions are one feature. */
static int32_t read_level(void) {
    const unsigned long has_bf16 = 1ul << 14; /* HWCAP2_BF16, which older headers lack */
    return getauxval(AT_HWCAP2) & has_bf16 ? SINKATTN_CPU_NEON_BF16 : SINKATTN_CPU_NEON;
}

static void read_name(char *name) { memcpy(name, "aarch64", 8); }
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

#if defined(__x86_64__) && defined(__linux__)
/* Linux grants AMX tiles per process, on request; threads inherit them, and alternate signal stacks must then have room for the tiles. We
 * ask once, when the first plan is made. */
static bool may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, NOT_ASKED = 0, GRANTED = 1, REFUSED = 2 };
    static atomic_int answer;
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (known == NOT_ASKED) {
        known = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? GRANTED : REFUSED;
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known == GRANTED;
}
#else
static bool may_use_tiles(void) { return false; }
#endif

int32_t sa_cpu_level(void) { return cpu_level == SINKATTN_CPU_AMX_BF16 && !may_use_tiles() ? SINKATTN_CPU_AVX512_BF16 : cpu_level; }

const char *sa_cpu_level_name(int32_t level) { return level >= 0 && level < NUM_LEVELS ? level_names[level] : "unknown"; }

sinkattn_status sinkattn_query_cpu(int32_t workers, sinkattn_device *device) {
    if (!device) return sa_status(SINKATTN_INVALID, "device is NULL; it must be given");
    if (workers < 1) return sa_status(SINKATTN_INVALID, "workers is %" PRId32 "; it must be at least 1", workers);
    int32_t level = sa_cpu_level();
    const char *wanted = getenv("SINKATTN_CPU_LEVEL");
    if (wanted && *wanted) {
        int32_t named = 0;
        while (named < NUM_LEVELS && strcmp(wanted, level_names[named]) != 0) named++;
        if (named == NUM_LEVELS) return sa_status(SINKATTN_INVALID, "SINKATTN_CPU_LEVEL is %.100s; it must be " SA_LEVELS, wanted);
        if (named > level)
            return sa_status(
                    SINKATTN_UNSUPPORTED, "SINKATTN_CPU_LEVEL is %s; it must be at most %s on this CPU", wanted, level_names[level]);
        level = named;
    }
    *device = (sinkattn_device){.backend = SINKATTN_CPU, .arch = level, .workers = workers};
    memcpy(device->name, cpu_name, sizeof cpu_name);
    return sa_ok();
}
