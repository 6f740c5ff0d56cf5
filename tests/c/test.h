/* SPDX-License-Identifier: Apache-2.0
 *
 * A test is a function; it fails when one of its checks does. The seed of the random ones is printed and may be given.
 */
#ifndef SA_TEST_H
#define SA_TEST_H

#include <stdbool.h>
#include <stdint.h>

typedef struct test {
    const char *name;
    void (*run)(void);
} test;

/* An entry of a file's tests. */
#define TEST(name) {#name, test_##name}

/* Each file's tests, ended by an empty one. */
extern const test core_tests[], validate_tests[], plan_tests[], rule_tests[], oracle_tests[], kernel_tests[], promise_tests[],
        changing_tests[], append_tests[], packed_plan_tests[], chain_tests[];

/* Returns ok, and prints the sentence where it is false. */
bool check_at(const char *file, int line, bool ok, const char *format, ...) __attribute__((format(printf, 4, 5)));
#define CHECK(ok, ...) check_at(__FILE__, __LINE__, ok, __VA_ARGS__)

/* Says that something was left out, and why. */
void skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Uniform in [low, high]. */
int64_t pick(int64_t low, int64_t high);
bool one_in(int64_t n);
/* Standard normal. */
double pick_normal(void);

#endif
