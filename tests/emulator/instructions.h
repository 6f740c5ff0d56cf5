// SPDX-License-Identifier: Apache-2.0
//
// The functions of csrc/cuda/ptx that are assembler there.
#pragma once

#include "cuda_runtime.h"

namespace emulated {

// A tile of a product of 16-bit elements. K lies along its rows in shared memory, or M or N.
enum Along { kDepth, kSize };

uint16_t half_of(float x, bool is_bf16);
float float_of(uint16_t half, bool is_bf16);

void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed);
void stmatrix(uint32_t address, const uint32_t (&r)[4], bool transposed);
uint32_t movmatrix(uint32_t x);
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16);
// d: of the thread, length elements. a: from registers, or by its descriptor.
void wgmma(
        float *d, int length, const uint32_t *registers, uint64_t a, Along a_rows, uint64_t b, Along b_rows, bool accumulate, bool is_bf16);

// Of a bulk copy: multiples of 16, within shared memory.
void check_bulk(const void *shared, const void *global, uint32_t bytes);
void tensor_load(unsigned char *to, const CUtensorMap &map, uint64_t *barrier, const int (&at)[4]);
void tensor_store(const CUtensorMap &map, const void *from, const int (&at)[4]);

} // namespace emulated

namespace sa {

struct Bf16;
struct Fp16;
template <class Element> constexpr bool kIsBf16 = false;
template <> inline constexpr bool kIsBf16<Bf16> = true;

// cp.async

template <int kBytes> void copy_later(uint32_t to, const void *from, bool valid) {
    unsigned char *at = emulated::shared_at(to, kBytes, kBytes);
    emulated::begin(emulated::current->copies, [=] {
        if (valid)
            memcpy(at, from, kBytes);
        else
            memset(at, 0, kBytes);
    });
}
inline void cp_async_16(uint32_t to, const void *from, bool valid) { copy_later<16>(to, from, valid); }
inline void cp_async_16_once(uint32_t to, const void *from, bool valid) { copy_later<16>(to, from, valid); }
inline void cp_async_8(uint32_t to, const void *from, bool valid) { copy_later<8>(to, from, valid); }
inline void cp_async_4(uint32_t to, const void *from, bool valid) { copy_later<4>(to, from, valid); }
inline void cp_async_commit() { emulated::current->copies.group++; }
template <int kPending> void cp_async_wait() { emulated::end(emulated::current->copies, kPending); }

// Barriers

template <int kThreads> void bar_sync(int id) { emulated::arrive(emulated::current->block->barriers[id], kThreads, true, false); }
template <int kThreads> void bar_arrive(int id) { emulated::arrive(emulated::current->block->barriers[id], kThreads, false, false); }
template <int kThreads> bool bar_any(int id, bool x) { return emulated::arrive(emulated::current->block->barriers[id], kThreads, true, x); }

inline void barrier_init(uint64_t *barrier, uint32_t arrivals) { emulated::barrier_init(barrier, arrivals); }
inline void barrier_invalidate(uint64_t *) {}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t *barrier) { emulated::barrier_arrive(barrier, 0); }
inline void barrier_arrive_expect(uint64_t *barrier, uint32_t bytes) { emulated::barrier_arrive(barrier, bytes); }
inline void barrier_arrive_copied(uint64_t *barrier) {
    emulated::begin(emulated::current->copies, [=] { emulated::barrier_arrive(barrier, 0); });
}
inline void barrier_wait(uint64_t *barrier, uint32_t parity) { emulated::barrier_wait(barrier, parity); }
inline bool barrier_is_over(uint64_t *barrier, uint32_t parity) {
    emulated::yield("an mbarrier");
    return emulated::barrier_is_over(barrier, parity);
}

// Clusters

inline void cluster_arrive() {
    emulated::Block &block = *emulated::current->block;
    emulated::current->cluster_phase = block.cluster_barrier->phase;
    emulated::arrive(*block.cluster_barrier, emulated::alive_in(*block.cluster), false, false);
}
inline void cluster_wait() {
    emulated::Barrier &barrier = *emulated::current->block->cluster_barrier;
    while (barrier.phase == emulated::current->cluster_phase) emulated::wait_in(barrier.waiters, "barrier.cluster");
}
inline uint32_t address_of_block(uint32_t address, uint32_t rank) { return (address & 0xffffff) | rank << 24; }
template <class T> T *of_block(T *p, uint32_t rank) {
    return reinterpret_cast<T *>(emulated::shared_at(address_of_block(emulated::shared_address(p), rank), sizeof(T), alignof(T)));
}
inline uint64_t *barrier_at(uint32_t address) { return reinterpret_cast<uint64_t *>(emulated::shared_at(address, 8, 8)); }
inline void arrive_at_block(uint32_t barrier) { barrier_arrive(barrier_at(barrier)); }
inline void bulk_send(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    emulated::begin(emulated::block_at(to), [=, to = emulated::shared_at(to, bytes, 16), barrier = barrier_at(barrier)] {
        memcpy(to, from, bytes);
        emulated::barrier_complete(barrier, bytes);
    });
}

// Bulk copies

inline void tensor_map_prefetch(const CUtensorMap *) {}
inline void prefetch_l2(const void *, uint32_t) {}
inline uint64_t evict_first() { return 0; }
inline void tensor_load(
        void *to, const CUtensorMap *map, uint64_t *barrier, int x, int head, int row, int batch, uint64_t /* policy */ = 0) {
    emulated::tensor_load(static_cast<unsigned char *>(to), *map, barrier, {x, head, row, batch});
}
inline void tensor_store(const CUtensorMap *map, const void *from, int x, int head, int row, int batch) {
    emulated::tensor_store(*map, from, {x, head, row, batch});
}
inline void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    emulated::check_bulk(to, from, bytes);
    emulated::begin(*emulated::current->block, [=] {
        memcpy(to, from, bytes);
        emulated::barrier_complete(barrier, bytes);
    });
}
inline void bulk_store(void *to, const void *from, uint32_t bytes) {
    emulated::check_bulk(from, to, bytes);
    emulated::begin_store([=]() -> emulated::Task {
        const auto *read = static_cast<const unsigned char *>(from);
        return [to, data = std::vector<unsigned char>(read, read + bytes)] { memcpy(to, data.data(), data.size()); };
    });
}
inline void bulk_add(float *to, const float *from, uint32_t bytes) {
    emulated::check_bulk(from, to, bytes);
    emulated::begin_store([=]() -> emulated::Task {
        return [to, data = std::vector<float>(from, from + bytes / sizeof(float))] {
            for (size_t i = 0; i < data.size(); i++) to[i] += data[i];
        };
    });
}
inline void store_commit() { emulated::current->stores.group++; }
template <int kPending> void store_wait_read() { emulated::end(emulated::current->stores, kPending); }
inline void store_wait() { emulated::end_stores(); }

// Global memory

inline int32_t load_relaxed(const int32_t *from) {
    emulated::yield("global memory");
    return *const_cast<const volatile int32_t *>(from);
}
inline unsigned long long load_acquire(const unsigned long long *flag) {
    emulated::yield("global memory");
    return *const_cast<const volatile unsigned long long *>(flag);
}
inline void store_release(unsigned long long *flag, unsigned long long value) { *const_cast<volatile unsigned long long *>(flag) = value; }
inline unsigned long long add_acquire_release(unsigned long long *to, unsigned long long x) { return atomicAdd(to, x); }

// What no result depends on here.

inline void async_fence() {}
inline void async_fence_global() {}
inline void wgmma_fence() {}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
template <int kRegisters> void registers_up() {}
template <int kRegisters> void registers_down() {}
template <class Parameters> void fetch_params(const Parameters &) {}
template <int kLength> void pin(float (&)[kLength]) { asm volatile("" ::: "memory"); }
inline unsigned thread_again() { return threadIdx.x; }

// Matrices

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emulated::ldmatrix(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emulated::ldmatrix(r, address, true); }
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) { emulated::stmatrix(address, r, false); }
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) { emulated::stmatrix(address, r, true); }
inline uint32_t transposed(uint32_t x) { return emulated::movmatrix(x); }

template <class Element> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::mma(d, a, {b0, b1}, kIsBf16<Element>);
}
template <class Element, int kLength> void wgmma_shared(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate) {
    emulated::wgmma(d, kLength, nullptr, a, emulated::kDepth, b, emulated::kDepth, accumulate, kIsBf16<Element>);
}
template <class Element, int kLength> void wgmma_shared_transposed(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate) {
    emulated::wgmma(d, kLength, nullptr, a, emulated::kSize, b, emulated::kSize, accumulate, kIsBf16<Element>);
}
template <class Element, int kLength> void wgmma_shared_columns(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate) {
    emulated::wgmma(d, kLength, nullptr, a, emulated::kSize, b, emulated::kDepth, accumulate, kIsBf16<Element>);
}
template <class Element, int kLength> void wgmma_shared_rows(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate) {
    emulated::wgmma(d, kLength, nullptr, a, emulated::kDepth, b, emulated::kSize, accumulate, kIsBf16<Element>);
}
template <class Element, int kLength> void wgmma_registers(float (&d)[kLength], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    emulated::wgmma(d, kLength, a, 0, emulated::kDepth, b, emulated::kSize, accumulate, kIsBf16<Element>);
}
inline void wgmma_commit() {
    int nothing;
    emulated::by_warp("wgmma.commit_group", ~0u, nothing, [](auto &) { emulated::current->warp->group++; });
}
template <int kPending> void wgmma_wait() {
    __syncwarp();
    emulated::end_products(kPending);
}

// Numbers

template <class Element> uint32_t pack_halves(float low, float high) {
    return emulated::half_of(low, kIsBf16<Element>) | emulated::half_of(high, kIsBf16<Element>) << 16;
}
template <class Element> float widen(uint16_t half) { return emulated::float_of(half, kIsBf16<Element>); }
template <class Element> uint32_t add_times_zero(uint32_t sum, uint32_t x) {
    const auto half = [=](int i) {
        return emulated::float_of(sum >> 16 * i & 0xffff, kIsBf16<Element>) +
               emulated::float_of(x >> 16 * i & 0xffff, kIsBf16<Element>) * 0.0f;
    };
    return pack_halves<Element>(half(0), half(1));
}
inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void max_if(bool condition, float (&top)[4], const float *s) {
    for (int i = 0; condition && i < 8; i++) top[i % 4] = fmaxf(top[i % 4], s[i]);
}
inline void add_to_either(bool second, float (&a)[4], float (&b)[4], const float (&x)[8]) {
    for (int i = 0; i < 8; i++) (second ? b : a)[i % 4] += x[i];
}

} // namespace sa
