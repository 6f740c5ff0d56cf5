// SPDX-License-Identifier: Apache-2.0
//
// What the tests of csrc/cuda/ptx share: memory that host and device see, a verdict, and exact small numbers.
#pragma once

#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

#include "core/numerics.h"
#include "cuda/ptx/sm80.cuh"

extern int failures;

inline void check(const char *name, bool right) {
    const cudaError_t error = cudaDeviceSynchronize();
    printf("%-28s %s%s%s\n", name, right && !error ? "ok" : "FAILED", error ? ": " : "", error ? cudaGetErrorString(error) : "");
    failures += !right || error;
}

// Zeroed, and never given back.
template <class T> T *new_array(size_t length) {
    T *array = nullptr;
    cudaMallocManaged(&array, length * sizeof(T));
    memset(array, 0, length * sizeof(T));
    return array;
}

inline uint16_t bits_of(sinkattn_dtype dtype, float x) {
    uint16_t bits;
    sa_store(&bits, dtype, 0, x);
    return bits;
}
inline uint16_t bits_of(sa::Bf16, float x) { return bits_of(SINKATTN_BF16, x); }
inline uint16_t bits_of(sa::Fp16, float x) { return bits_of(SINKATTN_FP16, x); }

// Small integers, whose products and sums are exact in every format, and differ from neighbours.
inline float small(int row, int column) { return (row * 7 + column * 5) % 11 - 5; }

void test_sm80();
void test_sm90();
void test_wgmma();
