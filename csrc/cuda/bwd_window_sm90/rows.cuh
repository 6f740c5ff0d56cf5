// SPDX-License-Identifier: Apache-2.0
//
// The row warpgroup of the windowed backward on sm_90. Warp 0, the producer, finds and loads steps; warps 1
// and 2 prepare rows, and with warp 3 check keys; all four sum dQ.
#pragma once

#include "cuda/bwd_window_sm90/sink_tokens.cuh"
#include "cuda/bwd_window_sm90/smem.cuh"
#include "cuda/bwd_window_sm90/walk.cuh"
#include "cuda/tile/finite.cuh"
#include "cuda/tile/mma.cuh"
#include "cuda/tile/wgmma.cuh"

namespace sa::bwd_window_sm90 {

// threadIdx.x. With sink tokens read again at each use, since no register is free to keep what follows from it.
template <class C> __device__ __forceinline__ int row_thread() {
    if (C::kSinkTokens) return pinned(threadIdx.x);
    return threadIdx.x;
}

// Loads steps up to `limit`, by one warp. Key tile m takes the stage of tile m - 4 once dQ of every step of tile m - 2 is done: finished is
// the newest tile of which that is true. False once there are no more steps.
template <class C>
__device__ __forceinline__ bool load_steps(
        Smem &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p, uint32_t &loaded, uint32_t limit, int finished) {
    const int lane = row_thread<C>() % 32;
    while (loaded <= limit) {
        const Ring<kStages> use{loaded};
        const int stage = use.stage();
        Barrier &full = smem.step_full[stage];
        Step step;
        step.flags = 0;
        if (loaded > 0 && next_in_tile(step, smem.steps[(loaded - 1) % kStages], p)) {
            smem.step_empty.acquire(use);
            if (lane == 0) smem.steps[stage] = step;
            if (C::kSinkTokens && lane == 0) copy_sink_step(smem, loaded);
            __syncwarp();
        } else {
            if (smem.walk.newest >= finished + 2) return true; // the next tile is one more
            smem.step_empty.acquire(use);
            __syncwarp();
            if (lane == 0) next_tile(smem.steps[stage], smem.walk, args.fwd, p);
            if (C::kSinkTokens && lane == 0) describe_sink_step(smem, stage, args.fwd, p);
            __syncwarp();
            step = smem.steps[stage];
        }
        loaded++;
        const bool exists = step.flags & kExists;
        if (lane == 0 && exists) {
            store_wait_read<1>(); // at most one dQ, the newest, is still leaving: this stage's has left
            full.arrive_expect((3 + 2 * __popc(step.loaded())) * kTileBytes);
            tensor_load(smem.q[stage], &maps.q, full, 0, step.head, step.row, step.batch);
            tensor_load(smem.dout[stage], &maps.dout, full, 0, step.head, step.row, step.batch);
            tensor_load(smem.out[stage], &maps.out, full, 0, step.head, step.row, step.batch);
#pragma unroll 1
            for (int age = kSeenTiles - 1; age >= 0 && step.loaded(); age--) {
                if (!(step.loaded() >> age & 1)) continue;
                const int key_stage = (step.newest - age) % kKeyStages, key = step.key - age * kKeys;
                tensor_load(smem.k[key_stage], &maps.k, full, 0, step.kv_head, key, step.batch);
                tensor_load(smem.v[key_stage], &maps.v, full, 0, step.kv_head, key, step.batch);
            }
        } else if (lane == 0) {
            full.arrive();
        }
        const int token = lane >> p.head_shift, head = lane & (p.heads() - 1);
        const int64_t at = (static_cast<int64_t>(step.batch) * args.fwd.problem.num_q_heads + step.head + head) * args.fwd.problem.q_len +
                           step.row + token;
#pragma unroll
        for (int i = 0; i < kRows; i += 32) {
            const int here = token + (i >> p.head_shift);
            const bool real = exists && step.token + here >= step.begin && step.token + here < step.end;
            const int64_t from = real ? at + (i >> p.head_shift) : 0;
            cp_async_4(shared_address(&smem.lse[stage][lane + i]), static_cast<const float *>(args.fwd.lse) + from, real);
            if (args.dlse) cp_async_4(shared_address(&smem.g[stage][lane + i]), static_cast<const float *>(args.dlse) + from, real);
        }
        full.arrive_copied();
        if (!exists) return false;
    }
    return true;
}

// A thread checks half a key at a time and zeroes keys past the sequence: a masked pair's dS = 0 times K must be zero.
template <class C> __device__ __forceinline__ void check_keys(Smem &smem, int key_stage, int num_keys) {
#pragma unroll 1
    for (int i = row_thread<C>() - 32; i < 2 * kKeys; i += kPreparers) {
        const int key = i / 2, half = i % 2;
        bool found = false;
        uint32_t bad_k = 0, bad_v = 0;
#pragma unroll
        for (int c = 4 * half; c < 4 * half + 4; c++) {
            auto *chunk = reinterpret_cast<uint4 *>(smem.k[key_stage] + swizzled(key, c));
            const uint4 x = *chunk;
            if (key >= num_keys) {
                *chunk = {};
            } else if (any_nonfinite<typename C::Element>(x.x) || any_nonfinite<typename C::Element>(x.y) ||
                       any_nonfinite<typename C::Element>(x.z) || any_nonfinite<typename C::Element>(x.w)) {
                found = true;
            }
            if (C::kHide) {
                bad_k |= zero_chunk<typename C::Element>(smem.k[key_stage] + swizzled(key, c));
                bad_v |= zero_chunk<typename C::Element>(smem.v[key_stage] + swizzled(key, c));
            }
        }
        if (found && !C::kHide) smem.nonfinite = 1;
        if (C::kHide) {
            const uint32_t bad = (bad_k ? 1 : 0) | (bad_v ? 2 : 0), both = bad | __shfl_xor_sync(0xffffffffu, bad, 1);
            if (half == 0) smem.bad_keys[key_stage][key] = both;
        }
    }
}

// s_aux of the thread's row, loaded again when the head changes.
struct Sink {
    int head = -1;
    float value = -INFINITY;
};

// By the thread of the row: zeroes a row that does not exist; in the second launch also q and dO that are not finite.
template <class C> __device__ __forceinline__ void clean_row(Smem &smem, int stage, int row, bool real) {
    using Element = typename C::Element;
    uint32_t bad_row = 0;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        uint32_t bad = 0;
#pragma unroll 1
        for (int c = 0; c < 4; c++) {
            const int at = swizzled(row, 4 * half + c);
            if (!real) {
                *reinterpret_cast<uint4 *>(smem.q[stage] + at) = {};
                *reinterpret_cast<uint4 *>(smem.dout[stage] + at) = {};
            } else if (C::kHide) {
                if (zero_chunk<Element>(smem.q[stage] + at)) bad_row |= 1;
                bad |= zero_chunk<Element>(smem.dout[stage] + at) << 8 * c;
            }
        }
        if (C::kHide) smem.bad_dout[stage][row][half] = bad;
        if (bad) bad_row |= 2;
    }
    if (C::kHide) smem.bad_rows[stage][row] = bad_row;
}

// lse, g - delta and p_sink of step n's rows, a thread a row, by warps 1 and 2; with warp 3 they check the step's new keys. False after the
// last step.
template <class C>
__device__ __forceinline__ bool prepare_step(
        Smem &smem, const sinkattn_bwd_args &args, const Problem &p, uint32_t n, Sink &sink, float &terms) {
    using Element = typename C::Element;
    const Ring<kStages> use{n};
    const int stage = use.stage(), thread = row_thread<C>(), lane = thread % 32, row_warp = thread / 32 - 1;
    smem.step_full.wait(use);
    const Step &step = smem.steps[stage];
    const int flags = step.flags;
    if (flags & kExists) {
        if (flags & kTileBegin)
#pragma unroll 1
            for (int age = 0; age < kSeenTiles; age++)
                if (step.loaded() >> age & 1) check_keys<C>(smem, (step.newest - age) % kKeyStages, step.num_keys + age * kKeys);
        if (row_warp < kRowWarps) {
            const int row = thread - 32, token = step.token + (row >> p.head_shift);
            const bool real = token >= step.begin && token < step.end;
            if (C::kHide || flags & kEdge) {
                clean_row<C>(smem, stage, row, real);
                __syncwarp();
            }
            const float delta = row_dot<Element>(shared_address(smem.dout[stage]) + 32 * row_warp * kRowBytes,
                    shared_address(smem.out[stage]) + 32 * row_warp * kRowBytes);
            const int head = step.head + (row & (p.heads() - 1));
            if (C::kSums && head != sink.head) {
                sink.head = head;
                sink.value = static_cast<float>(sa_load(args.fwd.s_aux, args.fwd.problem.s_aux_dtype, head));
            }
            const float lse = smem.lse[stage][row], g = args.dlse ? smem.g[stage][row] : 0.0f;
            float p_sink = 0.0f;
            if (C::kSums && real && flags & kHasSink && flags & kOwnsRows && sink.value != -INFINITY) { // else g may be anything
                p_sink = sink.value == lse ? 1.0f : exp2_approx((sink.value - lse) * kLog2e);
                terms = fmaf(p_sink, g, terms);
            }
            smem.lse[stage][row] = !real ? INFINITY : lse == -INFINITY ? 0.0f : lse * kLog2e;
            smem.bias[stage][row] = {real ? g - delta : 0.0f, p_sink};
            smem.token[stage][row] = real ? token : kNoToken;
            if (C::kSums && args.dlse) {
                float *sums = smem.terms[step.kv_head % 4][row_warp]; // the math may be two kv heads behind
                if (flags & kKvHeadBegin) {
                    for (int h = lane; h < kHeads; h += 32) sums[h] = 0.0f;
                    __syncwarp();
                }
                if (flags & kHeadsEnd) {
                    for (int distance = 16; distance >= p.heads(); distance /= 2) terms += __shfl_xor_sync(0xffffffffu, terms, distance);
                    if (lane < p.heads()) sums[step.head_in_group + lane] += terms;
                    terms = 0.0f;
                }
            }
        }
        if (C::kHide || flags & (kTileBegin | kEdge))
            async_fence(); // else wgmma reads nothing written here, and the fence would wait for dQ's stores
    }
    __syncwarp();
    smem.step_ready[stage].arrive();
    return flags & kExists;
}

// dQ over kBlocks blocks of 16 keys, the oldest first; `first`: the first one, counted from the oldest key tile's. Sink tokens come before
// them, with `sinks` as their dS. between(i): after the first and the second third of the products, and after the last.
template <class C, int kBlocks, class Between>
__device__ __forceinline__ void dq_product(float (&dq)[32], const Smem &smem, uint32_t n, uint32_t newest, uint32_t first,
        const uint32_t (&sinks)[4], const Between &between) {
    const uint32_t base = warp_uniform_register(shared_address(&smem)), k_block = 4 * (newest - 2) + first;
    uint32_t ds_at = base + offsetof(Smem, ds) + n % 2 * sizeof(smem.ds[0]) + first * kBlockBytes;
    if (C::kSinkTokens > 0) ds_at = warp_uniform_register(ds_at); // else ptxas keeps it in ordinary registers, of which none is free
    const uint64_t ds = operand(ds_at, kTileBytes), k = operand(base + offsetof(Smem, k), kTileBytes);
    wgmma_fence();
    if constexpr (C::kSinkTokens > 0) wgmma_registers<typename C::Element>(dq, sinks, operand(base + sizeof(Smem), kTileBytes), false);
#pragma unroll
    for (int i = 0; i < kBlocks; i++) {
        wgmma_shared_transposed<typename C::Element>(dq, operand_at(ds, i * kBlockBytes),
                operand_at(k, (k_block + i) * kBlockBytes & (kKeyStages * kTileBytes - 1)), C::kSinkTokens > 0 || i > 0);
        if (i == kBlocks / 3 - 1) between(std::integral_constant<int, 0>());
        if (i == 2 * kBlocks / 3 - 1) between(std::integral_constant<int, 1>());
    }
    wgmma_commit();
    between(std::integral_constant<int, 2>());
    wgmma_wait<0>();
    pin(dq);
}

// Writes dQ of step n over its out, already read for delta.
template <class C> __device__ __forceinline__ void stage_dq(const float (&dq)[32], Smem &smem, uint32_t n, const Problem &p) {
    const int thread = row_thread<C>();
    const uint32_t to = shared_address(smem.out[n % kStages]) + swizzled(thread / 32 * 16 + left_row(thread), store_chunk(thread));
    store_accumulator<typename C::Element, 0>(to, dq, [&](int) { return p.scale; });
    async_fence();
}

// Copies it to dq, by the producer. One bulk group a step, whether or not it copies: store_wait_read counts groups.
__device__ __forceinline__ void send_dq(const Smem &smem, const Maps &maps, uint32_t n) {
    if (threadIdx.x == 0) {
        const Step &step = smem.steps[n % kStages];
        if ((step.flags & (kOwnsRows | kEdge)) == kOwnsRows)
            tensor_store(&maps.dq, smem.out[n % kStages], 0, step.head, step.row, step.batch);
        store_commit();
    }
    __syncwarp();
}

// Writes dQ by the threads, where some of the step's rows do not exist. Two lanes exchange halves of a 16-byte chunk, so that a row's four
// lanes write two whole chunks.
template <class C>
__device__ __forceinline__ void write_dq(const float (&dq)[32], const Step &step, const sinkattn_bwd_args &args, const Problem &p) {
    const int thread = row_thread<C>(), row = warpgroup_row(thread, 0), column = 8 * (thread & 1) + 2 * (thread & 2);
    const bool odd = thread & 1;
    const int first = row >> p.head_shift, head = row & (p.heads() - 1);
    auto *to = static_cast<uint16_t *>(args.dq.data) + sa_offset(&args.dq, step.batch, step.row + first, step.head + head) + column;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = step.token + first + (8 * i >> p.head_shift);
        const bool real = token >= step.begin && token < step.end;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t x[2];
#pragma unroll
            for (int c = 0; c < 2; c++)
                x[c] = pack_halves<typename C::Element>(dq[4 * (n + c) + 2 * i] * p.scale, dq[4 * (n + c) + 2 * i + 1] * p.scale);
            const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
            if (real && column + 8 * n < args.fwd.problem.head_dim)
                *reinterpret_cast<uint2 *>(to + 8 * n) = {odd ? got : x[0], odd ? x[1] : got};
        }
        to += (8 >> p.head_shift) * args.dq.row_stride;
    }
}

// Computes dQ of step n, the sink tokens' part first. True if the step was its tile's last.
template <class C>
__device__ __forceinline__ bool add_dq(Smem &smem, const sinkattn_bwd_args &args, const Problem &p, uint32_t n, SinkTokens<C> &sinks) {
    using Element = typename C::Element;
    // The sink tokens' dK and dV between dQ's products, which wait for their turn; else before them, since no register is free beside dQ.
    constexpr bool kBetween = C::kSinkTokens == 8 && !C::kHide;
    float dq[32] = {};
    uint32_t sink_ds[4] = {};
    bool meets_sinks = false;
    if constexpr (C::kSinkTokens > 0) {
        meets_sinks = sinks.begin_step(static_cast<SinkSmem &>(smem), args, p, n);
        if (kBetween) sinks.read_pairs(sink_ds, smem, n);
        if (!kBetween && meets_sinks) {
            sinks.template end_step<0>(smem, p, n);
            sinks.template end_step<1>(smem, p, n);
            sinks.read_pairs(sink_ds, smem, n);
            sinks.template end_step<2>(smem, p, n);
        }
    }
    smem.ds_full.wait({n});
    const Step &step = smem.steps[n % kStages];
    const int flags = step.flags;
    const bool owns = __any_sync(0xffffffffu, flags & kOwnsRows);
    if (owns) {
        const int count = warp_uniform_register(__popc(step.seen())), newest = warp_uniform_register(step.newest);
        const auto between = [&](auto part) {
            constexpr int kPart = decltype(part)::value;
            if constexpr (kBetween)
                if (kPart < 2 || meets_sinks) sinks.template end_step<kPart>(smem, p, n); // asked between products, wgmma would be serial
        };
        // Blocks of 16 keys from the first that the first row sees to the last that the last row sees; dS of others is zero.
        const uint32_t token = warp_uniform_register(step.token), first = (2 * kKeys + token - p.max_distance) / 16,
                       end = (2 * kKeys + token + p.tokens() + 15) / 16;
        if (count == 3 && end - first <= 9)
            dq_product<C, 9>(dq, smem, n, newest, min(first, 3), sink_ds, between);
        else if (count == 3)
            dq_product<C, 12>(dq, smem, n, newest, 0, sink_ds, between);
        else if (count == 2)
            dq_product<C, 8>(dq, smem, n, newest, 4, sink_ds, between);
        else if (count == 1)
            dq_product<C, 4>(dq, smem, n, newest, 8, sink_ds, between);
        if (flags & kEdge)
            write_dq<C>(dq, step, args, p);
        else
            stage_dq<C>(dq, smem, n, p);
    }
    if constexpr (C::kSinkTokens > 0 && C::kSums) sinks.close_sums(smem, p, n);
    // All four warps have finished the product and staged dQ: the producer may send dQ and reuse the stage of the step before; dS and, at a
    // tile's end, its oldest keys may be replaced.
    bar_sync<128>(kRowBarrier);
    return flags & kTileEnd;
}

template <class C> __device__ __forceinline__ void run_rows(Smem &smem, const sinkattn_bwd_args &args, const Maps &maps, const Problem &p) {
    const bool producer = threadIdx.x < 32;
    uint32_t loaded = 0, prepared = 0, done = 0; // steps
    int finished = kSeenTiles - 2;               // the newest key tile whose steps are all done
    bool more = true, ended = false;             // more steps to load; no more to prepare
    Sink sink;
    float terms = 0.0f;
    SinkTokens<C> sinks;
    // In flight at the top: copies of steps up to loaded - 1 (the preparers have waited for those below prepared, the producer for none);
    // dQ of steps done - 2 and done - 1 leaving. Where no step is loaded, as in the tail, older dQ may be leaving too: only a load
    // overwrites its stage, and it waits.
    while (true) {
        if (!ended && prepared < done + 2) {
            if (producer) {
                if (more) more = load_steps<C>(smem, args, maps, p, loaded, done + 2, finished);
                ended = !(smem.steps[prepared % kStages].flags & kExists);
            } else {
                ended = !prepare_step<C>(smem, args, p, prepared, sink, terms);
            }
            __syncwarp();
            prepared += !ended;
        } else if (done < prepared) {
            if (add_dq<C>(smem, args, p, done, sinks)) finished = smem.steps[done % kStages].newest;
            if (producer) send_dq(smem, maps, done);
            done++;
        } else {
            break;
        }
    }
    if (threadIdx.x == 0) store_wait();
}

} // namespace sa::bwd_window_sm90
