// SPDX-License-Identifier: Apache-2.0
//
// A counter that the blocks of one launch share, in a workspace that may hold anything: tag << 24 | count, with a tag that the launcher
// never gives twice in a process.
//
// Before a block counts, it reads the word; if that lacks the launch's tag, it replaces the word by (tag, 0) with a compare-and-swap, which
// fails only if another block of the launch was faster. The last count resets the counter to 0 for the next replay of a graph, whose
// launches all carry one tag. The remaining risk is memory that holds these 40 bits by chance.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "core/workspace.h"

namespace sa {

constexpr int kCountBits = 24;
constexpr unsigned kMaxCount = 1u << kCountBits;

static inline unsigned long long *launch_counter(void *workspace) {
    return reinterpret_cast<unsigned long long *>((reinterpret_cast<uintptr_t>(workspace) + 7) / 8 * 8);
}

// Distinct in each launch of the process; multiplied, so that small numbers in the workspace are no tags.
static inline unsigned long long next_launch_tag() {
    static unsigned long long launches;
    const unsigned long long launch = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    return launch * 0x9e3779b97bull & ((1ull << (64 - kCountBits)) - 1);
}

// found: the word as the caller read it.
__device__ __forceinline__ void open_counter(unsigned long long *counter, unsigned long long found, unsigned long long tag) {
    if (found >> kCountBits != tag) atomicCAS(counter, found, tag << kCountBits);
}

// 0, 1, ... in the order of the calls.
__device__ __forceinline__ unsigned take_count(unsigned long long *counter, unsigned long long tag) {
    return static_cast<unsigned>(atomicAdd(counter, 1ull) - (tag << kCountBits));
}

// By the thread that took the launch's last count.
__device__ __forceinline__ void reset_counter(unsigned long long *counter, unsigned long long tag) {
    atomicExch(counter, tag << kCountBits);
}

} // namespace sa
