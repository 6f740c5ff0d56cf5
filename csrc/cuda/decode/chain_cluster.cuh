// SPDX-License-Identifier: Apache-2.0
//
// A chunk of a stream, or a stream, of decode_chain.cu by a cluster: block r has columns [16 r, 16 r + 16) of O, for all keys, and scores
// key tiles r, r + kCluster,
// .. of the forward for all blocks.
//
//     scorers, a warp for each 16 keys of a tile    K | S | weights, rounded -> the tile's stage in every block; unrounded -> the adder
//     adder                                         a tile's sums of weights -> its stage in every block
//     loaders, four warps                           V of the block's columns, of every tile
//     chain                                         O += P V, tile by tile, sum += the tile's sums
//
// Only the chain is serial: one product of 16 keys after another, and a sum a tile. All else of a tile depends on its keys and the pivots.
// Every block finds the pivots itself, from the first tiles. Where a sum of weights exceeds kLarge the chain remembers that tile, and the
// state before it; the run goes on to its end, for nothing, and a second one begins at that tile with a new pivot.
#pragma once

#include "cuda/decode/chain.cuh"
#include "cuda/tile/pipe.cuh"

namespace sa::decode {

template <class Element_, int kHeadDim_> struct ClusterConfig : TileSizes<kHeadDim_> {
    using Element = Element_;
    using TileSizes<kHeadDim_>::kHeadDim, TileSizes<kHeadDim_>::kTileBytes;
    using Arguments = ChainArguments;
    static constexpr bool kExtras = true, kClusters = true; // kClusters: request_rows reads no counter
    static constexpr int kCluster = kHeadDim / 16, kMostRows = 8;
    static constexpr int kSteps = kHeadDim == 64 ? 8 : 5, kWalkKeys = kSteps * kTileK; // of a key tile of the forward
    static_assert(kWalkKeys == ChainConfig<Element, kHeadDim, 8>::kPivotKeys, "the forward's tiles");
    static constexpr int kScorers = kSteps, kLoaders = 4, kAdder = kScorers, kChain = kScorers + 1, kFirstLoader = kScorers + 2; // warps
    static constexpr int kWarps = kFirstLoader + kLoaders, kThreads = 32 * kWarps;
    static constexpr int kValueRow = 32, kValueBytes = kWalkKeys * kValueRow; // of the block's columns
    static constexpr int kRounds = 2, kStages = kRounds * kCluster;           // of weights and values; a round: a tile of each block
    static_assert((kStages & (kStages - 1)) == 0, "the chain has no time to divide");
    static constexpr int kKeyStages = kHeadDim == 64 ? 3 : 2;
    static constexpr int kAhead = kHeadDim == 64 ? 4 : 5; // k16 steps
    // Of a key tile.
    struct WeightStage {
        uint2 p[kSteps][32]; // weights as the right side of P V
        float totals[32];    // lane l: sum of class l / 8 of row 2 (l % 4) + l / 4 % 2
    };
    struct Smem {
        alignas(128) unsigned char keys[kScorers][kKeyStages][kTileBytes];
        unsigned char values[kStages][kValueBytes];
        WeightStage sent[kStages];
        float4 weights[kSteps][32];
        float out[kMostRows][16], before[5][32];
        Barriers<kStages> full;    // weights and values
        Barriers<kRounds> empty;   // the stages of the block's own tiles, in every block
        Barriers<kStages> v_empty; // values
        Barriers<1> weights_full, weights_empty;
        Part part;
        Row rows[kMostRows], seen_by_all;
        bool is_last;
        float s_aux[kMostRows], tops[kScorers][kMostRows], sum[kMostRows];
        alignas(8) float pivot[kMostRows];
        int32_t stop[2]; // the tile where the next run begins, of even and odd runs: a slow warp may still read one while the next is found
        uint32_t large;  // rows whose pivots it moves
    };
    static_assert(2 * (sizeof(Smem) + 1024) <= 228 * 1024, "two blocks an SM");
};

// What all roles know of the stream. A run takes tiles [first, num_tiles) of the walk; `done` tiles were taken before it.
template <class C> struct ClusterStream {
    using Smem = typename C::Smem;
    Smem &smem;
    const typename C::Arguments &params;
    const sa_key_tiles &tiles;
    const int32_t num_tiles, batch;
    const int32_t *const pages; // NULL for a contiguous cache
    const uint32_t rank;

    __device__ __forceinline__ ClusterStream(Smem &smem, const typename C::Arguments &params)
        : smem(smem), params(params), tiles(smem.part.stream.tiles), num_tiles(smem.part.last), batch(smem.part.batch),
          pages(params.block_table ? params.block_table + batch * params.block_table_stride : nullptr), rank(blockIdx.x % C::kCluster) {}

    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ int num_rows() const { return smem.part.stream.num_rows; }

    __device__ __forceinline__ int32_t first_key(int32_t i) const { return sa_key_tile_at(&tiles, i) * C::kWalkKeys; }

    __device__ __forceinline__ bool is_seen(int32_t key) const {
        return (key < tiles.sink_keys) | ((key >= tiles.band.begin) & (key < tiles.band.end));
    }

    // Whether any row sees any of 16 keys from `key` on.
    __device__ __forceinline__ bool is_any_seen(int32_t key) const {
        return (key < tiles.sink_keys) | ((key + kTileK > tiles.band.begin) & (key < tiles.band.end));
    }

    // Whether each key of a tile is seen; says no in tiles of sink tokens, which are few.
    __device__ __forceinline__ bool is_all_seen(int32_t key) const {
        return (key >= tiles.band.begin) & (key + C::kWalkKeys <= tiles.band.end);
    }

    // Of 16 keys from `key` on.
    __device__ __forceinline__ bool all_see(int32_t key) const {
        const Row &keys = smem.seen_by_all;
        return ((key >= keys.begin) & (key + kTileK <= keys.end)) | (key + kTileK <= keys.sink_end);
    }

    __device__ __forceinline__ int32_t page_index(int32_t key) const { return static_cast<int32_t>(sa_divide(key, params.by_page_size)); }

    __device__ __forceinline__ bool is_inside(int32_t page) const {
        return static_cast<uint32_t>(page) < static_cast<uint32_t>(params.num_pages);
    }

    __device__ __forceinline__ int32_t page_at(int32_t key) const { return pages ? load_relaxed(pages + page_index(key)) : batch; }

    // -1 for a key that no row sees.
    __device__ __forceinline__ int32_t page_of(int32_t key) const { return is_seen(key) ? page_at(key) : -1; }

    // Of a key's row in its page, in elements.
    __device__ __forceinline__ int64_t offset_of(int32_t page, int32_t key, int64_t page_stride, int32_t row_stride, int64_t gap) const {
        const int32_t slot = key - page_index(key) * params.page_size;
        return page * page_stride + wide(slot) * row_stride + (page >= params.first_host_page ? gap : 0);
    }

    // Waits until all blocks have read the previous tile in the stage of tile n, one of this block's.
    __device__ __forceinline__ void acquire_stage(uint32_t n) const {
        const Ring<C::kRounds> use{n / C::kCluster};
        smem.empty[use.stage()].wait_previous(use);
    }

    // Runs until none stopped early. run(first, done, stop): the chain writes to stop where the next run begins.
    template <class Run> __device__ __forceinline__ void in_runs(const Run &run) const {
        uint32_t done = 0, runs = 0;
        for (int32_t first = 0; first < num_tiles; runs++) {
            int32_t &stop = smem.stop[runs % 2];
            run(first, done, stop);
            cluster_arrive();
            cluster_wait();
            done += num_tiles - first;
            first = stop;
        }
    }
};

template <class C> struct Scorer : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::params, Base::smem, Base::warp;
    static constexpr int kKeyStages = C::kKeyStages, kRowStep = 32 / C::kChunks;
    uint32_t q[C::kHeadDim / 16][2];
    float pivot[2] = {-INFINITY, -INFINITY}; // of rows fragment_column() and the next
    bool bad_page = false;

    __device__ __forceinline__ explicit Scorer(const Base &stream) : Base(stream) {
        const auto *from =
                reinterpret_cast<const uint32_t *>(query_row(smem.part, params, min(lane() / 4, this->num_rows() - 1))) + lane() % 4;
#pragma unroll
        for (int x = 0; x < C::kHeadDim / 8; x++) q[x / 2][x % 2] = 8 * x < params.head_dim ? from[4 * x] : 0;
    }

    __device__ __forceinline__ uint32_t keys(int stage) const { return shared_address(smem.keys[warp()][stage]); }
    __device__ __forceinline__ int32_t own_key(int32_t i) const { return key_of(*this, i); }

    // Of tile i.
    __device__ __forceinline__ static int32_t key_of(const Base &stream, int32_t i) { return stream.first_key(i) + warp() * kTileK; }

    __device__ __forceinline__ static int32_t find_page(const Base &stream, int32_t i) {
        return i < stream.num_tiles ? stream.page_of(key_of(stream, i) + lane() % kTileK) : -1;
    }

    // Pages of a run's first tile and of the block's first tiles.
    __device__ __forceinline__ static void look_up(
            int32_t (&pages)[kKeyStages], const Base &stream, int32_t first = 0, uint32_t behind = blockIdx.x % C::kCluster) {
        pages[0] = find_page(stream, first);
#pragma unroll
        for (int x = 1; x < kKeyStages; x++) pages[x] = find_page(stream, first + static_cast<int32_t>(behind) + (x - 1) * C::kCluster);
    }

    // page: of the lane's key, from find_page.
    __device__ __forceinline__ void load(int stage, int32_t i, int32_t page) {
        if (i < this->num_tiles) {
            const int row = lane() / C::kChunks, chunk = lane() % C::kChunks;
            const int32_t key = own_key(i);
            bad_page |= !this->is_inside(page) & this->is_seen(key + lane() % kTileK);
            const uint16_t *k = params.k + wide(smem.part.kv_head) * params.k_head + chunk * 8;
#pragma unroll
            for (int r = 0; r < kTileK; r += kRowStep) {
                const int32_t its_page = __shfl_sync(0xffffffffu, page, row + r);
                const int64_t offset = this->offset_of(its_page, key + row + r, params.k_page, params.k_row, params.k_gap);
                cp_async_16_once(swizzled(keys(stage), C::kRowBytes, row + r, chunk), k + offset,
                        chunk * 8 < params.head_dim && this->is_inside(its_page));
            }
        }
        cp_async_commit();
    }

    // s[2 i + x]: key fragment_row(i), row fragment_column() + x. -inf where the row does not see the key.
    __device__ __forceinline__ void score(float (&s)[4], int stage, int32_t i) const {
        for (float &x : s) x = 0.0f;
        const uint32_t k = swizzled(keys(stage), C::kRowBytes, left_row(lane()), left_chunk(lane()));
#pragma unroll
        for (int step = 0; step < C::kHeadDim / 16; step++) {
            uint32_t a[4];
            ldmatrix_x4(a, pairs_on(k, step));
            mma_m16n8k16<typename C::Element>(s, a, q[step][0], q[step][1]);
        }
        const int32_t key = own_key(i);
        if (__builtin_expect(!this->all_see(key), false))
#pragma unroll
            for (int x = 0; x < 4; x++)
                if (!sees(smem.rows[fragment_column() + x % 2], key + fragment_row(x / 2))) s[x] = -INFINITY;
    }

    // The pivots of a run that begins with tile i, whose keys are in the last stage or on their way there: of rows that begin in this tile
    // or a later one, or are large.
    __device__ __forceinline__ void find_pivots(int32_t i) {
        const uint32_t large = i ? smem.large : 0;
        cp_async_wait<kKeyStages - 1>();
        for (;;) {
            __syncwarp();
            float s[4];
            score(s, kKeyStages - 1, i);
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const float top = column_max(fmaxf(s[x], s[2 + x]));
                if (lane() < 4) smem.tops[warp()][fragment_column() + x] = top;
            }
            bar_sync<32 * C::kScorers>(1);
            bool missing = false;
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int row = fragment_column() + x;
                float now = -INFINITY;
                for (int w = 0; w < C::kScorers; w++) now = fmaxf(now, smem.tops[w][row]);
                now *= params.scale_log2;
                const bool exists = row < this->num_rows() && (smem.rows[row].begin < smem.rows[row].end || smem.rows[row].sink_end);
                if (exists && (pivot[x] == -INFINITY || large >> row & 1) && now > pivot[x] + kLazy) pivot[x] = now;
                missing |= exists && pivot[x] == -INFINITY;
            }
            bar_sync<32 * C::kScorers>(1);                                                   // tops may be overwritten
            if (!__any_sync(0xffffffffu, missing) || large || ++i == this->num_tiles) break; // all warps alike
            load(kKeyStages - 1, i, find_page(*this, i));
            cp_async_wait<0>();
        }
        if (warp() == 0 && lane() < 4) *reinterpret_cast<float2 *>(&smem.pivot[fragment_column()]) = {pivot[0], pivot[1]};
        bar_sync<32 * (C::kScorers + 1)>(2); // the chain has them
    }

    // Writes the weights of a tile to its stage in every block.
    __device__ __forceinline__ void send(const float (&s)[4], uint32_t n) {
        float w[4];
#pragma unroll
        for (int x = 0; x < 4; x++) w[x] = exp2_approx(fmaf(s[x], params.scale_log2, -(pivot[x % 2] == -INFINITY ? 0.0f : pivot[x % 2])));
        const uint2 p = {
                transposed(pack_halves<typename C::Element>(w[0], w[1])), transposed(pack_halves<typename C::Element>(w[2], w[3]))};
        const Ring<C::kStages> ring{n};
        const uint32_t to = shared_address(&smem.sent[ring.stage()].p[warp()][lane()]), full = shared_address(smem.full[ring.stage()]);
        this->acquire_stage(n);
#pragma unroll
        for (uint32_t r = 0; r < C::kCluster; r++) store_async(address_of_block(to, r), p, address_of_block(full, r));
        const Ring<1> tile{n / C::kCluster};
        smem.weights_empty.acquire(tile);
        smem.weights[warp()][lane()] = {w[0], w[1], w[2], w[3]};
        __syncwarp();
        if (lane() == 0) smem.weights_full.arrive(tile);
    }

    // looked_up: those of the first run.
    __device__ __forceinline__ void run(int32_t first, uint32_t done, int32_t (&looked_up)[kKeyStages]) {
        const auto behind = (this->rank + C::kCluster - done % C::kCluster) % C::kCluster; // of the block's first tile
        int32_t i = first + static_cast<int32_t>(behind), next = i;
        if (first) look_up(looked_up, *this, first, behind);
        cp_async_wait<0>();
        __syncwarp();
        load(kKeyStages - 1, first, looked_up[0]);
#pragma unroll
        for (int stage = 0; stage < kKeyStages - 1; stage++, next += C::kCluster) load(stage, next, looked_up[stage + 1]);
        int32_t page = find_page(*this, next);
        find_pivots(first);
        int stage = 0, free = kKeyStages - 1;
#pragma unroll 1
        for (uint32_t n = done + behind; i < this->num_tiles; i += C::kCluster, n += C::kCluster) {
            load(free, next, page);
            page = find_page(*this, next += C::kCluster);
            cp_async_wait<kKeyStages - 1>(); // in flight: keys of the block's next tiles
            __syncwarp();
            float s[4];
            score(s, stage, i);
            send(s, n);
            free = stage;
            if (++stage == kKeyStages) stage = 0;
        }
    }
};

// Adds the weights of the block's tiles as the forward does: eight chains of a tile, key mod 8; even and odd neighbours meet at its end.
template <class C> struct Adder : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::smem;

    __device__ __forceinline__ explicit Adder(const Base &stream) : Base(stream) {}

    __device__ __forceinline__ void run(int32_t first, uint32_t done) const {
        const auto behind = (this->rank + C::kCluster - done % C::kCluster) % C::kCluster;
#pragma unroll 1
        for (uint32_t n = done + behind; n - done < static_cast<uint32_t>(this->num_tiles - first); n += C::kCluster) {
            const Ring<1> tile{n / C::kCluster};
            smem.weights_full.wait(tile);
            float4 w[C::kSteps];
#pragma unroll
            for (int t = 0; t < C::kSteps; t++) w[t] = smem.weights[t][lane()];
            float sum[2] = {};
#pragma unroll
            for (int t = 0; t < C::kSteps; t++) {
                sum[0] = __fadd_rn(__fadd_rn(sum[0], w[t].x), w[t].z);
                sum[1] = __fadd_rn(__fadd_rn(sum[1], w[t].y), w[t].w);
            }
            __syncwarp();
            if (lane() == 0) smem.weights_empty.release(tile);
            for (float &x : sum) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 4));
            const float total = lane() & 4 ? sum[1] : sum[0];
            const Ring<C::kStages> ring{n};
            const uint32_t to = shared_address(&smem.sent[ring.stage()].totals[lane()]), full = shared_address(smem.full[ring.stage()]);
            this->acquire_stage(n);
#pragma unroll
            for (uint32_t r = 0; r < C::kCluster; r++) store_async(address_of_block(to, r), total, address_of_block(full, r));
        }
    }
};

// Copies the block's columns of V, every kLoaders-th tile each. A lane finds where 16 keys lie, or where pages may be smaller, single keys.
template <class C> struct ValueLoader : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::params, Base::smem;
    static constexpr int64_t kNowhere = INT64_MIN;
    template <bool kWhole> static constexpr int kPlaces = kWhole ? 1 : (C::kSteps + 1) / 2; // of a lane

    __device__ __forceinline__ explicit ValueLoader(const Base &stream) : Base(stream) {}

    // The first key of place x, counted in the tile.
    template <bool kWhole> __device__ __forceinline__ static int32_t key_of(int x) { return kWhole ? lane() * kTileK : lane() + 32 * x; }

    template <bool kWhole> __device__ __forceinline__ void find_pages(int32_t (&found)[kPlaces<kWhole>], int32_t i) const {
#pragma unroll
        for (int x = 0; x < kPlaces<kWhole>; x++) {
            const int32_t own = key_of<kWhole>(x), key = this->first_key(i) + own;
            const bool exists = i < this->num_tiles && own < C::kWalkKeys;
            found[x] = exists && (kWhole ? this->is_any_seen(key) : this->is_seen(key)) ? this->page_at(key) : -1;
        }
    }

    __device__ __forceinline__ void run(int32_t first, uint32_t done) const {
        if (params.whole_tiles)
            copy<true>(first, done);
        else
            copy<false>(first, done);
    }

    template <bool kWhole> __device__ __forceinline__ void copy(int32_t first, uint32_t done) const {
        const int row = lane() / 2, chunk = lane() % 2;
        const auto column = static_cast<int>(this->rank) * 16 + chunk * 8;
        const bool exists = column < params.head_dim;
        const uint16_t *v = params.v + wide(smem.part.kv_head) * params.v_head + column + (kWhole ? wide(row) * params.v_row : 0);
        const int32_t behind = this->warp() - C::kFirstLoader;
        int32_t i = first + behind, found[kPlaces<kWhole>];
        find_pages<kWhole>(found, i);
#pragma unroll 1
        for (uint32_t n = done + static_cast<uint32_t>(behind); i < this->num_tiles; i += C::kLoaders, n += C::kLoaders) {
            const Ring<C::kStages> ring{n};
            const int32_t key = this->first_key(i);
            const bool all = !kWhole || this->is_all_seen(key);
            const uint32_t to = shared_address(smem.values[ring.stage()]) + row * C::kValueRow + ((chunk ^ (row >> 2 & 1)) << 4);
            int64_t offset[kPlaces<kWhole>];
#pragma unroll
            for (int x = 0; x < kPlaces<kWhole>; x++) {
                offset[x] = this->offset_of(found[x], key + key_of<kWhole>(x), params.v_page, params.v_row, params.v_gap);
                if (!this->is_inside(found[x])) offset[x] = kNowhere;
            }
            find_pages<kWhole>(found, i + C::kLoaders); // in flight during the copies
            smem.v_empty.acquire(ring);
#pragma unroll
            for (int t = 0; t < C::kSteps; t++) {
                const int64_t from = __shfl_sync(0xffffffffu, kWhole ? offset[0] : offset[t / 2], kWhole ? t : 16 * (t % 2) + row);
                const bool seen = all || this->is_seen(key + t * kTileK + row);
                cp_async_16_once(to + t * kTileK * C::kValueRow, v + from, exists && seen && from != kNowhere);
            }
            smem.full[ring.stage()].arrive_copied();
        }
    }
};

// Describes the stream's rows, of which keys_of tells the keys: by the first warp.
template <class C, class KeysOf> __device__ __forceinline__ void describe_cluster_rows(typename C::Smem &smem, const KeysOf &keys_of) {
    const Part &part = smem.part;
    const auto row = static_cast<int>(threadIdx.x);
    const Row keys = row < part.stream.num_rows ? keys_of(row) : Row{0, INT32_MAX, INT32_MAX};
    const int32_t begin = __reduce_max_sync(0xffffffffu, keys.begin), end = __reduce_min_sync(0xffffffffu, keys.end),
                  sink_end = __reduce_min_sync(0xffffffffu, keys.sink_end);
    if (row < C::kMostRows) smem.rows[row] = row < part.stream.num_rows ? keys : Row{0, 0, 0};
    if (row == 0) smem.seen_by_all = {begin, end, sink_end};
}

} // namespace sa::decode
