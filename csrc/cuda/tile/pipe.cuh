// SPDX-License-Identifier: Apache-2.0
//
// Pipelines through shared memory: a ring of stages that one role fills and others read, each stage guarded by mbarriers. No other file
// computes a phase.
//
// A role counts its uses of the ring in a Ring of its own, and all roles use the stages in the same order. Use n lies in stage
// n % kLength; the parity of a barrier's phase there is n / kLength % 2.
#pragma once

#include "cuda/ptx/sm90.cuh"

namespace sa {

// A role's place in a ring of kLength stages: its n-th use.
template <int kLength> struct Ring {
    uint32_t n = 0; // of 2^32 uses at most

    __device__ __forceinline__ uint32_t stage() const { return n % kLength; }
    __device__ __forceinline__ uint32_t phase() const { return n / kLength & 1; }
    __device__ __forceinline__ Ring next() const { return {n + 1}; }
};

// One mbarrier. Its phase ends when all arrivals and all announced bytes are in.
struct Barrier {
    uint64_t word;

    __device__ __forceinline__ operator uint64_t *() { return &word; } // for copies that complete on it

    __device__ __forceinline__ void init(uint32_t arrivals) { barrier_init(&word, arrivals); }
    __device__ __forceinline__ void arrive() { barrier_arrive(&word); }
    __device__ __forceinline__ void arrive_expect(uint32_t bytes) { barrier_arrive_expect(&word, bytes); }
    __device__ __forceinline__ void arrive_copied() { barrier_arrive_copied(&word); } // once this thread's cp.async are in

    // Waits until the phase of this use has ended.
    template <int kLength> __device__ __forceinline__ void wait(Ring<kLength> use) { barrier_wait(&word, use.phase()); }

    // Whether it has ended.
    template <int kLength> __device__ __forceinline__ bool is_over(Ring<kLength> use) { return barrier_is_over(&word, use.phase()); }

    // Waits until the phase of the use one round before has ended; the first round passes at once.
    template <int kLength> __device__ __forceinline__ void wait_previous(Ring<kLength> use) { barrier_wait(&word, use.phase() ^ 1); }
};

// A barrier a stage. Those of one event have one name: `full`, the stage holds its data; `ready`, a role in between has prepared the data;
// `empty`, every reader is done with the stage.
template <int kLength> struct Barriers {
    Barrier each[kLength];

    __device__ __forceinline__ Barrier &operator[](uint32_t stage) { return each[stage]; }

    // Full or ready: a reader waits for this use, a writer announces it.
    __device__ __forceinline__ void wait(Ring<kLength> use) { each[use.stage()].wait(use); }
    __device__ __forceinline__ void arrive(Ring<kLength> use) { each[use.stage()].arrive(); }

    // Empty: a writer waits for the readers of the previous use, a reader says that it is done.
    __device__ __forceinline__ void acquire(Ring<kLength> use) { each[use.stage()].wait_previous(use); }
    __device__ __forceinline__ void release(Ring<kLength> use) { each[use.stage()].arrive(); }
};

} // namespace sa
