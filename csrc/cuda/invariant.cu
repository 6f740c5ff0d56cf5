// SPDX-License-Identifier: Apache-2.0
//
// Decode with the bits of the prefill, by the prefill's own kernel. The forward reads packed lengths on the device, and a row's bits depend
// on its keys alone; so the cache is passed to it as packed keys. Sequence b begins at key b * step, and the slots between two sequences
// are a sequence of their own without rows:
//
//     cu_seqlens_q   0         q_len        q_len        2 q_len       ..   batch * q_len
//     cu_seqlens_k   0         used[0]      step         step + used[1] ..   all slots
//
// A contiguous cache is read in place. Of a paged one, the keys that some row sees are gathered into the workspace first. At the end, lse
// is transposed to a decode's order. The planner chooses the forward, for these heads, this mask and this device.

#include "core/workspace.h"
#include "cuda/host/backend.h"
#include "cuda/work/items.cuh"
#include "cuda/work/launch_counter.cuh"

namespace sa {
namespace {

constexpr int kThreads = 128, kGatherBlocks = 256;

struct Memory {
    int32_t *cu_seqlens_q, *cu_seqlens_k; // [2 * batch + 1]
    float *lse, *lse_raw;                 // [num_q_heads, batch * q_len]
    char *k, *v;                          // paged: [batch, k_len, num_kv_heads, head_dim]
    void *forward;
};

Memory lay_out(const sinkattn_problem &problem, void *workspace) {
    const sa_invariant_layout at = sa_invariant_layout_of(&problem);
    const uintptr_t first = reinterpret_cast<uintptr_t>(workspace) + SA_WORKSPACE_ALIGNMENT - 1;
    char *base = reinterpret_cast<char *>(first / SA_WORKSPACE_ALIGNMENT * SA_WORKSPACE_ALIGNMENT);
    Memory memory;
    memory.cu_seqlens_q = reinterpret_cast<int32_t *>(base + at.cu_seqlens_q);
    memory.cu_seqlens_k = reinterpret_cast<int32_t *>(base + at.cu_seqlens_k);
    memory.lse = reinterpret_cast<float *>(base + at.lse);
    memory.lse_raw = reinterpret_cast<float *>(base + at.lse_raw);
    memory.k = base + at.k;
    memory.v = base + at.v;
    memory.forward = base + at.forward;
    return memory;
}

__global__ void write_lengths(sinkattn_decode_args args, Memory memory, int64_t step, int64_t num_slots, unsigned *error_word) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t b = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
    if (b > problem.batch) return;
    memory.cu_seqlens_q[2 * b] = static_cast<int32_t>(b * problem.q_len);
    memory.cu_seqlens_k[2 * b] = static_cast<int32_t>(b < problem.batch ? b * step : num_slots);
    if (b == problem.batch) return;
    const int64_t used = sa_cache_len(&args, b);
    memory.cu_seqlens_q[2 * b + 1] = static_cast<int32_t>((b + 1) * problem.q_len);
    memory.cu_seqlens_k[2 * b + 1] = static_cast<int32_t>(b * step + used);
    if (args.cache_seqlens && args.cache_seqlens[b] != used) atomicOr(error_word, kBadCacheSeqlens);
}

__device__ __forceinline__ void copy_row(
        char *to, const sinkattn_tensor &cache, int64_t offset, int64_t bytes, int64_t head_bytes, int64_t element_bytes) {
    for (int64_t x = threadIdx.x * 16; x < bytes; x += kThreads * 16) {
        const int64_t head = x / head_bytes;
        const char *from =
                static_cast<const char *>(cache.data) + (offset + head * cache.head_stride) * element_bytes + x - head * head_bytes;
        *reinterpret_cast<uint4 *>(to + x) = offset == -1 ? uint4{} : *reinterpret_cast<const uint4 *>(from);
    }
}

// Copies the keys that some row sees; those of unmapped pages are zeros.
__global__ __launch_bounds__(kThreads) void gather_pages(sinkattn_decode_args args, Memory memory, unsigned *error_word) {
    const sinkattn_problem &problem = args.fwd.problem;
    const int64_t b = blockIdx.y, element_bytes = sa_dtype_bytes(problem.dtype), head_bytes = problem.head_dim * element_bytes,
                  bytes = problem.num_kv_heads * head_bytes;
    const sa_band band =
            sa_band_of(&problem.mask, static_cast<sa_position_t>(problem.q_len), static_cast<sa_position_t>(sa_cache_len(&args, b)));
    sa_position_t sink_end;
    const sa_range keys = sa_rows_band(&band, {0, band.q_len}, &sink_end);
    for (int64_t key = blockIdx.x; key < sa_max(keys.end, sink_end); key += kGatherBlocks) {
        if (key >= sink_end && key < keys.begin) continue;
        const int64_t k = sa_cache_offset(&args, &args.fwd.k, b, key, 0), v = sa_cache_offset(&args, &args.fwd.v, b, key, 0);
        if (k == -1 && threadIdx.x == 0) atomicOr(error_word, kBadBlockTable);
        copy_row(memory.k + (b * problem.k_len + key) * bytes, args.fwd.k, k, bytes, head_bytes, element_bytes);
        copy_row(memory.v + (b * problem.k_len + key) * bytes, args.fwd.v, v, bytes, head_bytes, element_bytes);
    }
}

// from: [num_q_heads, batch * q_len]; to: [batch, num_q_heads, q_len].
__global__ void order_lse(const float *from, float *to, int64_t batch, int64_t heads, int64_t q_len) {
    const int64_t x = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
    if (x < batch * heads * q_len) to[x] = from[(x / q_len % heads * batch + x / q_len / heads) * q_len + x % q_len];
}

// The row stride of the tensor as packed rows, the same within and between sequences; 0 if it has none.
int64_t packed_stride(const sinkattn_tensor &tensor, int64_t batch, int64_t len) {
    if (batch == 1) return tensor.row_stride;
    if (len == 1) return tensor.batch_stride;
    return tensor.batch_stride == len * tensor.row_stride ? tensor.row_stride : 0;
}

// Slots from the first of a sequence to the first of the next; 0 if that is no whole number or sequences overlap.
int64_t slots_between(const sinkattn_tensor &cache, const sinkattn_problem &problem) {
    if (problem.page_size || problem.batch == 1 || problem.k_len <= 1) return problem.k_len;
    if (cache.row_stride == 0 || cache.batch_stride % cache.row_stride) return 0;
    const int64_t step = cache.batch_stride / cache.row_stride;
    return step >= problem.k_len ? step : 0;
}

sinkattn_tensor packed(sinkattn_tensor tensor, int64_t row_stride) {
    tensor.batch_stride = 0;
    tensor.row_stride = row_stride;
    return tensor;
}

sinkattn_status check_strides(const sinkattn_decode_args &args) {
    const sinkattn_problem &problem = args.fwd.problem;
    if (args.nvfp4.values)
        return sa_status(SINKATTN_UNSUPPORTED, "nvfp4.values is given with invariant, which has no NVFP4 on CUDA; quantise out afterwards");
    const int64_t step = slots_between(args.fwd.k, problem);
    if (problem.k_len && (!step || step != slots_between(args.fwd.v, problem)))
        return sa_status(SINKATTN_UNSUPPORTED,
                "k and v have batch strides %lld and %lld; an invariant CUDA decode takes whole rows of each, as many of both",
                static_cast<long long>(args.fwd.k.batch_stride), static_cast<long long>(args.fwd.v.batch_stride));
    for (const sinkattn_tensor *rows : {&args.fwd.q, &args.fwd.out})
        if (problem.batch > 1 && !packed_stride(*rows, problem.batch, problem.q_len))
            return sa_status(SINKATTN_UNSUPPORTED, "%s has batch stride %lld; an invariant CUDA decode takes q_len rows, %lld",
                    rows == &args.fwd.q ? "q" : "out", static_cast<long long>(rows->batch_stride),
                    static_cast<long long>(problem.q_len * rows->row_stride));
    return sa_ok();
}

// The forward's arguments, over the lengths and keys that write_lengths and gather_pages write.
sinkattn_fwd_args forward_of(const sinkattn_decode_args &args, const Memory &memory, int64_t num_slots) {
    const sinkattn_problem &problem = args.fwd.problem;
    sinkattn_fwd_args fwd = args.fwd;
    fwd.problem.op = SINKATTN_FWD;
    fwd.problem.packed = true;
    fwd.problem.batch = 2 * problem.batch;
    fwd.problem.q_len = problem.batch * problem.q_len;
    fwd.problem.k_len = num_slots;
    fwd.problem.page_size = fwd.problem.num_pages = fwd.problem.num_splits = 0;
    fwd.problem.invariant = false;
    fwd.q = packed(args.fwd.q, packed_stride(args.fwd.q, problem.batch, problem.q_len));
    fwd.out = packed(args.fwd.out, packed_stride(args.fwd.out, problem.batch, problem.q_len));
    if (problem.page_size) {
        const int64_t row = problem.num_kv_heads * problem.head_dim;
        fwd.k = {memory.k, 0, row, problem.head_dim};
        fwd.v = {memory.v, 0, row, problem.head_dim};
    } else {
        fwd.k = packed(args.fwd.k, problem.k_len == 1 && problem.batch > 1 ? args.fwd.k.batch_stride : args.fwd.k.row_stride);
        fwd.v = packed(args.fwd.v, problem.k_len == 1 && problem.batch > 1 ? args.fwd.v.batch_stride : args.fwd.v.row_stride);
    }
    fwd.lse = memory.lse;
    if (fwd.lse_raw) fwd.lse_raw = memory.lse_raw;
    fwd.cu_seqlens_q = memory.cu_seqlens_q;
    fwd.cu_seqlens_k = memory.cu_seqlens_k;
    return fwd;
}

sinkattn_status plan_forward(const sinkattn_problem &problem, sinkattn_plan *plan) {
    int ordinal = 0;
    sinkattn_device device = {};
    SA_TRY(sa_cuda_status("cudaGetDevice", cudaGetDevice(&ordinal)));
    SA_TRY(sinkattn_query_cuda(ordinal, &device));
    return sinkattn_make_plan(&problem, &device, plan);
}

sinkattn_status run(const sinkattn_decode_args &args, const sinkattn_context &context) {
    const sinkattn_problem &problem = args.fwd.problem;
    if (problem.batch == 0 || problem.q_len == 0) return sa_ok();
    SA_TRY(check_strides(args));
    const int64_t step = slots_between(args.fwd.k, problem), num_slots = (problem.batch - 1) * step + problem.k_len;
    const Memory memory = lay_out(problem, context.workspace);
    const sinkattn_fwd_args fwd = forward_of(args, memory, num_slots);
    sinkattn_plan plan = {};
    unsigned *error_word = nullptr;
    SA_TRY(plan_forward(fwd.problem, &plan)); // fails if the cache has more positions than int32 counts, before cu_seqlens are written
    if (problem.batch > UINT16_MAX)
        return sa_status(SINKATTN_UNSUPPORTED, "batch is %lld; an invariant CUDA decode takes less than 2^16",
                static_cast<long long>(problem.batch));
    SA_TRY(sa_cuda_error_word(&error_word));

    const auto stream = static_cast<cudaStream_t>(context.stream);
    const auto blocks = [](int64_t threads) { return static_cast<unsigned>(sa_ceil_div(threads, kThreads)); };
    write_lengths<<<blocks(problem.batch + 1), kThreads, 0, stream>>>(args, memory, step, num_slots, error_word);
    if (problem.page_size && problem.k_len)
        gather_pages<<<dim3(kGatherBlocks, static_cast<unsigned>(problem.batch)), kThreads, 0, stream>>>(args, memory, error_word);
    const sinkattn_context inner = {memory.forward, kCounterBytes, {}, context.stream};
    SA_TRY(sinkattn_fwd(&fwd, &plan, &inner));
    const int64_t rows = problem.batch * problem.num_q_heads * problem.q_len;
    const auto order = [&](const float *from, void *to) {
        order_lse<<<blocks(rows), kThreads, 0, stream>>>(from, static_cast<float *>(to), problem.batch, problem.num_q_heads, problem.q_len);
    };
    order(memory.lse, args.fwd.lse);
    if (args.fwd.lse_raw) order(memory.lse_raw, args.fwd.lse_raw);
    return sa_cuda_status("sa_decode_cuda_sm80_prefill", cudaGetLastError());
}

} // namespace
} // namespace sa

extern "C" sinkattn_status sa_decode_cuda_sm80_prefill(const void *args, const sinkattn_plan *, const sinkattn_context *context) {
    return sa::run(*static_cast<const sinkattn_decode_args *>(args), *context);
}
