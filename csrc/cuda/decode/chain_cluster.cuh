// SPDX-License-Identifier: Apache-2.0
//
// A chunk of a stream, or a stream, of decode_chain.cu by a cluster, which may be one block: block r has columns [kColumns r,
// kColumns (r + 1)) of O, for all keys. Key tiles of the forward go round the sets of scorers of all blocks.
//
//     chain, a warpgroup    O += P V, tile by tile, by wgmma; sum += the tile's sums      column_chain.cuh
//     adder                 sums of the weights of the block's tiles                      chain_scores.cuh
//     loaders, three warps  V of the block's columns, of every tile
//     scorers, in sets      K | S | weights of the set's tiles                            chain_scores.cuh
//
// A tile's weights and their sums lie in a stage of a ring, in every block: where they are computed, and copied from there to the others.
// Only the chain is serial: one product of 16 keys after another, and a sum a tile. All else of a tile depends on its keys and the pivots.
// Every block finds the pivots itself, from the first tiles. Where a sum of weights exceeds kLarge the chain remembers that tile, and the
// state before it; the run goes on to its end, for nothing, and a second one begins at that tile with a new pivot.
#pragma once

#include "cuda/decode/chain.cuh"
#include "cuda/tile/pipe.cuh"

namespace sa::decode {

// kCluster blocks, with kSets sets of scorers each, and a ring of kStages tiles.
template <class Element_, int kHeadDim_, int kCluster_, int kSets_, int kStages_> struct ClusterConfig : TileSizes<kHeadDim_> {
    using Element = Element_;
    using TileSizes<kHeadDim_>::kHeadDim, TileSizes<kHeadDim_>::kTileBytes;
    using Arguments = ChainArguments;
    static constexpr bool kExtras = true;
    static constexpr int kCluster = kCluster_, kSets = kSets_, kTurns = kCluster * kSets, kMostRows = 8;
    static constexpr int kSteps = kHeadDim == 64 ? 8 : 5, kWalkKeys = kSteps * kTileK; // of a key tile of the forward
    static_assert(kWalkKeys == ChainConfig<Element, kHeadDim>::kPivotKeys, "the forward's tiles");
    static constexpr int kGroups = 2, kScorers = (kSteps + kGroups - 1) / kGroups; // 16 keys a group of a scorer; warps a set
    static constexpr int kChainWarps = 4, kAdder = 4, kFirstLoader = 5, kLoaders = 3, kFirstScorer = 8;
    static constexpr int kWarps = kFirstScorer + kSets * kScorers, kThreads = 32 * kWarps;
    static constexpr int kColumns = kHeadDim / kCluster, kValueChunks = kColumns / 8, kValueRow = 2 * kColumns;
    static_assert(kColumns == 16 || kColumns == 32 || kColumns == 64, "rows of V that wgmma reads, swizzled by their length");
    static constexpr int kValueBytes = kWalkKeys * kValueRow;            // of the block's columns
    static constexpr int kStages = kStages_, kRounds = kStages / kTurns; // of weights and values; a round: a tile of each set
    static_assert((kStages & (kStages - 1)) == 0 && kRounds * kTurns == kStages, "the roles have no time to divide");
    static constexpr int kKeyStages = 2;
    // Of a key tile.
    struct WeightStage {
        uint2 p[kSteps][32]; // weights, keys x rows, as the right side of P V
        float totals[32];    // lane l: sum of class l / 8 of row 2 (l % 4) + l / 4 % 2
    };
    struct Smem {
        alignas(1024) unsigned char values[kStages][kValueBytes];
        alignas(128) unsigned char keys[kSets * kScorers][kKeyStages][kGroups][kTileBytes];
        alignas(128) WeightStage sent[kStages];
        float4 weights[kSets][kSteps][32];
        float out[kColumns / 16][kMostRows][16];
        Barriers<kStages> full, empty; // weights and values
        Barriers<kRounds> free[kSets]; // the stages of a set's next tiles, in every block
        Barriers<kSets> weights_full, weights_empty;
        Part part;
        Row rows[kMostRows], seen_by_all;
        bool is_last;
        float s_aux[kMostRows], tops[kSteps][kMostRows], sum[kColumns / 16][kMostRows];
        alignas(8) float pivot[kMostRows];
        int32_t stop[2]; // the tile where the next run begins, of even and odd runs: a slow warp may still read one while the next is found
        uint32_t large;  // rows whose pivots it moves
    };
    static_assert(sizeof(Smem) <= 227 * 1024, "a block of an SM");

    // All threads of all blocks.
    __device__ __forceinline__ static void meet() {
        if (kCluster == 1) return __syncthreads();
        cluster_arrive();
        cluster_wait();
    }

    // Of 8 columns of a key of a tile of V.
    __device__ __forceinline__ static uint32_t value_at(int key, int chunk) {
        return key * kValueRow + ((chunk ^ ((key * kValueRow >> 7) & (kValueChunks - 1))) << 4);
    }
};

// What all roles know of the stream. A run takes tiles [first, num_tiles) of the walk; its tile n is tile first + n.
template <class C> struct ClusterStream {
    using Smem = typename C::Smem;
    Smem &smem;
    const typename C::Arguments &params;
    const sa_key_tiles &tiles;
    const int32_t num_tiles, batch;
    const sa_range full;        // tiles of which every row sees every key, behind those of sink tokens
    const int32_t *const pages; // NULL for a contiguous cache
    const uint32_t rank;

    __device__ __forceinline__ ClusterStream(Smem &smem, const typename C::Arguments &params)
        : smem(smem), params(params), tiles(smem.part.stream.tiles), num_tiles(smem.part.last), batch(smem.part.batch),
          full(sa_full_key_tiles(&tiles)), pages(params.block_table ? params.block_table + batch * params.block_table_stride : nullptr),
          rank(blockIdx.x % C::kCluster) {}

    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ int num_rows() const { return smem.part.stream.num_rows; }

    __device__ __forceinline__ int32_t first_key(int32_t i) const { return sa_key_tile_at(&tiles, i) * C::kWalkKeys; }

    // Whether any row sees any of 16 keys from `key` on.
    __device__ __forceinline__ bool is_any_seen(int32_t key) const {
        return (key < tiles.sink_keys) | ((key + kTileK > tiles.band.begin) & (key < tiles.band.end));
    }

    __device__ __forceinline__ bool is_full(int32_t i) const { return (i >= full.begin) & (i < full.end); }

    // Of 16 keys from `key` on.
    __device__ __forceinline__ bool all_see(int32_t key) const {
        const Row &keys = smem.seen_by_all;
        return ((key >= keys.begin) & (key + kTileK <= keys.end)) | (key + kTileK <= keys.sink_end);
    }

    __device__ __forceinline__ int32_t page_at(int32_t key) const { return pages ? load_relaxed(pages + params.page_index(key)) : batch; }

    // Where a key's row lies, in elements.
    static constexpr int64_t kNowhere = INT64_MIN;
    __device__ __forceinline__ int64_t place_of(int32_t page, int32_t key, int64_t page_stride, int32_t row_stride, int64_t gap) const {
        const int32_t slot = key - params.page_index(key) * params.page_size;
        return params.has_page(page) ? page * page_stride + wide(slot) * row_stride + (page >= params.first_host_page ? gap : 0) : kNowhere;
    }

    // Waits until the stage of tile n, one of this block's, is free in all blocks.
    __device__ __forceinline__ void wait_for_stage(uint32_t n) const {
        smem.free[n % C::kTurns / C::kCluster].wait(Ring<C::kRounds>{n / C::kTurns});
    }

    // The stage of tile n is free in this block: says so to the tile's block, and expects its weights if that is another one.
    __device__ __forceinline__ void free_stage(uint32_t n) const {
        const uint32_t turn = n % C::kTurns, its_rank = turn % C::kCluster;
        Barrier &its = smem.free[turn / C::kCluster][n / C::kTurns % C::kRounds];
        if (its_rank == rank) return its.arrive();
        smem.full[n % C::kStages].arrive_expect(sizeof(typename C::WeightStage));
        arrive_at_block(address_of_block(shared_address(its), its_rank));
    }

    // Before a run, by one thread; again: not before the first.
    __device__ __forceinline__ static void init_barriers(Smem &smem, bool again) {
        const auto init = [again](Barrier &barrier, int arrivals) {
            if (again) barrier_invalidate(barrier);
            barrier.init(arrivals);
        };
        for (int i = 0; i < C::kStages; i++) {
            init(smem.full[i], 2); // by the loader; by the adder or, for the tile of another block, with its bytes
            init(smem.empty[i], C::kChainWarps);
        }
        for (int set = 0; set < C::kSets; set++) {
            for (int i = 0; i < C::kRounds; i++) init(smem.free[set][i], C::kCluster);
            init(smem.weights_full[set], C::kScorers);
            init(smem.weights_empty[set], 1);
        }
        barrier_init_fence();
    }

    // Runs until none stopped early. run(first, stop): the chain writes to stop where the next run begins.
    template <class Run> __device__ __forceinline__ void in_runs(const Run &run) const {
        uint32_t runs = 0;
        for (int32_t first = 0; first < num_tiles;) {
            int32_t &stop = smem.stop[runs++ % 2];
            run(first, stop);
            C::meet();
            first = stop;
            if (first == num_tiles) break;
            if (threadIdx.x == 0) init_barriers(smem, true);
            C::meet();
        }
    }
};

// Copies the block's columns of V, every kLoaders-th tile each. kWhole, where no tile spans two pages: a lane finds where 16 keys of one of
// kBatch tiles lie; else where single keys of a tile do.
template <class C> struct ValueLoader : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::params, Base::smem;
    static constexpr int kRowStep = 32 / C::kValueChunks;                                   // keys of an instruction
    template <bool kWhole> static constexpr int kPlaces = kWhole ? 1 : (C::kSteps + 1) / 2; // of a lane
    template <bool kWhole> static constexpr int kBatch = kWhole ? 32 / C::kSteps : 1;

    __device__ __forceinline__ explicit ValueLoader(const Base &stream) : Base(stream) {}

    // The tile and first key of place x of those looked up for tile i.
    struct Place {
        int32_t tile, key;
        bool exists;
    };
    template <bool kWhole> __device__ __forceinline__ Place place(int32_t i, int x) const {
        const int32_t tile = kWhole ? i + lane() / C::kSteps * C::kLoaders : i,
                      own = kWhole ? lane() % C::kSteps * kTileK : lane() + 32 * x;
        return {tile, this->first_key(tile) + own,
                tile < this->num_tiles && (kWhole ? lane() / C::kSteps < kBatch<true> : own < C::kWalkKeys)};
    }

    template <bool kWhole> __device__ __forceinline__ void find_pages(int32_t (&found)[kPlaces<kWhole>], int32_t i) const {
#pragma unroll
        for (int x = 0; x < kPlaces<kWhole>; x++) {
            const Place at = place<kWhole>(i, x);
            found[x] = at.exists && (kWhole ? this->is_any_seen(at.key) : is_seen(this->tiles, at.key)) ? this->page_at(at.key) : -1;
        }
    }

    __device__ __forceinline__ void run(int32_t first) const {
        if (params.whole_tiles)
            copy<true>(first);
        else
            copy<false>(first);
    }

    // Tile n is there; kPending later ones are in flight.
    template <int kPending> __device__ __forceinline__ void announce(uint32_t n) const {
        static_assert(C::kStages >= C::kLoaders + 2, "it waits for a stage before it announces the tile before, and the chain has two");
        cp_async_wait<kPending>();
        async_fence();
        __syncwarp();
        if (lane() == 0) smem.full[n % C::kStages].arrive();
    }

    template <bool kWhole> __device__ __forceinline__ void copy(int32_t first) const {
        const int row = lane() / C::kValueChunks, chunk = lane() % C::kValueChunks;
        const auto column = static_cast<int>(this->rank) * C::kColumns + chunk * 8;
        const bool exists = column < params.head_dim;
        const uint16_t *v = params.v + wide(smem.part.kv_head) * params.v_head + column + (kWhole ? wide(row) * params.v_row : 0);
        const int32_t behind = this->warp() - C::kFirstLoader;
        int32_t i = first + behind, found[kPlaces<kWhole>], at = 0;
        int64_t places[kPlaces<kWhole>];
        uint32_t last = 0;
        find_pages<kWhole>(found, i);
#pragma unroll 1
        for (auto n = static_cast<uint32_t>(behind); i < this->num_tiles; i += C::kLoaders, n += C::kLoaders) {
            const Ring<C::kStages> ring{n};
            const uint32_t to = shared_address(smem.values[ring.stage()]);
            if (at == 0) {
#pragma unroll
                for (int x = 0; x < kPlaces<kWhole>; x++)
                    places[x] = this->place_of(found[x], place<kWhole>(i, x).key, params.v_page, params.v_row, params.v_gap);
                find_pages<kWhole>(found, i + kBatch<kWhole> * C::kLoaders); // in flight during the copies
            }
            smem.empty.acquire(ring);
            if (lane() == 0) this->free_stage(n);
            const auto copy = [&](const auto &is_seen) {
#pragma unroll
                for (int t = 0; t < C::kSteps; t++) {
                    int64_t from = kWhole ? __shfl_sync(0xffffffffu, places[0], at * C::kSteps + t) : 0;
#pragma unroll
                    for (int r = 0; r < kTileK; r += kRowStep) {
                        if (!kWhole) from = __shfl_sync(0xffffffffu, places[t / 2], 16 * (t % 2) + row + r);
                        cp_async_16_once(to + t * kTileK * C::kValueRow + C::value_at(row + r, chunk),
                                v + from + (kWhole ? wide(r) * params.v_row : 0),
                                exists && from != this->kNowhere && is_seen(t * kTileK + row + r));
                    }
                }
            };
            if (!kWhole || this->is_full(i))
                copy([](int) { return true; });
            else
                copy([&](int key) { return is_seen(this->tiles, this->first_key(i) + key); });
            cp_async_commit();
            if (n >= C::kLoaders) announce<1>(n - C::kLoaders);
            last = n;
            if (++at == kBatch<kWhole>) at = 0;
        }
        if (first + behind < this->num_tiles) announce<0>(last);
    }
};

// The keys of the part that a row of it sees.
__device__ __forceinline__ Row keys_of_row(const Part &part, const ChainArguments &params, int row) {
    const int32_t token = token_head(part, params, row).token;
    const sa_range keys = sa_row_band(&part.stream.band, token);
    if (params.chunks == 1) return {keys.begin, keys.end, sa_row_sink_end(&part.stream.band, token)};
    const int32_t begin = static_cast<int32_t>(part.index) * params.chunk_keys, end = min(keys.end, begin + params.chunk_keys);
    return begin < end ? Row{begin, end, 0} : Row{0, 0, 0};
}

// Describes the stream's rows: by the first warp.
template <class C> __device__ __forceinline__ void describe_cluster_rows(typename C::Smem &smem, const ChainArguments &params) {
    const Part &part = smem.part;
    const auto row = static_cast<int>(threadIdx.x);
    const Row keys = row < part.stream.num_rows ? keys_of_row(part, params, row) : Row{0, INT32_MAX, INT32_MAX};
    const int32_t begin = __reduce_max_sync(0xffffffffu, keys.begin), end = __reduce_min_sync(0xffffffffu, keys.end),
                  sink_end = __reduce_min_sync(0xffffffffu, keys.sink_end);
    if (row < C::kMostRows) smem.rows[row] = row < part.stream.num_rows ? keys : Row{0, 0, 0};
    if (row == 0) smem.seen_by_all = {begin, end, sink_end};
}

} // namespace sa::decode
