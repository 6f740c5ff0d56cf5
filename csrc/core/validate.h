/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of a call as lists, so that a rule about where things lie is written once for all of them. Of validate.c and
 * validate_layout.c.
 */
#ifndef SA_VALIDATE_H
#define SA_VALIDATE_H

#include "core.h"

typedef struct sa_checked_tensor {
    const char *name;
    const sinkattn_tensor *tensor;
    int64_t batch, rows, heads, head_dim;
    bool written;
} sa_checked_tensor;

/* Contiguous: row statistics, logits, lengths. */
typedef struct sa_checked_array {
    const char *name;
    const void *data;
    int64_t bytes;
    bool written;
} sa_checked_array;

typedef struct sa_checked {
    const sinkattn_problem *problem;
    sa_checked_tensor tensors[8];
    sa_checked_array arrays[5];
    int num_tensors, num_arrays;
} sa_checked;

bool sa_has_elements(const sa_checked_tensor *t);

/* Strides, alignment, overlap, in this order. Sizes have been checked. */
sinkattn_status sa_check_layout(const sa_checked *all);
sinkattn_status sa_check_aligned(const char *name, const void *data, int64_t bytes);

#endif
