// SPDX-License-Identifier: Apache-2.0
//
// What the roles of the general forward on sm_90 share: a block's shared memory, and the tensor maps.
#pragma once

#include "cuda/fwd_sm90/rows.cuh"

namespace sa::fwd_sm90 {

template <class C> struct Smem {
    alignas(1024) unsigned char queries[C::kQueries][C::kHalves * C::kQueryHalf];
    alignas(1024) unsigned char keys[C::kStages][C::kHalves * C::kKeyHalf], values[C::kStages][C::kHalvesV * C::kKeyHalf];
    Rows<C> rows[C::kRowStages];
    alignas(2) bool nonfinite[C::kStages][C::kCheckers];
    Barriers<C::kQueries> q_full, q_empty;
    Barrier sent;                                                   // see tell_unsent
    Barriers<C::kStages> k_full, k_empty, v_full, v_ready, v_empty; // ready: checked for values that are not finite
    alignas(16) uint32_t offsets[2][C::Keys::kByThreads ? 128 : 1]; // of keys and of values of a tile, in the cache
};

struct Maps {
    CUtensorMap q, k, v, out;
};

constexpr int kUnsent = 4; // key tiles

// By the loader, with the key tiles that it has left to send: tells the scheduler, if it awaits that these are at most kUnsent.
template <class C> __device__ __forceinline__ void tell_unsent(Smem<C> &smem, bool &awaited, int left) {
    if (!awaited || left > kUnsent) return;
    smem.sent.arrive();
    awaited = false;
}

} // namespace sa::fwd_sm90
