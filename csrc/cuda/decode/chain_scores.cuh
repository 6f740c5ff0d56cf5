// SPDX-License-Identifier: Apache-2.0
//
// The weights of chain_cluster.cuh: scorers compute those of their set's tiles, two times 16 keys a warp, and leave them rounded in the
// tile's stage, unrounded for the adder.
#pragma once

#include "cuda/decode/chain_cluster.cuh"

#include <type_traits>

namespace sa::decode {

template <class C> struct Scorer : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::params, Base::smem;
    static constexpr int kKeyStages = C::kKeyStages, kRowStep = 32 / C::kChunks;
    const uint16_t *const k; // the lane's chunk; where no tile spans two pages, of its first row
    uint32_t q[C::kHeadDim / 16][2];
    float pivot[2] = {-INFINITY, -INFINITY}, from_pivot[2]; // of rows fragment_column() and the next; what is added to scores
    bool bad_page = false;

    __device__ __forceinline__ explicit Scorer(const Base &stream)
        : Base(stream), k(params.k + wide(smem.part.kv_head) * params.k_head + lane() % C::kChunks * 8 +
                                (params.whole_tiles ? wide(lane() / C::kChunks) * params.k_row : 0)) {
        const auto *from =
                reinterpret_cast<const uint32_t *>(query_row(smem.part, params, min(lane() / 4, this->num_rows() - 1))) + lane() % 4;
#pragma unroll
        for (int x = 0; x < C::kHeadDim / 8; x++) q[x / 2][x % 2] = 8 * x < params.head_dim ? from[4 * x] : 0;
    }

    // Its set, and its place there: it has the 16 keys part() and part() + kScorers of a tile.
    __device__ __forceinline__ static int set() { return (Base::warp() - C::kFirstScorer) / C::kScorers; }
    __device__ __forceinline__ static int part() { return (Base::warp() - C::kFirstScorer) % C::kScorers; }
    __device__ __forceinline__ static int step(int group) { return part() + group * C::kScorers; }
    __device__ __forceinline__ static bool exists(int group) { return C::kSteps % C::kGroups == 0 || step(group) < C::kSteps; }
    __device__ __forceinline__ static uint32_t turn() { return blockIdx.x % C::kCluster + C::kCluster * set(); }

    __device__ __forceinline__ uint32_t keys(int stage, int group) const {
        return shared_address(smem.keys[Base::warp() - C::kFirstScorer][stage][group]);
    }
    __device__ __forceinline__ static int32_t key_of(const Base &stream, int32_t i, int group) {
        return stream.first_key(i) + step(group) * kTileK;
    }

    // What a lane looks up: kWhole, where no tile spans two pages, the first of a group's keys in the kLooks tiles of its set from tile i
    // on; else a group's keys in tile i.
    static constexpr int kLooks = 16;
    struct Look {
        int32_t key;
        bool exists;
    };
    template <bool kWhole> __device__ __forceinline__ static Look look(const Base &stream, int32_t i) {
        if (kWhole) i += lane() % kLooks * C::kTurns;
        const int group = lane() / kLooks;
        const int32_t key = key_of(stream, i, group) + (kWhole ? 0 : lane() % kTileK);
        return {key, i < stream.num_tiles && exists(group) && (kWhole ? stream.is_any_seen(key) : is_seen(stream.tiles, key))};
    }

    // Its page; -1 where no row sees the keys.
    template <bool kWhole> __device__ __forceinline__ static int32_t find_page(const Base &stream, int32_t i) {
        const Look at = look<kWhole>(stream, i);
        return at.exists ? stream.page_at(at.key) : -1;
    }

    // Of the page that find_page found for tile i.
    template <bool kWhole> __device__ __forceinline__ int64_t place(int32_t page, int32_t i) {
        const Look at = look<kWhole>(*this, i);
        bad_page |= at.exists & !params.has_page(page);
        return this->place_of(page, at.key, params.k_page, params.k_row, params.k_gap);
    }

    // Pages of a run's first tile and of the set's first tile.
    __device__ __forceinline__ static void look_up(int32_t (&pages)[2], const Base &stream, int32_t first) {
        const bool whole = stream.params.whole_tiles;
        for (int x = 0; x < 2; x++) {
            const int32_t i = first + x * static_cast<int32_t>(turn());
            pages[x] = whole ? find_page<true>(stream, i) : find_page<false>(stream, i);
        }
    }

    // Copies the warp's keys of tile i. kWhole: lane `at` of a group has the place of the first of them, else lane x that of the x-th.
    // kFull: all rows see them.
    template <bool kWhole, bool kFull> __device__ __forceinline__ void load(int stage, int32_t i, int64_t place, int at) {
        const int row = lane() / C::kChunks, chunk = lane() % C::kChunks;
#pragma unroll
        for (int group = 0; group < C::kGroups; group++) {
            if ((!kFull && i >= this->num_tiles) || !exists(group)) continue;
            int64_t from = kWhole ? __shfl_sync(0xffffffffu, place, kLooks * group + at) : 0;
#pragma unroll
            for (int r = 0; r < kTileK; r += kRowStep) {
                if (!kWhole) from = __shfl_sync(0xffffffffu, place, kLooks * group + row + r);
                const bool seen = kFull || !kWhole || is_seen(this->tiles, key_of(*this, i, group) + row + r);
                cp_async_16_once(swizzled(keys(stage, group), C::kRowBytes, row + r, chunk),
                        k + from + (kWhole ? wide(r) * params.k_row : 0), chunk * 8 < params.head_dim && from != this->kNowhere && seen);
            }
        }
        cp_async_commit();
    }

    // s[g][2 i + x]: of group g, key fragment_row(i), row fragment_column() + x. -inf where the row does not see the key.
    using Scores = float[C::kGroups][4];
    template <bool kFull> __device__ __forceinline__ void score(Scores &s, int stage, int32_t i) const {
        uint32_t a[C::kGroups][C::kHeadDim / 16][4];
#pragma unroll
        for (int group = 0; group < C::kGroups; group++) {
            const uint32_t from = swizzled(keys(stage, group), C::kRowBytes, left_row(lane()), left_chunk(lane()));
#pragma unroll
            for (int x = 0; x < C::kHeadDim / 16; x++) ldmatrix_x4(a[group][x], pairs_on(from, x));
            for (float &x : s[group]) x = 0.0f;
        }
#pragma unroll
        for (int x = 0; x < C::kHeadDim / 16; x++)
#pragma unroll
            for (int group = 0; group < C::kGroups; group++) mma_m16n8k16<typename C::Element>(s[group], a[group][x], q[x][0], q[x][1]);
#pragma unroll
        for (int group = 0; !kFull && group < C::kGroups; group++) {
            const int32_t key = key_of(*this, i, group);
            if (this->all_see(key)) continue;
            for (int x = 0; x < 4; x++)
                if (!sees(smem.rows[fragment_column() + x % 2], key + fragment_row(x / 2))) s[group][x] = -INFINITY;
        }
    }

    // The pivots of a run that begins with tile i, whose keys are in the last stage or on their way there: of rows that begin in this tile
    // or a later one, or are large. By the first set, for all.
    template <bool kWhole> __device__ __forceinline__ void find_pivots(int32_t i) {
        const uint32_t large = i ? smem.large : 0;
        cp_async_wait<1>();
        for (;;) {
            __syncwarp();
            Scores s;
            score<false>(s, kKeyStages - 1, i);
#pragma unroll
            for (int group = 0; group < C::kGroups; group++)
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    const float top = column_max(fmaxf(s[group][x], s[group][2 + x]));
                    if (lane() < 4 && exists(group)) smem.tops[step(group)][fragment_column() + x] = top;
                }
            bar_sync<32 * C::kScorers>(1);
            bool missing = false;
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int row = fragment_column() + x;
                float now = -INFINITY;
                for (int w = 0; w < C::kSteps; w++) now = fmaxf(now, smem.tops[w][row]);
                now *= params.scale_log2;
                const bool exists = row < this->num_rows() && (smem.rows[row].begin < smem.rows[row].end || smem.rows[row].sink_end);
                if (exists && (pivot[x] == -INFINITY || large >> row & 1) && now > pivot[x] + kLazy) pivot[x] = now;
                missing |= exists && pivot[x] == -INFINITY;
            }
            bar_sync<32 * C::kScorers>(1);                                                   // tops may be overwritten
            if (!__any_sync(0xffffffffu, missing) || large || ++i == this->num_tiles) break; // all warps alike
            load<kWhole, false>(kKeyStages - 1, i, place<kWhole>(find_page<kWhole>(*this, i), i), 0);
            cp_async_wait<0>();
        }
        if (part() == 0 && lane() < 4) *reinterpret_cast<float2 *>(&smem.pivot[fragment_column()]) = {pivot[0], pivot[1]};
    }

    // Writes the weights of tile n to its stage, and for the adder.
    __device__ __forceinline__ void send(const Scores &s, uint32_t n) {
        float w[C::kGroups][4];
        uint2 p[C::kGroups];
        const bool odd = lane() % 2;
#pragma unroll
        for (int group = 0; group < C::kGroups; group++) {
#pragma unroll
            for (int x = 0; x < 4; x++) w[group][x] = exp2_approx(fmaf(s[group][x], params.scale_log2, from_pivot[x % 2]));
            // A key's 8 weights are 16 bytes. An even lane writes 8 bytes of one of the first 8 keys, the next lane those of the last 8.
            const uint32_t lower = pack_halves<typename C::Element>(w[group][0], w[group][1]),
                           upper = pack_halves<typename C::Element>(w[group][2], w[group][3]);
            const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? lower : upper, 1);
            p[group] = odd ? make_uint2(got, upper) : make_uint2(lower, got);
        }
        smem.weights_empty[set()].wait_previous(Ring<1>{n / C::kTurns});
        this->wait_for_stage(n);
#pragma unroll
        for (int group = 0; group < C::kGroups; group++) {
            if (!exists(group)) continue;
            smem.sent[n % C::kStages].p[step(group)][lane() / 2 + 16 * odd] = p[group];
            smem.weights[set()][step(group)][lane()] = {w[group][0], w[group][1], w[group][2], w[group][3]};
        }
        async_fence(); // P is read by wgmma, or copied
        __syncwarp();
        if (lane() == 0) smem.weights_full[set()].arrive();
    }

    // looked_up: those of the first run.
    template <bool kWhole> __device__ __forceinline__ void run(int32_t first, int32_t (&looked_up)[2]) {
        int32_t i = first + static_cast<int32_t>(turn()), next = i;
        if (first) look_up(looked_up, *this, first);
        cp_async_wait<0>();
        __syncwarp();
        if (set() == 0) load<kWhole, false>(kKeyStages - 1, first, place<kWhole>(looked_up[0], first), 0);
        int64_t places = place<kWhole>(looked_up[1], next);
        int at = 0, stage = 0; // at: the lane of `places` that has the next tile's
        load<kWhole, false>(0, next, places, at++);
        next += C::kTurns;
        int32_t page = kWhole ? -1 : find_page<kWhole>(*this, next);
        if (set() == 0) find_pivots<kWhole>(first);
        bar_sync<32 * (C::kSets * C::kScorers + C::kChainWarps)>(2); // all scorers and the chain have them
#pragma unroll
        for (int x = 0; x < 2; x++) {
            pivot[x] = smem.pivot[fragment_column() + x];
            from_pivot[x] = pivot[x] == -INFINITY ? 0.0f : -pivot[x];
        }
        auto n = turn();
        const auto take = [&](auto full) {
            constexpr bool kFull = decltype(full)::value;
            if (!kFull) {
                if (kWhole && at == kLooks) {
                    places = place<kWhole>(find_page<kWhole>(*this, next), next);
                    at = 0;
                }
                if (!kWhole) places = place<kWhole>(page, next);
            }
            load<kWhole, kFull>(stage ^ 1, next, places, at++);
            next += C::kTurns;
            if (!kWhole) page = find_page<kWhole>(*this, next);
            cp_async_wait<1>(); // in flight: keys of the set's next tile
            __syncwarp();
            Scores s;
            score<kFull>(s, stage, i);
            __syncwarp(); // the warp has read the stage
            send(s, n);
            stage ^= 1;
            i += C::kTurns;
            n += C::kTurns;
        };
#pragma unroll 1
        while (i < this->num_tiles) {
#pragma unroll 1
            while (kWhole && this->is_full(i) && this->is_full(next) && at != kLooks) take(std::true_type{});
            if (i < this->num_tiles) take(std::false_type{});
        }
    }
};

// Adds the weights of the block's tiles as the forward does: eight chains of a tile, key mod 8; even and odd neighbours meet at its end.
template <class C> struct Adder : ClusterStream<C> {
    using Base = ClusterStream<C>;
    using Base::lane, Base::smem;

    __device__ __forceinline__ explicit Adder(const Base &stream) : Base(stream) {}

    __device__ __forceinline__ void run(int32_t first) const {
        const auto past = static_cast<uint32_t>(this->num_tiles - first);
#pragma unroll 1
        for (uint32_t n = this->rank; n < past; n += C::kCluster) {
            const uint32_t set = n / C::kCluster % C::kSets;
            const Ring<1> tile{n / C::kTurns};
            smem.weights_full[set].wait(tile);
            float4 w[C::kSteps];
#pragma unroll
            for (int t = 0; t < C::kSteps; t++) w[t] = smem.weights[set][t][lane()];
            float sum[2] = {};
#pragma unroll
            for (int t = 0; t < C::kSteps; t++) {
                sum[0] = __fadd_rn(__fadd_rn(sum[0], w[t].x), w[t].z);
                sum[1] = __fadd_rn(__fadd_rn(sum[1], w[t].y), w[t].w);
            }
            __syncwarp();
            if (lane() == 0) smem.weights_empty[set].arrive();
            for (float &x : sum) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 4));
            const uint32_t stage = n % C::kStages;
            auto &sent = smem.sent[stage];
            sent.totals[lane()] = lane() & 4 ? sum[1] : sum[0];
            async_fence();
            __syncwarp();
            if (lane() == 0) smem.full[stage].arrive();
            if (lane() > 0 && lane() < C::kCluster) {
                const uint32_t there = (this->rank + lane()) % C::kCluster;
                bulk_send(address_of_block(shared_address(&sent), there), &sent, sizeof(sent),
                        address_of_block(shared_address(smem.full[stage]), there));
            }
        }
    }
};

} // namespace sa::decode
