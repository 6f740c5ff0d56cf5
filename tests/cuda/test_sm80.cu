// SPDX-License-Identifier: Apache-2.0
//
// Each function of csrc/cuda/ptx/sm80.cuh alone, in one block.

#include <math.h>

#include "check.cuh"

using namespace sa;

// to: what lands in shared memory from 128 bytes of 1, 2, ..., with nothing where a copy is not valid.
__global__ void copies(const uint8_t *from, uint8_t *to) {
    __shared__ __align__(16) uint8_t s[128];
    s[threadIdx.x] = 0xab;
    __syncthreads();
    if (threadIdx.x == 0) {
        prefetch_l2(from, 128); // of which nothing is seen
        cp_async_16(shared_address(s), from, true);
        cp_async_16(shared_address(s + 16), from + 16, false);
        cp_async_commit();
        cp_async_16_once(shared_address(s + 32), from + 32, true);
        cp_async_16_once(shared_address(s + 48), from + 48, false);
        cp_async_commit();
        cp_async_8(shared_address(s + 64), from + 64, true);
        cp_async_8(shared_address(s + 72), from + 72, false);
        cp_async_commit();
        cp_async_4(shared_address(s + 80), from + 80, true);
        cp_async_4(shared_address(s + 84), from + 84, false);
        cp_async_commit();
        cp_async_wait_upto(3), to[128] = s[15];
        cp_async_wait_upto(2), to[129] = s[47];
        cp_async_wait_upto(1), to[130] = s[71];
        cp_async_wait_upto(0), to[131] = s[83];
        cp_async_wait<0>();
    }
    __syncthreads();
    to[threadIdx.x] = s[threadIdx.x];
}

static bool copies_are_right() {
    auto *from = new_array<uint8_t>(128), *to = new_array<uint8_t>(132);
    for (int i = 0; i < 128; i++) from[i] = static_cast<uint8_t>(i + 1);
    copies<<<1, 128>>>(from, to);
    cudaDeviceSynchronize();
    static const int zeros[][2] = {{16, 32}, {48, 64}, {72, 80}, {84, 88}};
    bool right = to[128] == 16 && to[129] == 48 && to[130] == 72 && to[131] == 84;
    for (int i = 0; i < 128; i++) {
        uint8_t want = i < 88 ? from[i] : 0xab;
        for (const auto &range : zeros) want = i >= range[0] && i < range[1] ? 0 : want;
        right &= to[i] == want;
    }
    return right;
}

// Two groups of 64 threads, each at a barrier of its own: what the last thread of a group wrote late, and whether any brought true.
__global__ void barriers(int *seen, int *any) {
    __shared__ volatile int s[2];
    const int group = threadIdx.x / 64;
    if (threadIdx.x % 64 == 63) {
        __nanosleep(20000);
        s[group] = group + 5;
    }
    bar_sync<64>(1 + group);
    seen[threadIdx.x] = s[group];
    any[threadIdx.x] = bar_any<64>(1 + group, threadIdx.x == 70);
}

static bool barriers_are_right() {
    auto *seen = new_array<int>(128), *any = new_array<int>(128);
    barriers<<<1, 128>>>(seen, any);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 128; i++) right &= seen[i] == i / 64 + 5 && any[i] == i / 64;
    return right;
}

// Four matrices, whose element [row][column] of matrix m is 64 m + 8 row + column.
__global__ void matrices(uint32_t *plain, uint32_t *transposed) {
    __shared__ __align__(16) uint16_t s[256];
    for (int i = threadIdx.x; i < 256; i += 32) s[i] = static_cast<uint16_t>(i);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, shared_address(s + 8 * threadIdx.x));
    for (int m = 0; m < 4; m++) plain[4 * threadIdx.x + m] = r[m];
    ldmatrix_x4_trans(r, shared_address(s + 8 * threadIdx.x));
    for (int m = 0; m < 4; m++) transposed[4 * threadIdx.x + m] = r[m];
}

static bool matrices_are_right() {
    auto *plain = new_array<uint32_t>(128), *transposed = new_array<uint32_t>(128);
    matrices<<<1, 32>>>(plain, transposed);
    cudaDeviceSynchronize();
    bool right = true;
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < 4; m++) {
            const uint32_t row = lane / 4, pair = lane % 4 * 2, low = 64 * m + 8 * row + pair, high = low + 1;
            right &= plain[4 * lane + m] == (low | high << 16);
            right &= transposed[4 * lane + m] == (64 * m + 8 * pair + row | (64 * m + 8 * (pair + 1) + row) << 16);
        }
    return right;
}

// d[16 x 8] = 1 + a[16 x 16] b[16 x 8], all of small().
template <class Element> __global__ void products(const float *a, const float *b, float *d) {
    const int row = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
    const auto of_a = [&](int r, int c) { return pack_halves<Element>(a[16 * r + c], a[16 * r + c + 1]); };
    const auto of_b = [&](int r) { return pack_halves<Element>(b[8 * r + row], b[8 * (r + 1) + row]); };
    const uint32_t left[4] = {of_a(row, pair), of_a(row + 8, pair), of_a(row, pair + 8), of_a(row + 8, pair + 8)};
    float sum[4] = {1, 1, 1, 1};
    mma_m16n8k16<Element>(sum, left, of_b(pair), of_b(pair + 8));
    for (int i = 0; i < 4; i++) d[8 * (row + 8 * (i / 2)) + pair + i % 2] = sum[i];
}

template <class Element> static bool products_are_right() {
    auto *a = new_array<float>(256), *b = new_array<float>(128), *d = new_array<float>(128);
    for (int i = 0; i < 256; i++) a[i] = small(i / 16, i % 16);
    for (int i = 0; i < 128; i++) b[i] = small(i % 8 + 3, i / 8);
    products<Element><<<1, 32>>>(a, b, d);
    cudaDeviceSynchronize();
    bool right = true;
    for (int i = 0; i < 128; i++) {
        float want = 1;
        for (int x = 0; x < 16; x++) want += a[i / 8 * 16 + x] * b[8 * x + i % 8];
        right &= d[i] == want;
    }
    return right;
}

// Every half widened, and rounded back; and the halves' neighbours and middles rounded, which is to even.
template <class Element> __global__ void roundings(float *wide, uint32_t *packed, uint32_t *middles) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    wide[i] = widen<Element>(static_cast<uint16_t>(i));
    packed[i] = pack_halves<Element>(wide[i], 1.0f);
    const float above = widen<Element>(static_cast<uint16_t>(i + 1));
    middles[i] = pack_halves<Element>(0.5f * wide[i] + 0.5f * above, 0.0f) & 0xffff;
}

template <class Element> static bool roundings_are_right() {
    const uint32_t count = 65536;
    auto *wide = new_array<float>(count);
    auto *packed = new_array<uint32_t>(count), *middles = new_array<uint32_t>(count);
    roundings<Element><<<count / 256, 256>>>(wide, packed, middles);
    cudaDeviceSynchronize();
    bool right = true;
    const uint32_t infinity = kExponent<Element>;
    for (uint32_t i = 0; i < count; i++) {
        if ((i & 0x7fff) > infinity) { // NaN
            right &= isnan(wide[i]) && (packed[i] & 0x7fff) > infinity;
            continue;
        }
        right &= bits_of(Element(), wide[i]) == i && packed[i] == (i | static_cast<uint32_t>(bits_of(Element(), 1.0f)) << 16);
        if ((i & 0x7fff) < infinity - 1) right &= middles[i] == i + i % 2; // the even one of the two neighbours
    }
    return right;
}

// approximations[i] of inputs[i] by 2^x and 1 / x, and the dot product of 8 pairs.
__global__ void numbers(const float *inputs, float *powers, float *reciprocals, float *dots) {
    const float x = inputs[threadIdx.x];
    powers[threadIdx.x] = exp2_approx(x);
    reciprocals[threadIdx.x] = reciprocal_approx(x);
    if (threadIdx.x) return;
    uint32_t a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = pack_halves<Bf16>(2 * i + 1, 2 * i + 2), b[i] = pack_halves<Bf16>(3, -i);
    dots[0] = dot<Bf16>({a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]});
    for (int i = 0; i < 4; i++) a[i] = pack_halves<Fp16>(2 * i + 1, 2 * i + 2), b[i] = pack_halves<Fp16>(3, -i);
    dots[1] = dot<Fp16>({a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]});
}

static bool numbers_are_right() {
    auto *inputs = new_array<float>(256), *powers = new_array<float>(256), *reciprocals = new_array<float>(256),
         *dots = new_array<float>(2);
    for (int i = 0; i < 254; i++) inputs[i] = -120.0f + i * 0.93f;
    inputs[254] = -INFINITY;
    inputs[255] = INFINITY;
    numbers<<<1, 256>>>(inputs, powers, reciprocals, dots);
    cudaDeviceSynchronize();
    bool right = powers[254] == 0 && isinf(powers[255]) && reciprocals[255] == 0 && dots[0] == 8 && dots[1] == 8;
    for (int i = 0; i < 254; i++) {
        right &= fabs(powers[i] / exp2(static_cast<double>(inputs[i])) - 1) < 4e-7;
        right &= fabs(reciprocals[i] * static_cast<double>(inputs[i]) - 1) < 4e-7;
    }
    return right;
}

// Of lane l: the sum and the maximum over its four lanes of small(l, 0), and four elements turned within them.
__global__ void shuffles(float *sums, float *largest, uint32_t *turned) {
    const int lane = threadIdx.x;
    const float x = (lane * 7) % 11 - 5;
    sums[lane] = quad_sum(x);
    largest[lane] = quad_max(x);
    uint32_t row[4];
    for (uint32_t i = 0; i < 4; i++) row[i] = static_cast<uint32_t>(10 * lane) + i;
    quad_transpose(row);
    for (int i = 0; i < 4; i++) turned[4 * lane + i] = static_cast<uint32_t>(pinned(static_cast<int>(row[i])));
}

static bool shuffles_are_right() {
    auto *sums = new_array<float>(32), *largest = new_array<float>(32);
    auto *turned = new_array<uint32_t>(128);
    shuffles<<<1, 32>>>(sums, largest, turned);
    cudaDeviceSynchronize();
    bool right = true;
    for (int lane = 0; lane < 32; lane++) {
        float sum = 0, top = -100;
        for (int other = lane / 4 * 4; other < lane / 4 * 4 + 4; other++) sum += small(other, 0), top = fmaxf(top, small(other, 0));
        right &= sums[lane] == sum && largest[lane] == top;
        for (uint32_t i = 0; i < 4; i++) right &= turned[4 * lane + i] == 10 * (lane / 4 * 4 + i) + lane % 4;
    }
    return right;
}

// found: maxima taken and not taken, and two sums, of eight numbers in four chains. halves: 0 * (1, infinity) + 2 and 0 * (NaN, 1) + 2.
template <class Element> __global__ void chains(const float *numbers, float *found, uint32_t *halves) {
    float top[4] = {1, 1, 1, 1}, kept[4] = {1, 1, 1, 1}, a[4] = {}, b[4] = {}, x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = numbers[i], y[i] = 3 * x[i];
    const bool yes = __all_sync(0xffffffffu, thread_again() == threadIdx.x);
    max_if(yes, top, x);
    max_if(!yes, kept, x);
    add_to_either(!yes, a, b, x);
    add_to_either(yes, a, b, y);
    for (int i = 0; i < 4 && threadIdx.x == 0; i++) found[i] = top[i], found[4 + i] = kept[i], found[8 + i] = a[i], found[12 + i] = b[i];
    const uint32_t two = pack_halves<Element>(2, 2);
    halves[0] = add_times_zero<Element>(two, pack_halves<Element>(1, INFINITY));
    halves[1] = add_times_zero<Element>(two, pack_halves<Element>(NAN, 1));
}

template <class Element> static bool chains_are_right() {
    auto *numbers = new_array<float>(8), *found = new_array<float>(16);
    auto *halves = new_array<uint32_t>(2);
    for (int i = 0; i < 8; i++) numbers[i] = small(i, 3);
    chains<Element><<<1, 32>>>(numbers, found, halves);
    cudaDeviceSynchronize();
    const uint32_t two = bits_of(Element(), 2), exponent = kExponent<Element>;
    bool right = (halves[0] & 0xffff) == two && (halves[0] >> 16 & 0x7fff) > exponent && halves[1] >> 16 == two &&
                 (halves[1] & 0x7fff) > exponent;
    for (int i = 0; i < 4; i++) {
        const float x = small(i, 3), y = small(i + 4, 3);
        right &= found[i] == fmaxf(1, fmaxf(x, y)) && found[4 + i] == 1 && found[8 + i] == x + y && found[12 + i] == 3 * (x + y);
    }
    return right;
}

// Every block writes a number, then counts itself; the last one reads what all others wrote.
__global__ void arrivals(int32_t *written, unsigned long long *counter, int *order, int32_t *sum) {
    __shared__ unsigned long long before;
    if (threadIdx.x == 0) written[blockIdx.x] = static_cast<int32_t>(blockIdx.x) + 1;
    __syncthreads();
    if (threadIdx.x == 0) before = add_acquire_release(counter, 3);
    __syncthreads();
    if (threadIdx.x) return;
    order[blockIdx.x] = static_cast<int>(before);
    if (before != 3 * (gridDim.x - 1)) return;
    for (unsigned b = 0; b < gridDim.x; b++) *sum += load_relaxed(written + b);
}

static bool arrivals_are_right() {
    const int blocks = 500;
    auto *written = new_array<int32_t>(blocks), *sum = new_array<int32_t>(1);
    auto *counter = new_array<unsigned long long>(1);
    auto *order = new_array<int>(blocks);
    arrivals<<<blocks, 32>>>(written, counter, order, sum);
    cudaDeviceSynchronize();
    bool seen[blocks] = {}, right = *counter == 3 * blocks && *sum == blocks * (blocks + 1) / 2;
    for (int b = 0; b < blocks; b++) right &= order[b] % 3 == 0 && !seen[order[b] / 3], seen[order[b] / 3] = true;
    return right;
}

__global__ void first_kernel(int *value) {
    let_next_kernel_start();
    __nanosleep(200000);
    *value = 7;
}

__global__ void second_kernel(const int *value, int *seen) {
    wait_for_previous_kernel();
    *seen = may_start_early() ? *value : -*value;
}

static bool early_starts_are_right() {
    auto *seen = new_array<int>(1);
    int *value = nullptr; // on the device alone: a page that comes from the host would be waited for
    cudaMalloc(&value, sizeof *value);
    cudaMemset(value, 0, sizeof *value);
    cudaDeviceSynchronize();
    first_kernel<<<1, 1>>>(value);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    config.attrs = &early;
    config.numAttrs = 1;
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    if (major < 9) config.numAttrs = 0;
    cudaLaunchKernelEx(&config, second_kernel, static_cast<const int *>(value), seen);
    cudaDeviceSynchronize();
    return *seen == (major < 9 ? -7 : 7);
}

void test_sm80() {
    check("cp_async", copies_are_right());
    check("bar_sync, bar_any", barriers_are_right());
    check("ldmatrix_x4, _trans", matrices_are_right());
    check("mma_m16n8k16, bf16", products_are_right<Bf16>());
    check("mma_m16n8k16, fp16", products_are_right<Fp16>());
    check("pack_halves, widen, bf16", roundings_are_right<Bf16>());
    check("pack_halves, widen, fp16", roundings_are_right<Fp16>());
    check("exp2, reciprocal, dot", numbers_are_right());
    check("chains, 0 * x, bf16", chains_are_right<Bf16>());
    check("chains, 0 * x, fp16", chains_are_right<Fp16>());
    check("quad_sum, _max, _transpose", shuffles_are_right());
    check("add_acquire_release", arrivals_are_right());
    check("wait_for_previous_kernel", early_starts_are_right());
}
