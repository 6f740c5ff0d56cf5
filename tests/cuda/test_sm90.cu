// SPDX-License-Identifier: Apache-2.0
//
// Barriers, copies and shuffles of csrc/cuda/ptx/sm90.cuh, each alone, in one block.

#include "cuda/ptx/sm90.cuh"
#include "cuda/tile/pipe.cuh"

#include "check.cuh"

using namespace sa;

// Arrivals come late and in two ways; who waits then sees what was written before them. Then the other parity.
__global__ void barrier_phases(int *seen) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ uint64_t barrier;
    __shared__ volatile int s[3];
    if (threadIdx.x == 0) barrier_init(&barrier, 3), barrier_init_fence();
    __syncthreads();
    for (int phase = 0; phase < 2; phase++) {
        if (threadIdx.x < 96 && threadIdx.x % 32 == 0) { // one thread of a warp
            const int i = threadIdx.x / 32;
            __nanosleep(5000 * (i + 1));
            s[i] = 10 * phase + i + 1;
            if (i < 2)
                barrier_arrive(&barrier);
            else
                barrier_arrive_expect(&barrier, 0);
        }
        if (threadIdx.x == 96) {
            barrier_wait(&barrier, phase);
            for (int i = 0; i < 3; i++) seen[3 * phase + i] = s[i];
        }
        __syncthreads();
    }
#endif
}

static bool barrier_phases_are_right() {
    auto *seen = new_array<int>(6);
    barrier_phases<<<1, 128>>>(seen);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 6; i++) right &= seen[i] == 10 * (i / 3) + i % 3 + 1;
    return right;
}

__global__ void uses_of_a_ring(uint32_t *places, uint32_t *phases) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    Ring<3> ring;
    for (int n = 0; n < 12; n++, ring = ring.next()) places[n] = ring.stage(), phases[n] = ring.phase();
#endif
}

static bool uses_of_a_ring_are_right() {
    auto *places = new_array<uint32_t>(12), *phases = new_array<uint32_t>(12);
    uses_of_a_ring<<<1, 1>>>(places, phases);
    cudaDeviceSynchronize();
    bool right = true;
    for (uint32_t n = 0; n < 12; n++) right &= places[n] == n % 3 && phases[n] == n / 3 % 2;
    return right;
}

// 1024 bytes in by a bulk copy, 512 by cp.async on the same barrier; out by a bulk copy and, as floats, by addition.
__global__ void bulk_copies(const uint32_t *from, uint32_t *to, float *sums) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ __align__(128) uint32_t s[384];
    __shared__ __align__(128) float addends[32];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) barrier_init(&barrier, 33), barrier_init_fence();
    addends[threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_expect(&barrier, 1024);
        bulk_load(s, from, 1024, &barrier);
    }
    cp_async_16(shared_address(s + 256 + 4 * threadIdx.x), from + 256 + 4 * threadIdx.x, true);
    barrier_arrive_copied(&barrier);
    barrier_wait(&barrier, 0);
    for (int i = threadIdx.x; i < 384; i += 32) s[i] += 1;
    async_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(to, s, 1536);
        store_commit();
        bulk_add(sums, addends, 128);
        store_commit();
        store_wait_read<1>();
        store_wait_read<0>();
        store_wait();
    }
#endif
}

static bool bulk_copies_are_right() {
    auto *from = new_array<uint32_t>(384), *to = new_array<uint32_t>(385);
    auto *sums = new_array<float>(33);
    for (uint32_t i = 0; i < 384; i++) from[i] = 3 * i;
    for (int i = 0; i < 33; i++) sums[i] = 100;
    bulk_copies<<<1, 32>>>(from, to, sums);
    cudaDeviceSynchronize();
    bool right = to[384] == 0 && sums[32] == 100;
    for (uint32_t i = 0; i < 384; i++) right &= to[i] == 3 * i + 1;
    for (int i = 0; i < 32; i++) right &= sums[i] == 100.0f + i;
    return right;
}

constexpr int kBatch = 2, kRows = 5, kHeads = 3, kDim = 72; // a tensor that boxes of 4 rows, 2 heads and 64 columns leave
constexpr int kTensor = kBatch * kRows * kHeads * kDim;

// Element `column` of row `row` of a box: 16-byte pieces change places with the row, by 128-byte swizzling.
__host__ __device__ inline int swizzled(int row, int column) { return 64 * row + 8 * (column / 8 ^ row % 8) + column % 8; }

// The box at (64, 2, 3, 1) into `box`; then ones in its place.
template <bool kOnce>
__global__ void boxes(const __grid_constant__ CUtensorMap read, const __grid_constant__ CUtensorMap written, uint16_t *box) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ __align__(1024) uint16_t s[8 * 64];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) {
        tensor_map_prefetch(&read);
        barrier_init(&barrier, 1), barrier_init_fence();
        barrier_arrive_expect(&barrier, sizeof s);
        if constexpr (kOnce)
            tensor_load(s, &read, &barrier, 64, 2, 3, 1, evict_first());
        else
            tensor_load(s, &read, &barrier, 64, 2, 3, 1);
    }
    __syncthreads();
    barrier_wait(&barrier, 0);
    for (int i = threadIdx.x; i < 512; i += 32) box[i] = s[swizzled(i / 64, i % 64)];
    __syncthreads();
    for (int i = threadIdx.x; i < 512; i += 32) s[i] = 1;
    async_fence();
    __syncthreads();
    if (threadIdx.x) return;
    tensor_store(&written, s, 64, 2, 3, 1);
    store_commit();
    store_wait();
#endif
}

static CUtensorMap map_of(uint16_t *tensor) {
    using Encode =
            CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
    CUtensorMap map = {};
    const cuuint64_t sizes[] = {kDim, kHeads, kRows, kBatch}, strides[] = {2 * kDim, 2 * kDim * kHeads, 2 * kDim * kHeads * kRows};
    const cuuint32_t box[] = {64, 2, 4, 1}, steps[] = {1, 1, 1, 1};
    if (encode)
        reinterpret_cast<Encode>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, tensor, sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

template <bool kOnce> static bool boxes_are_right() {
    auto *read = new_array<uint16_t>(kTensor), *written = new_array<uint16_t>(kTensor), *box = new_array<uint16_t>(512);
    for (int i = 0; i < kTensor; i++) read[i] = static_cast<uint16_t>(i + 5);
    boxes<kOnce><<<1, 32>>>(map_of(read), map_of(written), box);
    cudaDeviceSynchronize();
    const auto inside = [](int row, int head, int column) { return row < kRows && head < kHeads && column < kDim; };
    const auto at = [](int batch, int row, int head, int column) { return ((batch * kRows + row) * kHeads + head) * kDim + column; };
    bool right = true;
    for (int i = 0; i < 512; i++) { // zeros outside
        const int row = 3 + i / 128, head = 2 + i / 64 % 2, column = 64 + i % 64;
        right &= box[i] == (inside(row, head, column) ? read[at(1, row, head, column)] : 0);
    }
    for (int i = 0; i < kTensor; i++) { // nothing written but the box
        const int column = i % kDim, head = i / kDim % kHeads, row = i / (kDim * kHeads) % kRows, batch = i / (kDim * kHeads * kRows);
        right &= written[i] == (batch == 1 && row >= 3 && head >= 2 && column >= 64);
    }
    return right;
}

// Fragments stored and read again are the same; what is uniform comes from lane 0, or is the same in all.
__global__ void fragments(uint32_t *stored, uint32_t *uniform) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ __align__(16) uint32_t s[128];
    const uint32_t lane = threadIdx.x, r[4] = {lane, lane + 32, lane + 64, lane + 96};
    stmatrix_x4(shared_address(s + 4 * lane), r);
    __syncwarp();
    for (int i = 0; i < 4; i++) stored[32 * i + lane] = s[32 * i + lane];
    __syncwarp();
    stmatrix_x4_trans(shared_address(s + 4 * lane), r);
    __syncwarp();
    for (int i = 4; i < 8; i++) stored[32 * i + lane] = s[32 * (i - 4) + lane];
    float x[2] = {1.0f + lane, 2.0f};
    pin(x);
    uniform[lane] = static_cast<uint32_t>(warp_uniform(static_cast<int>(lane) + 9)) + warp_uniform_register(4) + (x[0] != 1.0f + lane);
#endif
}

static bool fragments_are_right() {
    auto *stored = new_array<uint32_t>(256), *uniform = new_array<uint32_t>(32);
    fragments<<<1, 32>>>(stored, uniform);
    cudaDeviceSynchronize();
    bool right = true;
    // Lane l holds columns 2 (l % 4) and the next of row l / 4 of each matrix: a row is four words, of neighbouring lanes.
    for (uint32_t i = 0; i < 128; i++) right &= stored[i] == i && uniform[i % 32] == 13;
    // Transposed, odd rows are the upper halves, zeros, and word w of row j has column j of rows 2 w and 2 w + 1.
    for (uint32_t i = 0; i < 128; i++) {
        const uint32_t first = i / 32 * 32 + i % 4 * 8 + i % 32 / 8;
        right &= stored[128 + i] == (i / 4 % 2 ? 0 : first | (first + 4) << 16);
    }
    return right;
}

// Data that one block writes before it releases a flag, and another reads after it acquired it.
__global__ void flags(unsigned long long *flag, int *data, int *seen) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (blockIdx.x == 0) {
        __nanosleep(20000);
        *data = 41;
        store_release(flag, 5);
    } else {
        while (load_acquire(flag) != 5) {
        }
        *seen = *data + 1;
    }
#endif
}

static bool flags_are_right() {
    auto *flag = new_array<unsigned long long>(1);
    int *data = nullptr;
    cudaMalloc(&data, sizeof *data);
    unsigned long long *there = nullptr;
    cudaMalloc(&there, sizeof *there);
    cudaMemcpy(there, flag, sizeof *flag, cudaMemcpyDefault);
    auto *seen = new_array<int>(1);
    flags<<<2, 1>>>(there, data, seen);
    cudaDeviceSynchronize();
    return *seen == 42;
}

// One warpgroup gives registers back, and the other takes them and holds 160 numbers.
__global__ __launch_bounds__(256, 1) void registers(const float *from, float *to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (threadIdx.x < 128) {
        registers_down<40>();
        to[threadIdx.x] = from[0];
    } else {
        registers_up<232>();
        float x[160];
#pragma unroll
        for (int i = 0; i < 160; i++) x[i] = from[i] * static_cast<float>(threadIdx.x);
        pin(x);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 160; i++) sum += x[i];
        to[threadIdx.x] = sum;
    }
#endif
}

static bool registers_are_right() {
    auto *from = new_array<float>(160), *to = new_array<float>(256);
    for (int i = 0; i < 160; i++) from[i] = static_cast<float>(i + 1);
    registers<<<1, 256>>>(from, to);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 256; i++) right &= to[i] == (i < 128 ? 1.0f : 160.0f * 161 / 2 * i);
    return right;
}

void test_sm90() {
    check("mbarrier", barrier_phases_are_right());
    check("Ring", uses_of_a_ring_are_right());
    check("bulk_load, _store, _add", bulk_copies_are_right());
    check("tensor_load, tensor_store", boxes_are_right<false>());
    check("tensor_load, evict_first", boxes_are_right<true>());
    check("stmatrix_x4, _trans, warp_uniform", fragments_are_right());
    check("store_release, load_acquire", flags_are_right());
    check("registers_up, _down", registers_are_right());
}
