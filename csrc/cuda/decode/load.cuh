// SPDX-License-Identifier: Apache-2.0
//
// Loads of a decode block: tiles of K and V by cp.async, through the block table; Q into registers or by cp.async.
#pragma once

#include "cuda/decode/tile.cuh"
#include "cuda/decode/work.cuh"

namespace sa::decode {

__device__ __forceinline__ int64_t wide(int32_t x) { return x; }

// Copies a team's tiles n, n + kTeams, .. in this order. If no tile spans two pages, lane l holds the offsets of the l-th of 32 tiles and
// prefetches the page of the l-th of the next 32; otherwise it holds the page of key l % 16 of the next tile. So only the first copy waits
// for the block table. A contiguous cache has one page a sequence.
template <class C> struct Loader {
    static constexpr int kRowStep = C::kTeamThreads / C::kRowThreads, kAhead = 2;
    const typename C::Arguments &params;
    const sa_key_tiles tiles;
    const int32_t *pages;  // the sequence's row of the block table; NULL for a contiguous cache
    const uint16_t *k, *v; // the thread's row and first chunk of the kv head in page 0; its others lie kRowThreads apart
    int64_t k_at, v_at;    // offsets of the lane's tile from k and v, in host memory too; -1 if it has no page
    int32_t batch, last, page;
    int32_t full, num_full; // every row sees every key of the stream's tiles [full, full + num_full)
    int row, chunk, holder; // holder: the lane that holds the next tile
    bool real;              // the chunk lies within head_dim; always with kNarrow, where copy() looks
    bool bad_page = false;

    __device__ __forceinline__ bool is_full(int32_t n) const { return static_cast<uint32_t>(n - full) < static_cast<uint32_t>(num_full); }

    __device__ __forceinline__ int32_t lanes_key(int32_t n) const {
        const int lane = threadIdx.x % 32;
        return params.whole_tiles ? sa_key_tile_at(&tiles, n + lane * C::kTeams) * kTileK
                                  : sa_key_tile_at(&tiles, n) * kTileK + lane % kTileK;
    }

    __device__ __forceinline__ bool has_tile(int32_t n) const { return n + static_cast<int>(threadIdx.x % 32) * C::kTeams < last; }

    // The page that the lane holds when tile n comes next; not read for a key that no row sees.
    __device__ __forceinline__ int32_t find_page(int32_t n) const {
        if (!pages) return batch;
        const int32_t key = lanes_key(n);
        const bool seen = params.whole_tiles ? has_tile(n) : n < last && is_seen(tiles, key);
        return seen ? load_relaxed(pages + params.page_index(key)) : 0;
    }

    __device__ __forceinline__ void check_page(int32_t its_page, bool seen) { bad_page |= !params.has_page(its_page) & seen; }

    // Sets k_at and v_at to key, in page its_page.
    __device__ __forceinline__ void locate(int32_t its_page, int32_t key) {
        const int32_t slot = key - params.page_index(key) * params.page_size;
        const bool inside = params.has_page(its_page);
        k_at = inside ? its_page * params.k_page + wide(slot) * params.k_row : -1;
        v_at = inside ? its_page * params.v_page + wide(slot) * params.v_row : -1;
        if constexpr (C::kExtras) {
            const bool on_host = inside && its_page >= params.first_host_page;
            k_at += on_host ? params.k_gap : 0;
            v_at += on_host ? params.v_gap : 0;
        }
    }

    // Copies the thread's chunks of a key's K and V; writes zeros and reads nothing unless `seen`. to: of K's first one, in row tile_row.
    __device__ __forceinline__ void copy(uint32_t to, int tile_row, const uint16_t *k_from, const uint16_t *v_from, bool seen) const {
        const uint32_t to_v = to + C::kTileBytes - tile_row * (C::kRowBytes - C::kRowBytesV);
#pragma unroll
        for (int h = 0; h < C::kHeads; h++)
#pragma unroll
            for (int c = 0; c < C::kChunks; c += C::kRowThreads)
                cp_async_16_once(to + h * C::kHeadBytes + c * 16, k_from + h * (params.k_head / 2) + c * 8,
                        C::kNarrow ? seen && (chunk + c) * 8 < params.head_dim : seen);
#pragma unroll
        for (int h = 0; h < C::kHeads; h++)
#pragma unroll
            for (int c = 0; c < C::kChunksV; c += C::kRowThreads)
                cp_async_16_once(to_v + h * C::kHeadBytes + c * 16, v_from + h * (params.v_head / 2) + c * 8,
                        C::kNarrow ? seen && (chunk + c) * 8 < params.head_dim_v : seen);
    }

    // Copies tile n. kBegins: one of the first tiles, for which all but the copies is done before the wait for the preceding kernel. A key
    // that no row sees, or whose page is unmapped, becomes zeros.
    template <bool kBegins> __device__ __forceinline__ void load(uint32_t to, int32_t n, Speculation &speculation) {
        if (__builtin_expect(params.whole_tiles, true)) {
            const int64_t k_offset = __shfl_sync(0xffffffffu, k_at, holder), v_offset = __shfl_sync(0xffffffffu, v_at, holder);
            uint32_t seen = (C::kExtras ? k_offset != -1 : k_offset >= 0) && real ? UINT32_MAX : 0;
            if (__builtin_expect(!is_full(n), false)) {
                const int32_t key = sa_key_tile_at(&tiles, n) * kTileK + row;
#pragma unroll
                for (int i = 0; i < kTileK; i += kRowStep)
                    if (!is_seen(tiles, key + i)) seen &= ~(1u << i);
            }
            const uint16_t *k_from = k + k_offset, *v_from = v + v_offset;
            to = swizzled(to, C::kRowBytes, row, chunk);
            if constexpr (kBegins) speculation.wait();
#pragma unroll
            for (int i = 0; i < kTileK; i += kRowStep) {
                copy(rows_on<C::kRowBytes>(to, i), row + i, k_from, v_from, seen >> i & 1);
                k_from += wide(params.k_row) * kRowStep;
                v_from += wide(params.v_row) * kRowStep;
            }
            if (__builtin_expect(++holder % 16 != 0, true)) return;
            if (holder == 16) {
                page = find_page(n + 17 * C::kTeams);
            } else {
                check_page(page, has_tile(n + C::kTeams));
                next_tiles(n + C::kTeams);
            }
            return;
        }
        const int32_t key = sa_key_tile_at(&tiles, n) * kTileK + row;
        if (kBegins && speculation.before_wait) {
            speculation.wait();
            page = find_page(n);
        }
#pragma unroll 1
        for (int i = 0; i < kTileK; i += kRowStep) {
            const int32_t its_page = __shfl_sync(0xffffffffu, page, row + i);
            const bool seen = is_seen(tiles, key + i);
            check_page(its_page, seen);
            locate(its_page, key + i);
            copy(swizzled(to, C::kRowBytes, row + i, chunk), row + i, k + k_at - wide(row) * params.k_row,
                    v + v_at - wide(row) * params.v_row, seen && real && (C::kExtras ? k_at != -1 : k_at >= 0));
        }
        page = find_page(n + C::kTeams);
    }

    // Prefetches the first tiles into the L2 cache. Safe before the wait: the preceding kernel writes to the same cache.
    __device__ __forceinline__ void fetch_ahead(int32_t n, int32_t kv_head) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % C::kTeamThreads / 32;
        const bool of_k = lane < kTileK;
        const uint16_t *from = of_k ? params.k + wide(kv_head) * params.k_head + wide(lane) * params.k_row
                                    : params.v + wide(kv_head) * params.v_head + wide(lane - kTileK) * params.v_row;
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int64_t k_offset = __shfl_sync(0xffffffffu, k_at, i), v_offset = __shfl_sync(0xffffffffu, v_at, i);
            if (i % C::kTeamWarps == warp && k_offset >= 0 && is_full(n + i * C::kTeams))
                for (int h = 0; h < C::kHeads; h++)
                    prefetch_l2(from + (of_k ? k_offset + h * (params.k_head / 2) : v_offset + h * (params.v_head / 2)),
                            (C::kNarrow && !of_k ? params.head_dim_v : params.head_dim) * static_cast<uint32_t>(sizeof(uint16_t)));
        }
    }

    __device__ __forceinline__ void next_tiles(int32_t n) {
        locate(page, lanes_key(n));
        holder = 0;
    }

    // `page` has been read again; before: the page that the first tiles were located by. True if that was stale.
    __device__ __forceinline__ bool check_first_pages(int32_t n, int32_t before) {
        if (!params.whole_tiles) return false; // pages are read after the wait alone
        check_page(page, has_tile(n));
        return page != before;
    }

    __device__ __forceinline__ Loader(const typename C::Arguments &params_, const Part &part, int32_t n)
        : params(params_), tiles(part.stream.tiles), batch(part.batch) {
        const int thread = threadIdx.x % C::kTeamThreads;
        row = thread / C::kRowThreads;
        chunk = thread % C::kRowThreads;
        const sa_range range = sa_full_key_tiles(&tiles);
        full = range.begin;
        num_full = max(0, range.end - range.begin);
        real = C::kNarrow || chunk * 8 < params.head_dim;
        last = min(part.last, sa_key_tile_count(&tiles));
        pages = params.block_table ? params.block_table + batch * params.block_table_stride : nullptr;
        page = find_page(n);
        k = params.k + wide(part.kv_head) * params.k_head + wide(row) * params.k_row + chunk * 8;
        v = params.v + wide(part.kv_head) * params.v_head + wide(row) * params.v_row + chunk * 8;
        if (params.whole_tiles) next_tiles(n);
    }
};

// A row's token in its sequence and its q head.
struct TokenHead {
    int32_t token, head;
};

__device__ __forceinline__ TokenHead token_head(const Part &part, const Params &params, int row) {
    const int32_t r = part.stream.row_begin + row, token = static_cast<int32_t>(sa_divide(r, params.by_group));
    return {token, part.kv_head * params.group + r - token * params.group};
}

__device__ __forceinline__ const uint16_t *query_row(const Part &part, const Params &params, int row) {
    const TokenHead at = token_head(part, params, row);
    return params.q + part.batch * params.q_batch + wide(at.token) * params.q_row + wide(at.head) * params.q_head;
}

// Loads Q into each warp's registers, or by cp.async to shared memory, where a barrier of the block must follow. Rows past the stream's are
// copies of its last row, or zeros; their results are discarded.
template <class C>
__device__ __forceinline__ void load_queries(
        typename C::Rows &rows, uint32_t to, const uint16_t *first_row, const Part &part, const Params &params) {
    if constexpr (C::kQueriesInRegisters) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < C::kEights; i++) {
            for (int x = 0; x < C::kHeadDim / 8; x++) set_query(rows, i, x, 0);
            if (8 * i >= part.stream.num_rows) continue;
            const uint16_t *row = i ? query_row(part, params, min(lane / 4 + 8, part.stream.num_rows - 1)) : first_row;
            const auto *from = reinterpret_cast<const uint32_t *>(row) + lane % 4;
            asm("" : "+l"(from)); // compiler fence: one address, the others at constant offsets
#pragma unroll
            for (int x = 0; x < C::kHeadDim / 8; x++)
                if (8 * x < params.head_dim) set_query(rows, i, x, from[4 * x]);
        }
    } else {
#pragma unroll 1
        for (int x = threadIdx.x; x < kTileQ * C::kChunks; x += C::kThreads) {
            const int row = x / C::kChunks, chunk = x % C::kChunks;
            cp_async_16(swizzled(to, C::kRowBytes, row, chunk), query_row(part, params, row) + chunk * 8,
                    row < part.stream.num_rows && chunk * 8 < params.head_dim);
        }
    }
}

} // namespace sa::decode
