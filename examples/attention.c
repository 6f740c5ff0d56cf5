/* SPDX-License-Identifier: Apache-2.0
 *
 * sinkattn from C, alone: a causal window of 4 over 12 tokens, 4 query heads on 2 key heads, one learned sink a head.
 *
 *     make && cc -Icsrc/include examples/attention.c build/native/libsinkattn.a $(cat build/native/link_libs) -o attention && ./attention
 *
 * Prints how much of each row's softmax the sink takes, exp(s - LSE).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "sinkattn.h"

enum { TOKENS = 12, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16 };

/* Rows must be 16-byte aligned, as what malloc returns is. */
static sinkattn_tensor new_tensor(int64_t num_heads) {
    const int64_t count = TOKENS * num_heads * HEAD_DIM;
    float *data = malloc((size_t)count * sizeof *data); /* [TOKENS, num_heads, HEAD_DIM] */
    if (!data) abort();
    for (int64_t i = 0; i < count; i++) data[i] = sinf((float)(i * i % 1009));
    return (sinkattn_tensor){data, count, num_heads * HEAD_DIM, HEAD_DIM};
}

static int fail(sinkattn_status status) {
    fprintf(stderr, "%s\n", status.message);
    return 1;
}

int main(void) {
    static const float s_aux[Q_HEADS] = {-2.0f, 0.0f, 2.0f, 4.0f};
    float lse[Q_HEADS][TOKENS];
    const sinkattn_fwd_args args = {.problem = {.op = SINKATTN_FWD,
                                            .dtype = SINKATTN_FP32,
                                            .s_aux_dtype = SINKATTN_FP32,
                                            .batch = 1,
                                            .num_q_heads = Q_HEADS,
                                            .num_kv_heads = KV_HEADS,
                                            .head_dim = HEAD_DIM,
                                            .q_len = TOKENS,
                                            .k_len = TOKENS,
                                            .mask = {.has_left = true, .left = 3, .has_right = true}},
            .q = new_tensor(Q_HEADS),
            .k = new_tensor(KV_HEADS),
            .v = new_tensor(KV_HEADS),
            .out = new_tensor(Q_HEADS),
            .lse = lse,
            .s_aux = s_aux};

    sinkattn_device device;
    sinkattn_status status = sinkattn_query_cpu(1, &device);
    if (status.code != SINKATTN_OK) return fail(status);

    sinkattn_plan plan;
    status = sinkattn_make_plan(&args.problem, &device, &plan);
    if (status.code != SINKATTN_OK) return fail(status);

    const sinkattn_context context = {.workspace = malloc((size_t)plan.workspace_bytes), .workspace_bytes = plan.workspace_bytes};
    status = sinkattn_fwd(&args, &plan, &context);
    if (status.code != SINKATTN_OK) return fail(status);

    printf("%s\n%s\nsink's share of each row, head by head:\n", sinkattn_build_info(), plan.reason);
    for (int head = 0; head < Q_HEADS; head++) {
        printf("s = %4.1f ", (double)s_aux[head]);
        for (int i = 0; i < TOKENS; i++) printf(" %.3f", exp((double)s_aux[head] - (double)lse[head][i]));
        puts("");
    }
    free(context.workspace);
    free(args.q.data);
    free(args.k.data);
    free(args.v.data);
    free(args.out.data);
    return 0;
}
