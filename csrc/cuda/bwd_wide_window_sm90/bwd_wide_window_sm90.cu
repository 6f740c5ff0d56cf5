// SPDX-License-Identifier: Apache-2.0
//
// Backward for causal windows of up to 128 keys before a row on sm_90: head_dim 104 to 128, with positional sink tokens 72 to 128, or to
// 192 with values of at most 128 columns.
//
//     rows    dQ by row tiles; lse, g - delta and the term of ds_aux of each row           rows.cuh, spans.cuh
//     keys    dK and dV by blocks of 128 keys, over the rows that see them                 keys.cuh, blocks.cuh
//     tokens  dK and dV of positional sink tokens, if there are any: adds the partials of the keys launch
//     sink    ds_aux of a head: the sum of its rows' terms, where it is wanted
//
// S and dP are computed in both launches, 7 products where one launch would take 5; in return only sink tokens' sums lie in fp32 memory,
// none is added by atomics, and no block waits for another. A row tile is whole tokens x a GQA group's heads. The LSE that is read holds
// the sink, which no kernel here adds again.
//
// 0 * NaN is not 0. The launch of rows zeroes such values of K, the launch of keys those of Q and dO, and each puts NaN where it was seen.
//
// Shared memory and registers: docs/kernels/bwd_wide_window_sm90.md, Budget.

#include "cuda/bwd_wide_window_sm90/blocks.cuh"
#include "cuda/bwd_wide_window_sm90/keys.cuh"
#include "cuda/bwd_wide_window_sm90/rows.cuh"
#include "cuda/bwd_wide_window_sm90/smem.cuh"
#include "cuda/bwd_wide_window_sm90/spans.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/work/sink_terms.cuh"

namespace sa::bwd_wide_window_sm90 {
namespace {

// A block sums the terms of one head's ds_aux, in an order that depends on sizes alone.
__global__ __launch_bounds__(kSinkThreads) void sink_kernel(
        const __grid_constant__ sinkattn_bwd_args args, const __grid_constant__ Problem p) {
    __shared__ double sums[kSinkThreads / 32];
    const int head = static_cast<int>(blockIdx.x), kv_head = head / p.group;
    const RowStats *stats = p.stats + kv_head * p.num_tokens * p.group + (head - kv_head * p.group);
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < p.num_tokens; i += kSinkThreads) sum += stats[i * p.group].term;
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < kSinkThreads / 32; warp++) sum += sums[warp];
    wait_for_previous_kernel(); // the kernel after this one waits for this one alone
    sa_store(args.ds_aux, args.fwd.problem.s_aux_dtype, head, sum);
}

constexpr int kSinksABlock = 4;

// A block adds the partials of kSinksABlock positional sink tokens of a sequence and kv head, a thread those of one column of one token.
__global__ __launch_bounds__(kSinksABlock *SA_BWD_WIDE_WINDOW_PARTIAL) void sink_tokens_kernel(
        const __grid_constant__ sinkattn_bwd_args args, const __grid_constant__ Problem p) {
    const sinkattn_problem &problem = args.fwd.problem;
    const unsigned parts = (p.num_sinks + kSinksABlock - 1) / kSinksABlock, kv_head = blockIdx.x / parts % p.num_kv_heads,
                   b = blockIdx.x / parts / p.num_kv_heads;
    const sa_sequence sequence = sa_sequence_at(&args.fwd, b);
    const sa_band band = band_of(args.fwd, sequence);
    const int key = static_cast<int>(blockIdx.x % parts * kSinksABlock + threadIdx.x / SA_BWD_WIDE_WINDOW_PARTIAL),
              column = static_cast<int>(threadIdx.x % SA_BWD_WIDE_WINDOW_PARTIAL), row = p.first_row(band);
    wait_for_previous_kernel();
    if (row >= band.q_len || key >= min(p.num_sinks, band.k_len)) return; // without stretches the keys kernel wrote dK and dV
    const int first = row / p.stretch_tokens, count = 2 * (sa_tile_from(band.q_len, p.stretch_tokens) - first);
    const auto partial = [&](int64_t slot) { return p.partial_of(static_cast<int>(kv_head), slot, key) + column; };
    const int64_t slot = 2 * (p.first_stretch(sequence, b) + first);
    float sum = *partial(p.window_slot(sequence, b));
#pragma unroll 16
    for (int i = 0; i < count; i++) sum += *partial(slot + i);
    const bool is_key = column < 128;
    const sinkattn_tensor &tensor = is_key ? args.dk : args.dv;
    if (column % 128 < (is_key ? problem.head_dim : sa_head_dim_v(&problem)))
        sa_store(tensor.data, problem.dtype, sa_offset(&tensor, sequence.batch, sequence.k_begin + key, kv_head) + column % 128,
                is_key ? sum * p.scale : sum);
}

constexpr int kSpanStart = 16; // tokens that take as long as the start of a span: a guess

// Tokens of a span whose keys lie in so many steps, from a multiple of 16 on: whole tiles, of which one must fit.
int find_span_tokens(int64_t window_keys, int tokens, int keys) {
    return static_cast<int>(keys - (kStepKeys - 1) - (window_keys - 1)) / tokens * tokens;
}

// Pieces of `size` tokens or keys of all sequences, and of a dense one.
int64_t count_pieces(const sinkattn_problem &problem, int64_t length, int64_t size) {
    return problem.packed ? sa_packed_tiles(length, size, problem.batch + 1) : problem.batch * sa_ceil_div(length, size);
}

template <class C>
sinkattn_status launch_rows(
        const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context, Problem p, Maps maps) {
    static_assert(sizeof(RowsSmem<C>) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const sinkattn_problem &problem = args.fwd.problem;
    sinkattn_problem of_values = problem;
    of_values.head_dim = sa_head_dim_v(&problem);
    // Of the lengths that fit, the one with the least rounds x (tokens + start). It changes no bit.
    const int most_tokens = find_span_tokens(sa_window_keys(&problem.mask), p.tokens, C::kKeys);
    int64_t least = INT64_MAX;
    for (int tokens = most_tokens; tokens > 0; tokens -= p.tokens) {
        const int64_t rounds = sa_ceil_div(count_pieces(problem, problem.q_len, tokens) * problem.num_kv_heads, plan.workers);
        const int64_t work = rounds * (tokens + kSpanStart);
        if (work >= least) continue;
        least = work;
        p.span_tokens = tokens;
    }
    const int64_t spans = count_pieces(problem, problem.q_len, p.span_tokens), items = spans * problem.num_kv_heads;
    if (items > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld spans of rows; a launch holds at most 2^31", static_cast<long long>(items));
    p.num_spans = static_cast<unsigned>(spans);
    p.batch_spans = problem.packed ? 0 : static_cast<unsigned>(spans / problem.batch);
    unsigned *error_word;
    SA_TRY(sa_cuda_error_word(&error_word));
    SA_TRY(map_keys(&maps.k, problem, args.fwd.k, C::kKeys / 2, "k"));
    SA_TRY(map_keys(&maps.v, of_values, args.fwd.v, C::kKeys, "v"));
    if (C::kSinks) {
        SA_TRY(map_keys(&maps.sink_k, problem, args.fwd.k, kStepKeys, "k"));
        SA_TRY(map_keys(&maps.sink_v, of_values, args.fwd.v, kStepKeys, "v"));
    }
    const auto blocks = static_cast<unsigned>(sa_min(items, plan.workers));
    return launch_blocks<rows_kernel<C>>(
            "sa_bwd_cuda_sm90_wide_window", blocks, kThreads, sizeof(RowsSmem<C>), context.stream, args, maps, p, error_word);
}

template <class C>
sinkattn_status launch_keys(
        const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context, Problem p, Maps maps) {
    static_assert(sizeof(KeysSmem<C>) <= 227 * 1024, "what a block of compute capability 9.0 may use");
    const sinkattn_problem &problem = args.fwd.problem;
    sinkattn_problem of_values = problem;
    of_values.head_dim = sa_head_dim_v(&problem);
    const int64_t pieces = count_pieces(problem, problem.k_len, kBlockKeys);
    const auto items = [&](int halves) { return (pieces * halves + p.num_stretches) * problem.num_kv_heads; };
    if (items(1) > INT32_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "%lld blocks of keys; a launch holds at most 2^31", static_cast<long long>(items(1)));
    p.num_blocks = static_cast<unsigned>(pieces);
    p.batch_blocks = problem.packed ? 0 : static_cast<unsigned>(pieces / problem.batch);
    p.halves = items(2) <= plan.workers ? 2 : 1; // it changes no bit
    SA_TRY(map_keys(&maps.k, problem, args.fwd.k, kBlockKeys, "k"));
    SA_TRY(map_keys(&maps.v, of_values, args.fwd.v, kBlockKeys, "v"));
    const auto blocks = static_cast<unsigned>(sa_min(items(static_cast<int>(p.halves)), plan.workers));
    return launch_overlapping<keys_kernel<C>>(
            "sa_bwd_cuda_sm90_wide_window", blocks, kThreads, sizeof(KeysSmem<C>), context.stream, args, maps, p);
}

// kSteps, kRowStages: of the rows kernel; kKeyStages: of the keys kernel. kSinks: there are positional sink tokens.
template <class W, int kSteps, int kRowStages, int kKeyStages, bool kSinks>
sinkattn_status launch(const sinkattn_bwd_args &args, const sinkattn_plan &plan, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t window_keys = sa_window_keys(&problem.mask);
    Problem p = {};
    p.group = static_cast<int>(problem.num_q_heads / problem.num_kv_heads);
    p.group_inverse = (65536 + p.group - 1) / p.group;
    p.tokens = kRows / p.group;
    p.num_kv_heads = static_cast<unsigned>(problem.num_kv_heads);
    p.num_tokens = (problem.packed ? 1 : problem.batch) * problem.q_len;
    p.scale = static_cast<float>(sa_softmax_scale(&problem));
    p.scale_log2 = p.scale * kLog2e;
    const uintptr_t workspace = (reinterpret_cast<uintptr_t>(context.workspace) + 15) / 16 * 16;
    p.stats = reinterpret_cast<RowStats *>(workspace);
    const int64_t token_blocks =
            kSinks ? problem.batch * problem.num_kv_heads * sa_ceil_div(problem.mask.num_sink_tokens, kSinksABlock) : 0;
    if (token_blocks > INT32_MAX)
        return sa_status(
                SINKATTN_UNSUPPORTED, "%lld blocks for sink tokens; a launch holds at most 2^31", static_cast<long long>(token_blocks));
    if (kSinks) {
        const sa_bwd_wide_window_layout layout = sa_bwd_wide_window_layout_of(&problem, &plan);
        p.num_sinks = static_cast<int>(problem.mask.num_sink_tokens);
        p.stretch_tokens = static_cast<int>(layout.stretch_tokens);
        p.stretch_keys = static_cast<int>(layout.stretch_keys);
        p.num_stretches = static_cast<unsigned>(count_pieces(problem, problem.q_len, layout.stretch_tokens));
        p.batch_stretches = problem.packed ? 0 : p.num_stretches / static_cast<unsigned>(problem.batch);
        p.window_slots = layout.window_slots;
        p.num_slots = layout.slots;
        p.partials = reinterpret_cast<float *>(workspace + static_cast<uintptr_t>(layout.partials_at));
    }
    sinkattn_problem of_values = problem;
    of_values.head_dim = sa_head_dim_v(&problem);
    Maps maps;
    SA_TRY(map_rows(&maps.q, problem, args.fwd.q, p.tokens, p.group, "q"));
    SA_TRY(map_rows(&maps.dout, of_values, args.dout, p.tokens, p.group, "dout"));
    if (find_span_tokens(window_keys, p.tokens, 2 * kPieceKeys) > 0)
        SA_TRY((launch_rows<RowsConfig<W, kSteps, kRowStages, true, kSinks>>(args, plan, context, p, maps)));
    else if constexpr (W::kHeadDim > 128)
        SA_TRY((launch_rows<RowsConfig<W, kSteps, kRowStages, false, kSinks>>(args, plan, context, p, maps)));
    else // the planner refuses it
        return sa_status(SINKATTN_UNSUPPORTED, "a tile of rows sees more than %d keys", 2 * kPieceKeys);
    SA_TRY((launch_keys<KeysConfig<W, kKeyStages, kSinks>>(args, plan, context, p, maps)));
    if (token_blocks)
        SA_TRY(launch_overlapping<sink_tokens_kernel>("sa_bwd_cuda_sm90_wide_window", static_cast<unsigned>(token_blocks),
                kSinksABlock * SA_BWD_WIDE_WINDOW_PARTIAL, 0, context.stream, args, p));
    if (!args.ds_aux) return sa_ok();
    return launch_overlapping<sink_kernel>(
            "sa_bwd_cuda_sm90_wide_window", static_cast<unsigned>(problem.num_q_heads), kSinkThreads, 0, context.stream, args, p);
}

template <int kHeadDim, int kHeadDimV, int kSteps, int kRowStages, int kKeyStages>
sinkattn_status launch_dtype(const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
    const auto &args = *static_cast<const sinkattn_bwd_args *>(arguments);
    const auto launch_element = [&](auto element) {
        using W = Widths<decltype(element), kHeadDim, kHeadDimV>;
        if constexpr (kHeadDim == 128)
            if (args.fwd.problem.mask.num_sink_tokens) return launch<W, kSteps, kRowStages, kKeyStages, true>(args, *plan, *context);
        return launch<W, kSteps, kRowStages, kKeyStages, false>(args, *plan, *context);
    };
    return args.fwd.problem.dtype == SINKATTN_BF16 ? launch_element(Bf16{}) : launch_element(Fp16{});
}

} // namespace

extern "C" sinkattn_status sa_bwd_cuda_sm90_d128_window(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<128, 128, 16, 2, 4>(args, plan, context);
}

extern "C" sinkattn_status sa_bwd_cuda_sm90_d192_v128_window(const void *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    return launch_dtype<192, 128, 13, 2, 3>(args, plan, context);
}

} // namespace sa::bwd_wide_window_sm90
