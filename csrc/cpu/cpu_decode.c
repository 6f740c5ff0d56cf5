/* SPDX-License-Identifier: Apache-2.0
 *
 * Decode: the forward's row tiles over a cache, dense or paged. Few sequences still use every worker: a row tile's chunks are cut into
 * parts, each chunk leaves a partial, and they join in ascending order, as they do where one worker meets them all. So a row is the
 * prefill's row, bit for bit, however it is cut. Packed rows are the forward's items over the cache, never split.
 */
#include "cpu/cpu_fwd.h"

typedef struct decode_job {
    const sinkattn_decode_args *args;
    sa_attend *workers;
    sa_partials partials; /* [batch * kv heads * row tiles][num_chunks]; none with one part */
    int64_t tile_q, num_row_tiles, num_splits, num_chunks;
} decode_job;

static int64_t num_rows(const sinkattn_problem *problem) { return problem->q_len * (problem->num_q_heads / problem->num_kv_heads); }

static decode_job take_job(sa_scratch *scratch, const sa_cpu_ops *ops, const sinkattn_problem *problem, const sinkattn_plan *plan) {
    const int64_t tile_q = sinkattn_variant(plan->variant)->tile_q, num_row_tiles = sa_ceil_div(num_rows(problem), tile_q);
    decode_job job = {NULL, NULL, {NULL, 0, 0}, tile_q, num_row_tiles, plan->num_splits, sa_most_chunks(problem)};
    job.workers = sa_take_workers(scratch, ops, problem, plan, 1);
    if (job.num_splits == 1) return job;
    const int64_t lanes = sa_min(tile_q, sa_ceil_div(num_rows(problem), SA_LANES_STEP) * SA_LANES_STEP);
    const int64_t count = problem->batch * problem->num_kv_heads * num_row_tiles * job.num_chunks;
    job.partials = sa_take_partials(scratch, count, lanes, sa_head_dim_v(problem));
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
    const int64_t row_tile = item / job->num_splits;
    const sa_row_tile rows = decode_rows(job, row_tile, &stream);
    sa_enter(attend->ops);
    if (job->partials.base) {
        const sa_range chunks = sa_split_part(sa_count_chunks(attend, &rows), job->num_splits, item % job->num_splits);
        sa_attend_chunks(attend, &stream, &rows, chunks, &job->partials, row_tile * job->num_chunks);
    } else {
        sa_attend_rows(attend, &stream, &rows);
    }
    sa_leave(attend->ops);
    if (!job->partials.base) sa_attend_store(attend, &stream, &rows);
}

static void join_item(void *arg, int64_t item, int32_t worker) {
    const decode_job *job = arg;
    sa_attend *attend = &job->workers[worker];
    sa_stream stream;
    const sa_row_tile rows = decode_rows(job, item, &stream);
    sa_attend_join(attend, &rows, &job->partials, item * job->num_chunks);
    sa_attend_store(attend, &stream, &rows);
}

static sinkattn_status decode_run(
        const sa_cpu_ops *ops, const void *arguments, const sinkattn_plan *plan, const sinkattn_context *context) {
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
    if (job.partials.base) sa_parallel_for(context, plan->workers, num_tiles, join_item, &job);
    sa_pack_nvfp4(&args, plan, context);
    return sa_ok();
}

SA_CPU_LAUNCHERS(decode)
