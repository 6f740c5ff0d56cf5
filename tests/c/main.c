/* SPDX-License-Identifier: Apache-2.0
 *
 * test_c [seed [part of a test's name]]
 */
#include "test.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PRINTED = 5 };

static int num_failed_checks;
static uint64_t state;

bool check_at(const char *file, int line, bool ok, const char *format, ...) {
    if (ok || ++num_failed_checks > MAX_PRINTED) return ok;
    va_list values;
    va_start(values, format);
    printf("  %s:%d: ", file, line);
    vprintf(format, values);
    puts(num_failed_checks == MAX_PRINTED ? " (and so on)" : "");
    va_end(values);
    return ok;
}

void skip(const char *format, ...) {
    va_list values;
    va_start(values, format);
    printf("  skipped: ");
    vprintf(format, values);
    puts("");
    va_end(values);
}

/* splitmix64 */
static uint64_t next(void) {
    uint64_t x = state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

int64_t pick(int64_t low, int64_t high) { return low + (int64_t)(next() % (uint64_t)(high - low + 1)); }

bool one_in(int64_t n) { return pick(1, n) == 1; }

double pick_normal(void) {
    const double u = (double)(next() >> 11) * 0x1p-53, v = (double)(next() >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(1.0 - u)) * cos(6.283185307179586 * v);
}

/* Every test starts from the seed and its own name, so that one alone sees what it sees among the others. */
static void seed_for(uint64_t seed, const char *name) {
    state = seed;
    for (const char *c = name; *c; c++) state = (state ^ (uint64_t)*c) * UINT64_C(0x100000001b3);
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 20250101;
    const char *part = argc > 2 ? argv[2] : "";
    const test *const files[] = {core_tests, validate_tests, plan_tests, rule_tests, oracle_tests, kernel_tests, promise_tests,
            changing_tests, append_tests, packed_plan_tests, chain_tests};
    int num_passed = 0, num_failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("seed %" PRIu64 "\n", seed);
    for (size_t f = 0; f < COUNT(files); f++)
        for (const test *t = files[f]; t->name; t++) {
            if (!strstr(t->name, part)) continue;
            num_failed_checks = 0;
            seed_for(seed, t->name);
            t->run();
            printf("%s %s\n", num_failed_checks ? "FAILED" : "passed", t->name);
            if (num_failed_checks)
                num_failed++;
            else
                num_passed++;
        }
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
