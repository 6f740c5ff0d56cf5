// SPDX-License-Identifier: Apache-2.0

#include "instructions.h"

namespace emulated {

namespace {

constexpr int kRows = 16, kDepths = 16, kMostColumns = 256; // of a warp's rows of a product

// A matrix in shared memory, by its descriptor: see operand() of cuda/ptx/sm90.cuh.
struct Operand {
    const Block &block;
    uint32_t start, leading, step;
    unsigned swizzle; // 0: none; rows of 128, 64 and 32 bytes
    Along along;

    Operand(uint64_t descriptor, Along along)
        : block(*current->block), start((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4),
          step((descriptor >> 32 & 0x3fff) << 4), swizzle(static_cast<unsigned>(descriptor >> 62)), along(along) {}

    // Element x of M or N, k of K.
    uint16_t at(unsigned x, unsigned k) const {
        const unsigned row_bytes = swizzle ? 256 >> swizzle : 16, in_row = row_bytes / 2;
        uint32_t place = start;
        if (along == kSize && swizzle)
            place += x / in_row * leading + k / 8 * step + k % 8 * row_bytes + x % in_row * 2;
        else if (along == kSize)
            place += x / 8 * step + k / 8 * leading + k % 8 * 16 + x % 8 * 2;
        else if (swizzle)
            place += x / 8 * step + x % 8 * row_bytes + k * 2;
        else
            place += x / 8 * step + k / 8 * leading + x % 8 * 16 + k % 8 * 2;
        if (swizzle) place ^= (place >> 7 & (row_bytes / 16 - 1)) << 4;
        if (place < kFirstByte || place + 2 > kFirstByte + block.dynamic_bytes) fail("wgmma reads %x, outside shared memory", place);
        uint16_t half;
        memcpy(&half, block.shared + place, sizeof half);
        return half;
    }
};

// Where element i of a lane's accumulator lies.
int row_of(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
int column_of(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

// Where half i of a lane's register lies in an 8 x 8 matrix, or in its transpose.
struct Place {
    int row, column;
};
Place place_of(int lane, int i, bool transposed) {
    const int outer = lane / 4, inner = lane % 4 * 2 + i;
    return transposed ? Place{inner, outer} : Place{outer, inner};
}

// Which lane holds element [row][k] of the left side of 16 x 16, and in which register and half of it.
uint16_t left_element(const uint32_t *const (&lanes)[32], int row, int k) {
    return lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2);
}

// A warp's rows of a product.
struct WarpRows {
    float *d[32];
    int length;
    float a[kRows][kDepths];
    Operand left, right;
    bool left_in_registers, accumulate, is_bf16;
    unsigned first_row;

    void operator()() {
        static float b[kMostColumns], sums[kRows][kMostColumns];
        const int columns = 2 * length;
        memset(sums, 0, sizeof sums);
        for (int k = 0; k < kDepths; k++) {
            for (int x = 0; x < columns; x++) b[x] = float_of(right.at(x, k), is_bf16);
            for (int row = 0; row < kRows; row++) {
                const float factor = left_in_registers ? a[row][k] : float_of(left.at(first_row + row, k), is_bf16);
                for (int x = 0; x < columns; x++) sums[row][x] += factor * b[x];
            }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < length; i++) d[lane][i] = (accumulate ? d[lane][i] : 0.0f) + sums[row_of(lane, i)][column_of(lane, i)];
    }
};

// Calls each(offset in the box, address or NULL outside the tensor) for the 16-byte chunks of a box.
template <class Each> void for_chunks(const CUtensorMap &map, const int (&at)[4], const Each &each) {
    uint32_t offset = 0;
    int64_t x[4];
    for (x[3] = at[3]; x[3] < at[3] + int64_t{map.box[3]}; x[3]++)
        for (x[2] = at[2]; x[2] < at[2] + int64_t{map.box[2]}; x[2]++)
            for (x[1] = at[1]; x[1] < at[1] + int64_t{map.box[1]}; x[1]++)
                for (x[0] = at[0]; x[0] < at[0] + int64_t{map.box[0]}; x[0] += 8, offset += 16) {
                    bool inside = true;
                    unsigned char *from = map.data + 2 * x[0];
                    for (int i = 0; i < 4; i++) {
                        inside &= x[i] >= 0 && x[i] < static_cast<int64_t>(map.sizes[i]);
                        if (i) from += x[i] * static_cast<int64_t>(map.strides[i - 1]);
                    }
                    each(offset, inside ? from : nullptr);
                }
}

uint32_t swizzled(uint32_t place) { return place ^ (place >> 7 & 7) << 4; }

CUresult encode(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *data, const cuuint64_t *sizes, const cuuint64_t *strides,
        const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
        CUtensorMapFloatOOBfill) {
    bool right = rank == 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] == 64;
    *map = {static_cast<unsigned char *>(data), {}, {}, {}};
    for (int i = 0; i < 4; i++) {
        map->sizes[i] = sizes[i];
        map->box[i] = box[i];
        right &= sizes[i] > 0 && sizes[i] <= UINT64_C(1) << 32 && box[i] > 0 && box[i] <= 256;
        if (i == 3) break;
        map->strides[i] = strides[i];
        right &= strides[i] % 16 == 0 && strides[i] < UINT64_C(1) << 40;
    }
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult name_device(char *name, int bytes, CUdevice) {
    snprintf(name, static_cast<size_t>(bytes), "emulated");
    return CUDA_SUCCESS;
}

} // namespace

uint16_t half_of(float x, bool is_bf16) {
    if (isnan(x)) return 0x7fff;
    if (is_bf16) return static_cast<uint16_t>((__float_as_uint(x) + 0x7fff + (__float_as_uint(x) >> 16 & 1)) >> 16);
    const auto half = static_cast<_Float16>(x);
    uint16_t bits;
    return memcpy(&bits, &half, sizeof bits), bits;
}

float float_of(uint16_t half, bool is_bf16) {
    if (is_bf16) return __uint_as_float(static_cast<unsigned>(half) << 16);
    _Float16 x;
    return memcpy(&x, &half, sizeof x), static_cast<float>(x);
}

void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
    struct Rows {
        uint32_t *r;
        const unsigned char *row;
    } rows = {r, shared_at(address, 16, 16)};
    by_warp("ldmatrix", ~0u, rows, [=](Rows *const(&lanes)[32]) {
        for (int m = 0; m < 4; m++)
            for (int lane = 0; lane < 32; lane++) {
                uint16_t pair[2];
                for (int i = 0; i < 2; i++) {
                    const auto [row, column] = place_of(lane, i, transposed);
                    memcpy(&pair[i], lanes[8 * m + row]->row + 2 * column, 2);
                }
                lanes[lane]->r[m] = pair[0] | pair[1] << 16;
            }
    });
}

void stmatrix(uint32_t address, const uint32_t (&r)[4], bool transposed) {
    struct Rows {
        const uint32_t *r;
        unsigned char *row;
    } rows = {r, shared_at(address, 16, 16)};
    by_warp("stmatrix", ~0u, rows, [=](Rows *const(&lanes)[32]) {
        for (int m = 0; m < 4; m++)
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 2; i++) {
                    const auto [row, column] = place_of(lane, i, transposed);
                    const auto half = static_cast<uint16_t>(lanes[lane]->r[m] >> 16 * i);
                    memcpy(lanes[8 * m + row]->row + 2 * column, &half, 2);
                }
    });
}

uint32_t movmatrix(uint32_t x) {
    uint32_t both[2] = {x, 0};
    by_warp("movmatrix", ~0u, both, [](auto &lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                const auto [row, column] = place_of(lane, i, true);
                (*lanes[lane])[1] |= ((*lanes[row * 4 + column / 2])[0] >> 16 * (column % 2) & 0xffff) << 16 * i;
            }
    });
    return both[1];
}

void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16) {
    struct Operands {
        float *d;
        const uint32_t *a, *b;
    } operands = {d, a, b};
    by_warp("mma", ~0u, operands, [=](Operands *const(&lanes)[32]) {
        const uint32_t *left[32];
        for (int lane = 0; lane < 32; lane++) left[lane] = lanes[lane]->a;
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = row_of(lane, i), column = column_of(lane, i);
                float sum = 0.0f;
                for (int k = 0; k < kDepths; k++)
                    sum += float_of(left_element(left, row, k), is_bf16) *
                           float_of(lanes[column * 4 + k % 8 / 2]->b[k / 8] >> 16 * (k % 2), is_bf16);
                lanes[lane]->d[i] += sum;
            }
    });
}

void wgmma(float *d, int length, const uint32_t *registers, uint64_t a, Along a_rows, uint64_t b, Along b_rows, bool accumulate,
        bool is_bf16) {
    struct Operands {
        float *d;
        const uint32_t *registers;
        uint64_t a, b;
        bool accumulate;
    } operands = {d, registers, a, b, accumulate};
    by_warp("wgmma", ~0u, operands, [=](Operands *const(&lanes)[32]) {
        WarpRows rows = {
                {}, length, {}, {a, a_rows}, {b, b_rows}, registers != nullptr, accumulate, is_bf16, current->warp->index % 4 * kRows};
        const uint32_t *left[32];
        for (int lane = 0; lane < 32; lane++) {
            if (lanes[lane]->a != a || lanes[lane]->b != b || lanes[lane]->accumulate != accumulate)
                fail("lanes of a warp multiply different operands");
            rows.d[lane] = lanes[lane]->d;
            left[lane] = lanes[lane]->registers;
        }
        for (int row = 0; registers && row < kRows; row++)
            for (int k = 0; k < kDepths; k++) rows.a[row][k] = float_of(left_element(left, row, k), is_bf16);
        begin_product({a, b, static_cast<uint64_t>(length), accumulate}, rows);
    });
}

void check_bulk(const void *shared, const void *global, uint32_t bytes) {
    shared_at(shared_address(shared), bytes, 16);
    if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("a bulk copy of %u bytes to or from %p", bytes, global);
}

uint32_t box_bytes(const CUtensorMap &map) { return 2 * map.box[0] * map.box[1] * map.box[2] * map.box[3]; }

void tensor_load(unsigned char *to, const CUtensorMap &map, uint64_t *barrier, const int (&at)[4]) {
    const uint32_t address = shared_address(to), start = address & 0xffffff;
    shared_at(address, box_bytes(map), 128);
    begin(block_at(address), [map, barrier, start, shared = to - start, at] {
        for_chunks(map, at, [&](uint32_t offset, const unsigned char *from) {
            unsigned char *chunk = shared + swizzled(start + offset);
            if (from)
                memcpy(chunk, from, 16);
            else
                memset(chunk, 0, 16);
        });
        barrier_complete(barrier, box_bytes(map));
    });
}

void tensor_store(const CUtensorMap &map, const void *from, const int (&at)[4]) {
    const uint32_t address = shared_address(from), start = address & 0xffffff;
    const unsigned char *shared = shared_at(address, box_bytes(map), 128) - start;
    begin_store([map, start, shared, at]() -> Task {
        std::vector<unsigned char> data(box_bytes(map));
        for (uint32_t offset = 0; offset < data.size(); offset += 16) memcpy(&data[offset], shared + swizzled(start + offset), 16);
        return [map, at, data = std::move(data)] {
            for_chunks(map, at, [&](uint32_t offset, unsigned char *to) {
                if (to) memcpy(to, &data[offset], 16);
            });
        };
    });
}

} // namespace emulated

cudaError_t cudaGetDriverEntryPointByVersion(
        const char *name, void **function, unsigned, unsigned, cudaDriverEntryPointQueryResult *found) {
    const bool is_name = strcmp(name, "cuDeviceGetName") == 0;
    *function = is_name ? reinterpret_cast<void *>(emulated::name_device) : reinterpret_cast<void *>(emulated::encode);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
