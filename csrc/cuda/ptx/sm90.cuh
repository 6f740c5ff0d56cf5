// SPDX-License-Identifier: Apache-2.0
//
// The instructions of sm_90a that the kernels use, one a function: barriers, the bulk tensor copies, wgmma. Nothing here knows of
// attention.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "cuda/ptx/sm80.cuh"

namespace sa {

// mbarrier: a phase ends when all arrivals and all announced bytes are in.

__device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Before it is initialised again.
__device__ __forceinline__ void barrier_invalidate(uint64_t *barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Arrives once this thread's copies by cp.async are in.
__device__ __forceinline__ void barrier_arrive_copied(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Returns when the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
            "r"(parity)
            : "memory");
}

// Whether that phase has ended; may say no of one that has.
__device__ __forceinline__ bool barrier_is_over(uint64_t *barrier, uint32_t parity) {
    uint32_t over;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
            : "=r"(over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    return over;
}

// Shared memory of another block of the cluster, by the address that corresponds to one of this block's.

__device__ __forceinline__ uint32_t address_of_block(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Without a fence of the cluster's scope, which would take hundreds of cycles: for a thread that has used what it read, and wrote nothing.
__device__ __forceinline__ void arrive_at_block(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Copies to another block's shared memory; the barrier, of that block, was told to expect the bytes.
__device__ __forceinline__ void bulk_send(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "r"(shared_address(from)), "r"(bytes), "r"(barrier)
            : "memory");
}

// Bulk tensor copies; coordinates outside the tensor read zeros and are not written.

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tensor_load(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int head, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                         shared_address(to)),
            "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(head), "r"(row), "r"(batch)
            : "memory");
}

// A cache policy: lines accessed with it are the first to leave the L2 cache.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void tensor_load(
        void *to, const CUtensorMap *map, uint64_t *barrier, int x, int head, int row, int batch, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2], %7;" ::"r"(shared_address(to)),
            "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(head), "r"(row), "r"(batch), "l"(policy)
            : "memory");
}

__device__ __forceinline__ void tensor_store(const CUtensorMap *map, const void *from, int x, int head, int row, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
            "r"(shared_address(from)), "r"(x), "r"(head), "r"(row), "r"(batch)
            : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of stores still read shared memory.
template <int kPending> __device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all stores have been written.
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Bulk copies without a tensor map: a multiple of 16 bytes at addresses that are multiples of 16.
__device__ __forceinline__ void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
            "l"(from), "r"(bytes), "r"(shared_address(barrier))
            : "memory");
}

__device__ __forceinline__ void bulk_store(void *to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_add(float *to, const float *from, uint32_t bytes) {
    asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
            : "memory");
}

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long *flag) {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(unsigned long long *flag, unsigned long long value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Orders the thread's accesses to shared memory before those of wgmma and of bulk copies that follow.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same in global memory: orders a flag that was read before the bulk copies that follow.
__device__ __forceinline__ void async_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

template <int kRegisters> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8 x 8 matrices from an accumulator's fragments. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
            : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
            "r"(r[3])
            : "memory");
}

// wgmma: rows of 64 16-bit elements, swizzled by 128 bytes.

// A tile may start at any row. half_step: bytes between the 64-column halves of an operand whose columns are N. step: to the next 8 rows, 0
// for the same again. The address is the low field, so offsets may be added to the whole descriptor.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t half_step, uint32_t step = 1024) {
    return static_cast<uint64_t>(address >> 4 | half_step >> 4 << 16) | static_cast<uint64_t>(step >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ uint64_t operand_at(uint64_t operand, uint32_t bytes) {
    return (operand & 0xffffffff00000000ull) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

// An operand with M or N along its rows, which may be shorter, or not swizzled: 8 row_bytes or 128 bytes for 8 of K. leading: bytes to the
// next columns, 0 for the same ones again; to the next 8 of K where nothing is swizzled. In a cluster, the address holds the block's rank.
__device__ __forceinline__ uint64_t operand_of_rows(uint32_t address, uint32_t row_bytes, uint32_t leading) {
    const uint32_t swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : row_bytes == 32 ? 3 : 0;
    return static_cast<uint64_t>((address & 0x3ffff) >> 4 | leading >> 4 << 16) | static_cast<uint64_t>(8 * row_bytes >> 4 | swizzle << 30)
                                                                                          << 32;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that x is the same in all lanes, so that it computes operands of wgmma in uniform registers, where wgmma takes them.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The same by an instruction whose result is a uniform register: for values carried through a loop, which the compiler keeps elsewhere.
__device__ __forceinline__ uint32_t warp_uniform_register(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Compiler fence: pins d here, so that no arithmetic on it moves across a wgmma wait.
template <int kLength> __device__ __forceinline__ void pin(float (&d)[kLength]) {
#pragma unroll
    for (int i = 0; i < kLength; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Accumulators d[i] ... as operands of the assembler, and their numbers in its text.
#define SA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SA_D8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SA_D16(d, i) SA_D8(d, i), SA_D8(d, i + 8)
#define SA_D24(d) SA_D16(d, 0), SA_D8(d, 16)
#define SA_D28(d) SA_D16(d, 0), SA_D8(d, 16), SA_D4(d, 24)
#define SA_D32(d, i) SA_D16(d, i), SA_D16(d, i + 16)
#define SA_D40(d) SA_D32(d, 0), SA_D8(d, 32)
#define SA_D48(d) SA_D32(d, 0), SA_D16(d, 32)
#define SA_D64(d) SA_D32(d, 0), SA_D32(d, 32)
#define SA_D72(d) SA_D64(d), SA_D8(d, 64)
#define SA_D128(d) SA_D64(d), SA_D32(d, 64), SA_D32(d, 96)
#define SA_N4 "%0, %1, %2, %3"
#define SA_N8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SA_N16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SA_N24 SA_N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SA_N28 SA_N16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
#define SA_N32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
    "%28, %29, %30, %31"
#define SA_N40 SA_N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SA_N48 SA_N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SA_N64 \
    SA_N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
           "%56, %57, %58, %59, %60, %61, %62, %63"
#define SA_N72 SA_N64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SA_N128 \
    SA_N72 ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87" \
           ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103" \
           ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119" \
           ", %120, %121, %122, %123, %124, %125, %126, %127"

// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] b[N x 16]^T, both from shared memory, K along the rows. N is twice the length of d.
template <class Element, int kLength>
__device__ __forceinline__ void wgmma_shared(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate);

// d[64 x N] = (accumulate ? d : 0) + a[16 x 64]^T b[16 x N], both from shared memory with M and N along their rows.
template <class Element, int kLength>
__device__ __forceinline__ void wgmma_shared_transposed(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate);

// d[64 x N] = (accumulate ? d : 0) + a[16 x 64]^T b[N x 16]^T, both from shared memory, a with M, b with K along its rows.
template <class Element, int kLength>
__device__ __forceinline__ void wgmma_shared_columns(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate);

// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] b[16 x N], both from shared memory, a with K, b with N along its rows.
template <class Element, int kLength>
__device__ __forceinline__ void wgmma_shared_rows(float (&d)[kLength], uint64_t a, uint64_t b, bool accumulate);

// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] b[16 x N], a from registers, b from shared memory with N along its rows.
template <class Element, int kLength>
__device__ __forceinline__ void wgmma_registers(float (&d)[kLength], const uint32_t (&a)[4], uint64_t b, bool accumulate);

// The operands after d have the numbers r0, r1, ...
#define SA_WGMMA_SHARED(function, transposed, Element, type, length, n, names, r0, r1, r2, ...) \
    template <> __device__ __forceinline__ void function<Element, length>(float (&d)[length], uint64_t a, uint64_t b, bool accumulate) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
                     " {" names "}, " r0 ", " r1 ", p, 1, 1, " transposed ";\n}" \
                : __VA_ARGS__ \
                : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))); \
    }
#define SA_WGMMA_REGISTERS(Element, type, length, n, names, r0, r1, r2, r3, r4, r5, ...) \
    template <> \
    __device__ __forceinline__ void wgmma_registers<Element, length>( \
            float (&d)[length], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
                     " {" names "}, {" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, 1;\n}" \
                : __VA_ARGS__ \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))); \
    }
#define SA_WGMMA(Element, type) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 4, "8", SA_N4, "%4", "%5", "%6", SA_D4(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 8, "16", SA_N8, "%8", "%9", "%10", SA_D8(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 16, "32", SA_N16, "%16", "%17", "%18", SA_D16(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 24, "48", SA_N24, "%24", "%25", "%26", SA_D24(d)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 28, "56", SA_N28, "%28", "%29", "%30", SA_D28(d)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 32, "64", SA_N32, "%32", "%33", "%34", SA_D32(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_rows, "0, 1", Element, type, 16, "32", SA_N16, "%16", "%17", "%18", SA_D16(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_rows, "0, 1", Element, type, 32, "64", SA_N32, "%32", "%33", "%34", SA_D32(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_rows, "0, 1", Element, type, 64, "128", SA_N64, "%64", "%65", "%66", SA_D64(d)) \
    SA_WGMMA_SHARED(wgmma_shared_transposed, "1, 1", Element, type, 4, "8", SA_N4, "%4", "%5", "%6", SA_D4(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_transposed, "1, 1", Element, type, 16, "32", SA_N16, "%16", "%17", "%18", SA_D16(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_transposed, "1, 1", Element, type, 32, "64", SA_N32, "%32", "%33", "%34", SA_D32(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_columns, "1, 0", Element, type, 8, "16", SA_N8, "%8", "%9", "%10", SA_D8(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_columns, "1, 0", Element, type, 16, "32", SA_N16, "%16", "%17", "%18", SA_D16(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared_columns, "1, 0", Element, type, 32, "64", SA_N32, "%32", "%33", "%34", SA_D32(d, 0)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 40, "80", SA_N40, "%40", "%41", "%42", SA_D40(d)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 48, "96", SA_N48, "%48", "%49", "%50", SA_D48(d)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 64, "128", SA_N64, "%64", "%65", "%66", SA_D64(d)) \
    SA_WGMMA_SHARED(wgmma_shared, "0, 0", Element, type, 72, "144", SA_N72, "%72", "%73", "%74", SA_D72(d)) \
    SA_WGMMA_REGISTERS(Element, type, 32, "64", SA_N32, "%32", "%33", "%34", "%35", "%36", "%37", SA_D32(d, 0)) \
    SA_WGMMA_REGISTERS(Element, type, 48, "96", SA_N48, "%48", "%49", "%50", "%51", "%52", "%53", SA_D48(d)) \
    SA_WGMMA_REGISTERS(Element, type, 64, "128", SA_N64, "%64", "%65", "%66", "%67", "%68", "%69", SA_D64(d)) \
    SA_WGMMA_REGISTERS(Element, type, 128, "256", SA_N128, "%128", "%129", "%130", "%131", "%132", "%133", SA_D128(d))
SA_WGMMA(Bf16, "bf16")
SA_WGMMA(Fp16, "f16")

} // namespace sa
