/* SPDX-License-Identifier: Apache-2.0
 *
 * Decode: the forward's row tiles over a cache, dense or paged, its key tiles cut into parts so that few sequences still use every
 * worker. A part leaves (pivot, sum, out); the merge adds them in ascending order, and a row ends as the forward's does. With one part it
 * is the prefill's row, bit for bit. Packed rows are the forward's items over the cache, never split.
 */
#include "cpu/cpu_fwd.h"

/* One part of one row tile, in the workspace. */
typedef struct decode_part {
    float *pivot, *sum; /* [tile_q] */
    float *out;         /* [head_dim][lanes] */
} decode_part;

typedef struct decode_job {
    const sinkattn_decode_args *args;
    sa_attend *workers;
    decode_part *parts; /* [batch * kv heads * row tiles][num_splits]; NULL with one part */
    int64_t tile_q, num_row_tiles, num_splits;
} decode_job;

static int64_t num_row_tiles(const sinkattn_problem *problem, int64_t tile_q) {
    return sa_ceil_div(problem->q_len * (problem->num_q_heads / problem->num_kv_heads), tile_q);
}

static decode_job take_job(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_plan *plan) {
    const sinkattn_variant_info *info = sinkattn_variant(plan->variant);
    decode_job job = {NULL, NULL, NULL, info->tile_q, num_row_tiles(problem, info->tile_q), plan->num_splits};
    job.workers = sa_take_workers(scratch, ops, problem, plan, 1);
    if (job.num_splits == 1) return job;
    const int64_t num_parts = problem->batch * problem->num_kv_heads * job.num_row_tiles * job.num_splits;
    job.parts = sa_take(scratch, num_parts * (int64_t)sizeof *job.parts);
    for (int64_t i = 0; i < num_parts; i++) {
        decode_part part;
        part.pivot = sa_take(scratch, info->tile_q * (int64_t)sizeof(float));
        part.sum = sa_take(scratch, info->tile_q * (int64_t)sizeof(float));
        part.out = sa_take(scratch, problem->head_dim * info->tile_q * (int64_t)sizeof(float));
        if (job.parts) job.parts[i] = part;
    }
    return job;
}

int64_t sa_cpu_decode_workspace(const sinkattn_problem *problem, const sinkattn_plan *plan) {
    sa_scratch scratch = {NULL, 0};
    sinkattn_decode_args args = {.fwd.problem = *problem};
    sa_take_cu_seqlens(&scratch, &args.fwd);
    sa_take_cache_seqlens(&scratch, &args);
    if (problem->packed)
        sa_count_all(&scratch, problem, plan);
    else
        take_job(&scratch, NULL, problem, plan);
    return scratch.used + 64;
}

static sa_row_tile decode_rows(const decode_job *job, int64_t item, sa_stream *stream) {
    const sinkattn_problem *problem = &job->args->fwd.problem;
    const int64_t tile = item % job->num_row_tiles, head = item / job->num_row_tiles % problem->num_kv_heads;
    *stream = sa_stream_of(&job->args->fwd, job->args, item / job->num_row_tiles / problem->num_kv_heads, head);
    const int64_t begin = tile * job->tile_q, end = sa_min(begin + job->tile_q, sa_num_rows(stream));
    return sa_row_tile_of(stream, begin, end, job->workers->ops, job->workers->tile_k);
}

static void decode_item(void *arg, int64_t item, int32_t worker) {
    const decode_job *job = arg;
    sa_attend *attend = &job->workers[worker];
    sa_stream stream;
    const sa_row_tile rows = decode_rows(job, item / job->num_splits, &stream);
    sa_enter(attend->ops);
    sa_attend_rows(attend, &stream, &rows, item % job->num_splits, job->num_splits);
    sa_leave(attend->ops);
    if (!job->parts) {
        sa_attend_store(attend, &stream, &rows);
        return;
    }
    const decode_part *part = &job->parts[item];
    const sa_row_state *state = attend->states;
    memcpy(part->pivot, state->pivot, (size_t)rows.lanes * sizeof *part->pivot);
    memcpy(part->sum, state->sum, (size_t)rows.lanes * sizeof *part->sum);
    memcpy(part->out, state->out, (size_t)(rows.lanes * job->args->fwd.problem.head_dim) * sizeof *part->out);
}

static void merge_item(void *arg, int64_t item, int32_t worker) {
    const decode_job *job = arg;
    sa_attend *attend = &job->workers[worker];
    const sinkattn_fwd_args *args = &job->args->fwd;
    sa_stream stream;
    const sa_row_tile rows = decode_rows(job, item, &stream);
    sa_row_state *state = attend->states;
    state->rows = rows;
    memset(state->out, 0, (size_t)(rows.lanes * args->problem.head_dim) * sizeof *state->out);
    for (int64_t lane = 0; lane < rows.n; lane++) {
        double pivot = -(double)INFINITY, sum = 0.0;
        for (int64_t p = 0; p < job->num_splits; p++) {
            const decode_part *part = &job->parts[item * job->num_splits + p];
            const double top = part->pivot[lane] > pivot ? part->pivot[lane] : pivot;
            const double kept = sa_exp_minus(pivot, top), added = part->sum[lane] == 0.0f ? 0.0 : sa_exp_minus(part->pivot[lane], top);
            sum = sum * kept + part->sum[lane] * added;
            for (int64_t x = 0; x < args->problem.head_dim; x++) {
                float *out = &state->out[x * rows.lanes + lane];
                *out = *out * (float)kept + part->out[x * rows.lanes + lane] * (float)added;
            }
            pivot = top;
        }
        state->pivot[lane] = (float)pivot;
        state->sum[lane] = (float)sum;
    }
    sa_attend_store(attend, &stream, &rows);
}

static sinkattn_status decode_run(const sa_cpu_ops *ops, const void *arguments, const sinkattn_plan *plan,
                                  const sinkattn_context *context) {
    sinkattn_decode_args args = *(const sinkattn_decode_args *)arguments;
    sa_scratch scratch = sa_scratch_of(context);
    sa_take_cu_seqlens(&scratch, &args.fwd);
    sa_take_cache_seqlens(&scratch, &args);
    SA_TRY(sa_validate_cache(&args));
    const sinkattn_problem *problem = &args.fwd.problem;
    if (problem->packed) {
        sa_attend_all(&scratch, ops, &args.fwd, &args, plan, context);
        return sa_ok();
    }
    decode_job job = take_job(&scratch, ops, problem, plan);
    job.args = &args;
    const int64_t num_tiles = problem->batch * problem->num_kv_heads * job.num_row_tiles;
    sa_parallel_for(context, plan->workers, num_tiles * job.num_splits, decode_item, &job);
    if (job.parts) sa_parallel_for(context, plan->workers, num_tiles, merge_item, &job);
    sa_pack_nvfp4(&args, plan, context);
    return sa_ok();
}

SA_CPU_LAUNCHERS(decode)
