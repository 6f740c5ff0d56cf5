// SPDX-License-Identifier: Apache-2.0
//
// Steps of the math threads of the general backward on sm_90 between products: values that are not finite, masks, P and dS, terms of
// ds_aux; writing dq of a tile without later key blocks, and dk, dv and the terms of an item.
#pragma once

#include "cuda/bwd_sm90/copies.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_sm90 {

// The first of a math warpgroup's keys in the block, and of its rows in the tile.
template <class C> __device__ __forceinline__ int first_key(int math_warpgroup) { return C::kIsWide ? 0 : 64 * math_warpgroup; }
template <class C> __device__ __forceinline__ int first_row(int math_warpgroup) { return C::kIsWide ? C::kColumns * math_warpgroup : 0; }

// Zeroes values that are not finite in thread i's share of the chunks of 64 columns of rows, and calls bad(row) for their rows.
template <class C, int kThreads, class Bad>
__device__ __forceinline__ void zero_rows(unsigned char *rows, int bytes, int i, const Bad &bad) {
#pragma unroll 1
    for (int x = i; x < bytes / 16; x += kThreads)
        if (zero_nonfinite<typename C::Element, 1>(rows + 16 * x, 16, 0)) bad(x / 8);
}

// Finds the rows that see each key. Zeroes elements of K that are not finite and puts NaN into that key's V: it returns through dP. A
// warpgroup with keys of its own does not wait for the other: it meets the other's keys in dQ alone, behind the other's dS.
template <class C> __device__ __forceinline__ void prepare_keys(Smem<C> &smem, const BwdProblem &p, const Item &item, int math_warpgroup) {
    constexpr int kOwnKeys = 64, kThreads = C::kIsWide ? C::kMathThreads : 128;
    const int i = pinned(threadIdx.x - 128) % kThreads, first = first_key<C>(math_warpgroup), key = item.key + first + i;
    const auto meet = [&] { bar_sync<kThreads>(C::kIsWide ? kMathBarrier : kOwnBarrier + math_warpgroup); };
    if (i < kOwnKeys) {
        smem.seen_by[first + i] = key < item.band.k_len ? sa_keys_rows(&item.band, {key, key + 1}) : sa_range{0, 0};
        smem.poisoned[first + i] = false;
    }
    meet();
#pragma unroll 1
    for (int half = 0; half < C::kHalves; half++) {
        unsigned char *own = smem.keys + half * C::kKeyHalf + first * kRowBytes;
        if (!any_nonfinite<typename C::Element, kThreads>(own, kOwnKeys * kRowBytes, i)) continue;
        zero_rows<C, kThreads>(own, kOwnKeys * kRowBytes, i, [&](int row) {
            smem.poisoned[first + row] = true;
            *reinterpret_cast<uint16_t *>(smem.values + swizzled(first + row, 0)) = 0x7fff;
        });
        async_fence(); // here, as after the loop it would wait for the previous item's stores every time
    }
    meet();
}

// Whether Q or dO of the tile has values that are not finite; if so, no product reads it any more. A row with one makes its whole column of
// S or dP not finite, so one of the thread's two keys suffices, and all warps that have the column find it: only then do they meet.
template <class C>
__device__ __forceinline__ bool any_nonfinite_row(
        const Smem<C> &smem, int stage, int dout_stage, const float (&s)[C::kColumns / 2], const float (&dp)[C::kColumns / 2]) {
    float zero = 0.0f;
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; n++)
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 2; i++) zero = fmaf(s[i], 0.0f, fmaf(dp[i], 0.0f, zero));
    if constexpr (C::kIsWide) return bar_any<C::kMathThreads>(kMathBarrier, zero != 0.0f);
    if (!__any_sync(0xffffffffu, zero != 0.0f)) return false;
    using Element = typename C::Element;
    const int lane = threadIdx.x % 32; // sums that overflow and keys that are not finite are some warps' alone
    const bool bad = any_nonfinite<Element, 32>(smem.queries[stage], sizeof smem.queries[0], lane) ||
                     any_nonfinite<Element, 32>(smem.douts[dout_stage], sizeof smem.douts[0], lane);
    if (!__any_sync(0xffffffffu, bad)) return false;
    bar_sync<C::kMathThreads>(kMathBarrier);
    return true;
}

// By all math threads: zeroes values of Q and dO that are not finite. NaN returns to P through S, to dS through g - delta, to dV by
// add_hidden.
template <class C>
__device__ __forceinline__ void clean_rows(
        float (&s)[C::kColumns / 2], Smem<C> &smem, int stage, int dout_stage, const Item &item, int math_warpgroup) {
    const int i = pinned(threadIdx.x - 128);
    for (int half = 0; half < C::kHalves; half++)
        zero_rows<C, C::kMathThreads>(smem.queries[stage] + half * C::kRowHalf, C::kRowHalf, i,
                [&](int row) { reinterpret_cast<uint16_t *>(smem.stats[stage].to_scores[row / 64])[row % 64] = 0x7fff; });
    for (int half = 0; half < C::kHalvesV; half++)
        zero_rows<C, C::kMathThreads>(
                smem.douts[dout_stage] + half * C::kRowHalf, C::kRowHalf, i, [&](int) { smem.hides[&item - smem.items] = true; });
    async_fence();
    bar_sync<C::kMathThreads>(kMathBarrier);
    const int column = first_row<C>(math_warpgroup) + fragment_column();
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; n++) {
        const int row = 8 * n + column;
        const auto pieces = *reinterpret_cast<const uint32_t *>(smem.stats[stage].to_scores[row / 64] + row % 64 * 2);
        const float of_row[2] = {__uint_as_float(pieces << 16), __uint_as_float(pieces & 0xffff0000)};
#pragma unroll
        for (int at = 4 * n; at < 4 * n + 4; at++) s[at] = fmaf(of_row[at % 2], 0.0f, s[at]);
    }
}

template <class C, int kSize> __device__ __forceinline__ void dq_product(float (&dq)[kSize], uint32_t ds, uint32_t keys) {
    const uint64_t left = operand(ds, 0), right = operand(keys, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kKeys / 16; step++)
        wgmma_shared_transposed<typename C::Element>(
                dq, operand_at(left, step * 16 * kRowBytes), operand_at(right, step * 16 * kRowBytes), step > 0);
    wgmma_commit();
}

// Which of a thread's columns see its two keys: a bit each, columns 8 n and 8 n + 1 after its first at bits 2 n and 2 n + 1.
struct Seen {
    uint32_t bits[2];

    __device__ __forceinline__ bool operator()(int r, int column) const { return bits[r] >> (column / 4 + column % 2) & 1; }
};

template <class C> __device__ __forceinline__ Seen find_seen(const Smem<C> &smem, const BwdProblem &p, int math_warpgroup, int t) {
    const auto bits_before = [&](int token) {
        const int column = min(max(token - t * p.tokens, 0), p.tokens) * p.group - first_row<C>(math_warpgroup) - fragment_column(),
                  count = column > 0 ? column / 8 * 2 + min(column % 8, 2) : 0;
        return count < 32 ? (1u << count) - 1 : ~0u;
    };
    const auto bits = [&](const sa_range &rows) { return bits_before(rows.end) & ~bits_before(rows.begin); };
    const sa_range *seen_by = smem.seen_by + first_key<C>(math_warpgroup) + warpgroup_row(0);
    return {{bits(seen_by[0]), bits(seen_by[8])}};
}

template <class C, bool kMasked>
__device__ __forceinline__ void find_weights(float (&s)[C::kColumns / 2], const Seen &seen, float scale_log2) {
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; i++) {
        const float p = exp2_approx(s[i] * scale_log2);
        s[i] = !kMasked || seen(i / 2 % 2, i / 4 * 8 + i % 2) ? p : 0.0f;
    }
}

// Which sums of p_sink dS a thread keeps. Where the GQA group divides 8 P, the heads of the thread's columns repeat after 2 P of them, and
// each of the 2 P has a sum; otherwise each lane keeps the sum of one column in 32. The values are P.
enum TermsOf { kTermsOfAny = -1, kNoTerms = 0, kTermsOf8 = 1, kTermsOf16 = 2, kTermsOf24 = 3 };
template <class C, TermsOf kTerms> constexpr int kNumTerms = kTerms == kTermsOfAny ? C::kColumns / 32 : 2 * kTerms;

// The column, of 32, whose sum the lane keeps.
__device__ __forceinline__ int lane_column() { return threadIdx.x / 8 % 4 * 8 + fragment_column() + threadIdx.x / 4 % 2; }

// The sum over the lanes of column lane_column(). columns: 8 n and 8 n + 1 after the lane's first, at 2 n and 2 n + 1.
__device__ __forceinline__ float sum_column(float (&columns)[8]) {
#pragma unroll
    for (int kept = 4; kept > 0; kept /= 2) {
        const bool upper = threadIdx.x & 4 * kept;
#pragma unroll
        for (int i = 0; i < kept; i++) {
            const float got = __shfl_xor_sync(0xffffffffu, upper ? columns[i] : columns[i + kept], 4 * kept);
            columns[i] = (upper ? columns[i + kept] : columns[i]) + got;
        }
    }
    return columns[0];
}

// dp becomes dS. Unless kTermsOfAny, terms gain p_sink dS.
template <class C, bool kMasked, TermsOf kTerms>
__device__ __forceinline__ void find_ds(float (&dp)[C::kColumns / 2], const float (&p)[C::kColumns / 2], Smem<C> &smem,
        const float *p_sinks, const Seen &seen, int math_warpgroup) {
    constexpr bool kAdds = kTerms > kNoTerms;
    const int column = first_row<C>(math_warpgroup) + fragment_column();
    float of_tile[kAdds ? kNumTerms<C, kTerms> : 1] = {};
#pragma unroll
    for (int n = 0; n < C::kColumns / 8; n++) {
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i++) dp[i] = !kMasked || seen(i / 2 % 2, 8 * n + i % 2) ? p[i] * dp[i] : 0.0f;
        if constexpr (kAdds) {
            const float2 p_sink = *reinterpret_cast<const float2 *>(&p_sinks[8 * n + column]);
            float &x = of_tile[n % kTerms * 2], &y = of_tile[n % kTerms * 2 + 1];
            x = fmaf(p_sink.x, dp[4 * n] + dp[4 * n + 2], x);
            y = fmaf(p_sink.y, dp[4 * n + 1] + dp[4 * n + 3], y);
        }
    }
    if constexpr (kAdds) {
        const int thread = pinned(threadIdx.x) - 128;
#pragma unroll
        for (int i = 0; i < kNumTerms<C, kTerms>; i++) smem.terms[i][thread] += of_tile[i];
    }
}

// With kTermsOfAny, when all of dS is there, as registers are short before: terms gain p_sink dS.
template <class C>
__device__ __forceinline__ void add_terms(const float (&ds)[C::kColumns / 2], Smem<C> &smem, const float *p_sinks, int math_warpgroup) {
    const int thread = pinned(threadIdx.x) - 128;
#pragma unroll
    for (int i = 0; i < C::kColumns / 32; i++) {
        float columns[8];
#pragma unroll
        for (int n = 0; n < 8; n++) columns[n] = ds[16 * i + n / 2 * 4 + n % 2] + ds[16 * i + n / 2 * 4 + n % 2 + 2];
        smem.terms[i][thread] += p_sinks[first_row<C>(math_warpgroup) + 32 * i + lane_column()] * sum_column(columns);
    }
}

// Waits for S and dP, and packs P and dS as operands: in two branches, so that ptxas does not move the wait for dP before P.
template <class C, TermsOf kTerms>
__device__ __forceinline__ void find_operands(float (&s)[C::kColumns / 2], float (&dp)[C::kColumns / 2],
        uint32_t (&weights)[C::kColumns / 16][4], uint32_t (&ds)[C::kColumns / 16][4], bool is_full, Smem<C> &smem, const BwdProblem &p,
        const Item &item, int t, uint32_t stage, uint32_t dout_stage, int math_warpgroup) {
    const float *p_sinks = smem.p_sink[stage];
    Seen seen;
    if (is_full) {
        wgmma_wait<1>();
        pin(s);
        find_weights<C, false>(s, seen, p.scale_log2);
    } else {
        seen = find_seen<C>(smem, p, math_warpgroup, t);
        wgmma_wait<0>();
        pin(s);
        pin(dp);
        if (any_nonfinite_row<C>(smem, stage, dout_stage, s, dp)) clean_rows<C>(s, smem, stage, dout_stage, item, math_warpgroup);
        find_weights<C, true>(s, seen, p.scale_log2);
    }
    if (is_full) {
        wgmma_wait<0>();
        pin(dp);
        find_ds<C, false, kTerms>(dp, s, smem, p_sinks, seen, math_warpgroup);
    } else {
        wgmma_wait<0>();
        pin(dp);
        find_ds<C, true, kTerms>(dp, s, smem, p_sinks, seen, math_warpgroup);
    }
    if (kTerms == kTermsOfAny) add_terms<C>(dp, smem, p_sinks, math_warpgroup);
    pack<typename C::Element>(weights, s);
    pack<typename C::Element>(ds, dp);
}

template <class C>
__device__ __forceinline__ void write_ds(Smem<C> &smem, const uint32_t (&ds)[C::kRows / 16][4], int math_warpgroup, uint32_t buffer) {
    const int thread = pinned(threadIdx.x), key = 64 * math_warpgroup + store_row(thread);
    const uint32_t first =
            swizzled(shared_address(smem.ds[0]) + buffer * static_cast<uint32_t>(sizeof smem.ds[0]), kRowBytes, key, store_chunk(thread));
#pragma unroll
    for (int n = 0; n < C::kRows / 16; n++) stmatrix_x4(pairs_on(first, n, sizeof smem.ds[0][0]), ds[n]);
}

// Stores the warpgroup's dS as rows x 64 keys, the second one's behind the first one's.
template <class C>
__device__ __forceinline__ void write_ds_by_rows(Smem<C> &smem, const uint32_t (&ds)[C::kRows / 16][4], int math_warpgroup) {
    const int thread = pinned(threadIdx.x), lane = thread % 32, chunk = thread % 128 / 32 * 2 + right_chunk(lane);
    const uint32_t first = swizzled(shared_address(smem.ds[0]) + math_warpgroup * C::kRowHalf, kRowBytes, right_row(lane), chunk);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; n++) stmatrix_x4_trans(first + n * 16 * kRowBytes, ds[n]);
}

// Writes the thread's row r, times a factor and rounded. Four lanes exchange their pairs, so that each writes whole 16-byte chunks.
template <class Element, int kLength>
__device__ __forceinline__ void write_row(
        uint16_t *to, const float (&d)[kLength], int r, float factor, int first_column, int64_t head_dim, bool is_real) {
#pragma unroll
    for (int n = 0; n < kLength / 4; n += 4) {
        uint32_t x[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            x[c] = pack_halves<Element>(fmaf(d[4 * (n + c) + 2 * r], factor, 0.0f), fmaf(d[4 * (n + c) + 2 * r + 1], factor, 0.0f));
        quad_transpose(x);
        const int column = first_column + 8 * (n + threadIdx.x % 4);
        if (is_real && column < head_dim) *reinterpret_cast<uint4 *>(to + column) = {x[0], x[1], x[2], x[3]};
    }
}

// Adds the sum of the earlier key blocks to dQ of the last one, and writes dq.
template <class C, int kSize>
__device__ __forceinline__ void finish_tile(float (&dq)[kSize], const float *sum, int first_float4s, bool is_alone, const Smem<C> &smem,
        const sinkattn_bwd_args &args, const BwdProblem &p, const Item &item, int t, int tile_row, int first_column) {
    const int first = t * p.tokens;
    auto *to = static_cast<uint16_t *>(args.dq.data) + sa_offset(&args.dq, item.batch, item.q_begin + first, item.slice * p.group);
    if (!is_alone) {
#pragma unroll
        for (int i = 0; i < kSize / 4; i++) {
            if (C::kHeadDim % 64 != 0 && first_column + 8 * i >= C::kHeadDim) continue;
            const float4 before = reinterpret_cast<const float4 *>(sum)[(first_float4s + i) * 128 + threadIdx.x % 128];
            dq[4 * i] += before.x;
            dq[4 * i + 1] += before.y;
            dq[4 * i + 2] += before.z;
            dq[4 * i + 3] += before.w;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = tile_row + warpgroup_row(r), token = smem.token[row];
        const bool is_real = first + token < item.band.q_len && row - token * p.group < p.heads_of(item.slice);
        write_row<typename C::Element>(to + smem.dq_offset[row], dq, r, p.scale, first_column, args.fwd.problem.head_dim, is_real);
    }
}

// Writes the warpgroup's terms of ds_aux of the item, one a head. The next item's begin behind a barrier of prepare_keys.
template <class C, TermsOf kTerms>
__device__ __forceinline__ void write_terms(
        Smem<C> &smem, const BwdProblem &p, const BwdBuffers &buffers, const Item &item, int math_warpgroup) {
    constexpr int kColumns = kTerms == kTermsOfAny ? C::kColumns : 8 * kTerms;
    const int thread = threadIdx.x - 128, head = thread % 128;
    float sum = 0.0f;
    if (item.has_tiles()) {
        // A warp's columns, 32 in a row of terms, take the place of its lanes' sums.
        for (int i = 0; i < kNumTerms<C, kTerms>; i++) {
            float x = smem.terms[i][thread];
            if constexpr (kTerms == kTermsOfAny) {
                __syncwarp();
                smem.terms[i][thread / 32 * 32 + lane_column()] = x;
            } else {
                for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
                __syncwarp();
                const int column = i / 2 * 8 + fragment_column() + i % 2;
                if (thread % 32 < 4) smem.terms[column / 32][thread / 32 * 32 + column % 32] = x;
            }
        }
        bar_sync<128>(kOwnBarrier + math_warpgroup);
        int first = head; // of the columns, the first whose row is the head's
        if constexpr (C::kIsWide) {
            const int before = first_row<C>(math_warpgroup) % p.group;
            first = head - before + (head < before ? p.group : 0);
        }
        for (int column = head < p.group ? first : kColumns; column < kColumns; column += p.group)
#pragma unroll
            for (int warp = 0; warp < 4; warp++) sum += smem.terms[column / 32][128 * math_warpgroup + 32 * warp + column % 32];
    }
    if (head >= p.heads_of(item.slice)) return;
    buffers.key_terms[((item.slice * p.group + head) * p.num_items + item.nth) * 2 + math_warpgroup] = -sum;
}

// Adds the values of dO that clean_rows zeroed, in masked tiles, to dV of the keys that their rows see.
template <class C, int kSize>
__device__ __forceinline__ void add_hidden(float (&dv)[kSize], const Smem<C> &smem, const sinkattn_bwd_args &args, const BwdProblem &p,
        const Item &item, int math_warpgroup, int first_column, const int64_t &columns) {
    const sa_range *seen_by = smem.seen_by + first_key<C>(math_warpgroup) + warpgroup_row(0);
#pragma unroll 1
    for (int n = item.tiles.begin * C::kRows; n < item.tiles.end * C::kRows; n++) {
        const int t = n / C::kRows, row = n % C::kRows;
        const int64_t token = static_cast<int64_t>(t) * p.tokens + smem.token[row];
        const int64_t head = item.slice * p.group + row % p.group;
        if ((t >= item.tiles.full_begin && t < item.tiles.full_end) || token >= item.band.q_len || head >= p.num_q_heads) continue;
        add_nonfinite<typename C::Element>(dv,
                static_cast<const uint16_t *>(args.dout.data) + sa_offset(&args.dout, item.batch, item.q_begin + token, head) +
                        first_column,
                columns, [&](int r) { return token >= seen_by[8 * r].begin && token < seen_by[8 * r].end; });
    }
}

// A math warpgroup's half of a carry: float4s of its 128 threads.
template <class C> __device__ __forceinline__ float4 *own_carry(const BwdBuffers &buffers, int64_t carry, int math_warpgroup) {
    return reinterpret_cast<float4 *>(buffers.carries) + (2 * carry + math_warpgroup) * kHalfCarry<C>;
}

// Adds dK and dV in a carry to the sums, unless they are the first, and stores the sums for the next, unless they are the last.
template <class C, class... Sums>
__device__ __forceinline__ void add_carry(
        const BwdBuffers &buffers, int64_t carry, bool is_shared, unsigned turn, bool is_first, bool is_last, Sums &...sums) {
    unsigned long long *turns = buffers.carry_turns + carry;
    if (is_shared) wait_for_turn(turns, turn);
    float4 *at = own_carry<C>(buffers, carry, (threadIdx.x - 128) / 128) + threadIdx.x % 128;
    const auto add = [&](auto &d) {
        constexpr int kSize = sizeof d / sizeof d[0], kBatch = kSize % 32 == 0 ? 8 : 4; // loads in flight
#pragma unroll
        for (int first = 0; first < kSize; first += 4 * kBatch, at += kBatch * 128) {
            if (!is_first) {
                float4 before[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; i++) before[i] = __ldcg(at + i * 128);
#pragma unroll
                for (int i = 0; i < kBatch; i++) {
                    d[first + 4 * i] += before[i].x;
                    d[first + 4 * i + 1] += before[i].y;
                    d[first + 4 * i + 2] += before[i].z;
                    d[first + 4 * i + 3] += before[i].w;
                }
            }
            if (is_last) continue;
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                const float *of = d + first + 4 * i;
                __stcg(at + i * 128, float4{of[0], of[1], of[2], of[3]});
            }
        }
    };
    (add(sums), ...);
    if (!is_shared) return;
    bar_sync<C::kMathThreads>(kMathBarrier);
    if (threadIdx.x == 128) store_release(turns, turn + 1);
}

// The carry of an item: its place, that of its block of keys, which items share, or that of this block of threads.
__device__ __forceinline__ int64_t carry_of(const BwdProblem &p, const Item &item) {
    return item.has_place() ? p.places_at - 2 - item.carry : item.carry < 0 ? p.num_carries + blockIdx.x : item.carry;
}

// Adds dK and dV of the earlier rounds to those of round `part`, unless the item leaves its own apart.
template <class C, class... Sums>
__device__ __forceinline__ void add_round(const BwdProblem &p, const BwdBuffers &buffers, const Item &item, int part, Sums &...sums) {
    const bool is_apart = item.has_place(), is_last = part == item.num_parts - 1;
    add_carry<C>(buffers, carry_of(p, item), item.carry >= 0, item.carry_turn, part == 0 || is_apart, is_last && !is_apart, sums...);
}

// Whether the last kernel writes dK and dV of the item's block.
__device__ __forceinline__ bool is_left_apart(const BwdProblem &p, const Item &item) {
    return item.has_place() && (item.num_parts > 1 || p.slices > 1);
}

// Adds each key's poison, NaN or 0, to its dK or dV.
template <int kSize> __device__ __forceinline__ void add_poison(float (&d)[kSize], const float (&poison)[2]) {
#pragma unroll
    for (int i = 0; i < kSize; i++) d[i] += poison[i / 2 % 2];
}

// Adds dK and dV of the kv head's earlier slices; true for the last one.
template <class C, class... Sums>
__device__ __forceinline__ bool add_slice(const BwdProblem &p, const BwdBuffers &buffers, const Item &item, Sums &...sums) {
    if (p.slices == 1) return true;
    const int nth = item.slice % p.slices;
    const bool is_last = nth == p.slices - 1;
    add_carry<C>(buffers, item.slice_carry, true, nth, nth == 0, is_last, sums...);
    return is_last;
}

// What is added to the factors of dK and dV of the thread's two keys: NaN, if K was not finite and some row sees the key.
template <class C>
__device__ __forceinline__ void find_poison(float (&poison)[2], const Smem<C> &smem, const Item &item, int math_warpgroup) {
    for (int r = 0; r < 2; r++) {
        const int own = first_key<C>(math_warpgroup) + warpgroup_row(r);
        poison[r] = item.has_tiles() && smem.poisoned[own] && smem.seen_by[own].begin < smem.seen_by[own].end ? NAN : 0.0f;
    }
}

template <class C>
__device__ __forceinline__ void write_keys(float (&dk)[C::kHeadDim / 2], float (&dv)[C::kHeadDim / 2], const float (&poison)[2],
        const sinkattn_bwd_args &args, const BwdProblem &p, const Item &item, int math_warpgroup) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = 64 * math_warpgroup + warpgroup_row(r);
        const int64_t key = item.key + own;
        const bool real = key < item.band.k_len;
        const float added = poison[r];
        auto *to_dk = static_cast<uint16_t *>(args.dk.data), *to_dv = static_cast<uint16_t *>(args.dv.data);
        if (real) {
            to_dk += sa_offset(&args.dk, item.batch, item.k_begin + key, item.slice / p.slices);
            to_dv += sa_offset(&args.dv, item.batch, item.k_begin + key, item.slice / p.slices);
        }
        write_row<typename C::Element>(to_dk, dk, r, p.scale + added, 0, args.fwd.problem.head_dim, real);
        write_row<typename C::Element>(to_dv, dv, r, 1.0f + added, 0, args.fwd.problem.head_dim, real);
    }
}

} // namespace sa::bwd_sm90
