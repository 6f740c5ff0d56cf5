/* SPDX-License-Identifier: Apache-2.0
 *
 * The one place of the CPU backend that knows of threads. Workers take items from a shared counter, because causal tiles are uneven;
 * an item writes only what is its own, so which worker took it, and when, leaves no trace in the result.
 */
#ifndef SA_PARALLEL_H
#define SA_PARALLEL_H

#include <stdatomic.h>

#include "core/mask.h"

typedef void (*sa_item)(void *arg, int64_t item, int32_t worker);

typedef struct sa_queue {
    atomic_int_fast64_t next;
    int64_t num_items;
    sa_item body;
    void *arg;
} sa_queue;

static inline void sa_queue_drain(void *self, int32_t worker) {
    sa_queue *queue = self;
    for (;;) {
        const int64_t item = atomic_fetch_add_explicit(&queue->next, 1, memory_order_relaxed);
        if (item >= queue->num_items) return;
        queue->body(queue->arg, item, worker);
    }
}

/* body(arg, item, worker) for every item in [0, num_items), worker below `workers`; the executor's return orders what follows. */
static inline void sa_parallel_for(const sinkattn_context *context, int32_t workers, int64_t num_items, sa_item body, void *arg) {
    sa_queue queue = {0, num_items, body, arg};
    const int32_t used = (int32_t)sa_min(workers, num_items);
    if (used > 1 && context->executor.run)
        context->executor.run(context->executor.self, used, sa_queue_drain, &queue);
    else
        sa_queue_drain(&queue, 0);
}

#endif
