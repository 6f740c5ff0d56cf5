// SPDX-License-Identifier: Apache-2.0
//
// Where elements lie: in the registers of an accumulator, and in shared memory.
//
// wgmma gives warp w of a warpgroup rows 16 w to 16 w + 15 of 64, mma.sync each warp 16 rows a block. Lane l of the warp holds two of the
// 16 rows, and of each row two neighbouring columns in every eight:
//
//     element i    row l / 4 + 8 (i / 2 % 2)    column 8 (i / 4) + 2 (l % 4) + i % 2
//
// A tile in shared memory is rows of 16-bit elements whose 16-byte chunk c lies at c ^ (row % 8), so that ldmatrix and stmatrix meet no
// bank twice. TMA writes and wgmma reads the same layout for rows of 128 bytes.
#pragma once

#include <stdint.h>

namespace sa {

constexpr int kRowBytes = 128; // of a row of 64 elements, the longest that TMA swizzles

// The i-th of the thread's rows, 2 a block of 16, in its warp's rows.
__device__ __forceinline__ int fragment_row(unsigned lane, int i) { return 8 * i + lane / 4; }
__device__ __forceinline__ int fragment_row(int i) { return fragment_row(threadIdx.x % 32, i); }

// The first row of the thread's warp in the warpgroup's 64.
template <class Int> __device__ __forceinline__ Int warp_first_row(Int thread) { return thread % 128 / 32 * 16; }

// The i-th of the thread's rows in the warpgroup's 64, for a thread of [0, 128).
__device__ __forceinline__ int warpgroup_row(unsigned thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * i; }
__device__ __forceinline__ int warpgroup_row(int i) { return warpgroup_row(threadIdx.x % 128, i); }

// The first of the thread's columns.
__device__ __forceinline__ int fragment_column(unsigned thread) { return 2 * (thread % 4); }
__device__ __forceinline__ int fragment_column() { return fragment_column(threadIdx.x); }

// Of element i: which of the thread's two rows, and how far from its first column.
__device__ __forceinline__ constexpr int element_row(int i) { return i / 2 & 1; }
__device__ __forceinline__ constexpr int element_column(int i) { return 8 * (i / 4) + (i & 1); }

// Byte offset of a 16-byte chunk: in its row, for which the low three bits of `row` suffice, and in the tile.
__device__ __forceinline__ int chunk_offset(int row, int chunk) { return (chunk ^ row % 8) << 4; }

template <int kBytes = kRowBytes> __device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kBytes + ((chunk ^ (row & 7)) << 4);
}

// The chunk's address in the tile at `tile`.
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row_bytes, int row, int chunk) {
    return tile + row * row_bytes + ((chunk ^ (row & 7)) << 4);
}

// From the address of chunk c of a row, c < 2, to that of chunk c + 2 n. Halves of 64 elements lie half_bytes apart.
__device__ __forceinline__ uint32_t pairs_on(uint32_t address, int n, uint32_t half_bytes = kRowBytes) {
    return (address ^ (n % 4 << 5)) + n / 4 * half_bytes;
}

// From the address of a chunk of row r to that of row r + n, if r and n share none of their low three bits.
template <int kBytes = kRowBytes> __device__ __forceinline__ uint32_t rows_on(uint32_t address, int n) {
    return (address ^ (n % 8 << 4)) + n * kBytes;
}

// The row of 64 and the chunk, 0 or 1, whose address a thread passes to stmatrix_x4, which stores 16 columns of an accumulator.
template <class Int> __device__ __forceinline__ int store_row(Int thread) { return warp_first_row(thread) + (thread & 15); }
template <class Int> __device__ __forceinline__ int store_chunk(Int thread) { return thread % 32 >> 4; }

// ldmatrix and stmatrix take four 8 x 8 matrices, lane l the address of row l % 8 of matrix l / 8. Of 16 rows and two chunks, the left side
// of a product and an accumulator go down the rows first, the right side of a product across the chunks.
__device__ __forceinline__ int left_row(unsigned lane) { return lane % 16; }
__device__ __forceinline__ int left_chunk(unsigned lane) { return lane / 16; }
__device__ __forceinline__ int right_row(unsigned lane) { return (lane & 7) + ((lane >> 4) << 3); }
__device__ __forceinline__ int right_chunk(unsigned lane) { return (lane >> 3) & 1; }

// Zeroes rows [first, end) of each of the kPieces pieces of a tile, which have kRows rows. By kThreads threads.
template <int kPieces, int kRows, int kThreads> __device__ __forceinline__ void zero_rows(unsigned char *tile, int first, int end) {
    for (int piece = 0; piece < kPieces; piece++)
        for (int at = first * kRowBytes + static_cast<int>(threadIdx.x % kThreads) * 16; at < end * kRowBytes; at += kThreads * 16)
            *reinterpret_cast<uint4 *>(tile + piece * kRows * kRowBytes + at) = uint4{};
}

} // namespace sa
