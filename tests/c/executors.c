/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdlib.h>

#include "sample.h"

typedef struct thread_task {
    void (*task)(void *arg, int32_t worker);
    void *arg;
    int32_t worker;
} thread_task;

static void *run_task(void *self) {
    const thread_task *t = self;
    t->task(t->arg, t->worker);
    return NULL;
}

static void run_on_threads(void *self, int32_t workers, void (*task)(void *arg, int32_t worker), void *arg) {
    (void)self;
    enum { MAX_THREADS = 16 };
    pthread_t handles[MAX_THREADS];
    thread_task tasks[MAX_THREADS];
    if (workers > MAX_THREADS) abort();
    for (int32_t w = 0; w < workers; w++) {
        tasks[w] = (thread_task){task, arg, w};
        if (pthread_create(&handles[w], NULL, run_task, &tasks[w])) abort();
    }
    for (int32_t w = 0; w < workers; w++) pthread_join(handles[w], NULL);
}

static void run_backwards(void *self, int32_t workers, void (*task)(void *arg, int32_t worker), void *arg) {
    (void)self;
    for (int32_t w = workers - 1; w >= 0; w--) task(arg, w);
}

const sinkattn_executor threads = {run_on_threads, NULL}, backwards = {run_backwards, NULL};
