/* SPDX-License-Identifier: Apache-2.0
 *
 * A decode's out in NVFP4, from what has been written.
 */
#include "core/nvfp4.h"
#include "cpu/cpu.h"

static void pack_block(const float *y, uint8_t *values, uint8_t *scale) {
    uint32_t top = 0;
    for (int x = 0; x < SA_NVFP4_BLOCK; x++) top = sa_magnitude_bits(y[x]) > top ? sa_magnitude_bits(y[x]) : top;
    *scale = (uint8_t)sa_nvfp4_scale(top);
    const float factor = sa_e4m3_factor(*scale);
    for (int x = 0; x < SA_NVFP4_BLOCK; x += 2)
        values[x / 2] = (uint8_t)(sa_nvfp4_value(y[x], factor) | sa_nvfp4_value(y[x + 1], factor) << 4);
}

/* item: (sequence, row) */
static void pack_item(void *arg, int64_t item, int32_t worker) {
    (void)worker;
    const sinkattn_decode_args *args = arg;
    const sinkattn_problem *p = &args->fwd.problem;
    const int64_t head_dim_v = sa_head_dim_v(p);
    const float global_scale = args->nvfp4.global_scale != 0.0 ? (float)args->nvfp4.global_scale : 1.0f;
    for (int64_t head = 0; head < p->num_q_heads; head++) {
        const int64_t from = sa_offset(&args->fwd.out, item / p->q_len, item % p->q_len, head);
        const int64_t to = (item * p->num_q_heads + head) * head_dim_v;
        for (int64_t x = 0; x < head_dim_v; x += SA_NVFP4_BLOCK) {
            float y[SA_NVFP4_BLOCK];
            for (int i = 0; i < SA_NVFP4_BLOCK; i++) y[i] = (float)sa_load(args->fwd.out.data, p->dtype, from + x + i) * global_scale;
            pack_block(y, args->nvfp4.values + (to + x) / 2, args->nvfp4.scales + (to + x) / SA_NVFP4_BLOCK);
        }
    }
}

void sa_pack_nvfp4(const sinkattn_decode_args *args, const sinkattn_plan *plan, const sinkattn_context *context) {
    const sinkattn_problem *p = &args->fwd.problem;
    if (args->nvfp4.values) sa_parallel_for(context, plan->workers, p->batch * p->q_len, pack_item, (void *)args);
}
