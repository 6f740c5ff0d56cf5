/* SPDX-License-Identifier: Apache-2.0
 *
 * Where tensors lie: strides, alignment, and that nothing is written where something else is.
 */
#include <inttypes.h>

#include "layout.h"
#include "validate.h"

#define SA_ROW_ALIGNMENT 16
#define SA_MAX_STRIDE (INT64_MAX / 16)

bool sa_has_elements(const sa_checked_tensor *t) { return t->batch != 0 && t->rows != 0 && t->heads != 0 && t->head_dim != 0; }

typedef struct axis {
    const char *name;
    int64_t size, stride;
} axis;

typedef struct axes {
    axis list[3];
} axes;

static axes axes_of(const sa_checked_tensor *t) {
    return (axes){{{"batch_stride", t->batch, t->tensor->batch_stride}, {"row_stride", t->rows, t->tensor->row_stride},
            {"head_stride", t->heads, t->tensor->head_stride}}};
}

/* Elements from the first to behind the last; false where they or their bytes leave int64. An axis of one is never stepped. */
static bool extent_of(const axes *a, int64_t head_dim, int64_t bytes, int64_t *extent) {
    int64_t unused;
    *extent = head_dim;
    for (int i = 0; i < 3; i++) {
        int64_t reach;
        if (a->list[i].size == 1) continue;
        if (__builtin_mul_overflow(a->list[i].size - 1, a->list[i].stride, &reach) || __builtin_add_overflow(*extent, reach, extent))
            return false;
    }
    return !__builtin_mul_overflow(*extent, bytes, &unused);
}

/* A tensor is free of overlap when each axis, taken by rising stride, steps over all that the smaller ones span. */
static bool is_disjoint(const axes *a, int64_t head_dim) {
    int order[3] = {0, 1, 2};
    for (int i = 0; i < 3; i++)
        for (int j = i + 1; j < 3; j++)
            if (a->list[order[j]].stride < a->list[order[i]].stride) {
                const int swapped = order[i];
                order[i] = order[j];
                order[j] = swapped;
            }
    int64_t span = head_dim;
    for (int i = 0; i < 3; i++) {
        const axis *next = &a->list[order[i]];
        if (next->size > 1 && next->stride < span) return false;
        if (next->size > 1) span += (next->size - 1) * next->stride;
    }
    return true;
}

static sinkattn_status check_strides(const sa_checked_tensor *t, const sinkattn_problem *p) {
    const int64_t bytes = sa_dtype_bytes(p->dtype), step = SA_ROW_ALIGNMENT / bytes;
    const axes a = axes_of(t);
    for (int i = 0; i < 3; i++) {
        const axis *at = &a.list[i];
        if (at->stride > SA_MAX_STRIDE || at->stride < -SA_MAX_STRIDE)
            return sa_status(SINKATTN_INVALID, "%s.%s is %" PRId64 "; its bytes must be countable in int64", t->name, at->name, at->stride);
        if (at->size > 1 && (at->stride < 0 || at->stride % step != 0))
            return sa_status(SINKATTN_INVALID,
                    "%s.%s is %" PRId64 "; it must be a multiple of %" PRId64 " elements (16 bytes), not negative", t->name, at->name,
                    at->stride, step);
    }
    const int64_t strides[3] = {a.list[0].stride, a.list[1].stride, a.list[2].stride};
    int64_t extent;
    if (!extent_of(&a, t->head_dim, bytes, &extent))
        return sa_status(SINKATTN_INVALID, "%s has strides %" PRId64 ", %" PRId64 ", %" PRId64 "; its bytes must be countable in int64",
                t->name, strides[0], strides[1], strides[2]);
    if (t->written && !is_disjoint(&a, t->head_dim))
        return sa_status(SINKATTN_INVALID,
                "%s has strides %" PRId64 ", %" PRId64 ", %" PRId64 "; it is written, so its rows must not overlap", t->name, strides[0],
                strides[1], strides[2]);
    return sa_ok();
}

sinkattn_status sa_check_aligned(const char *name, const void *data, int64_t bytes) {
    if ((uintptr_t)data % (uintptr_t)bytes == 0) return sa_ok();
    return sa_status(SINKATTN_INVALID, "%s is at %p; it must be aligned to %" PRId64 " bytes", name, data, bytes);
}

/* Bytes from the first element to behind the last. */
typedef struct region {
    const char *name;
    uintptr_t begin, end;
    bool whole, written; /* whole: without gaps between its rows */
} region;

static region region_of(const sa_checked_tensor *t, const sinkattn_problem *p) {
    const axes a = axes_of(t);
    const int64_t bytes = sa_dtype_bytes(p->dtype);
    int64_t extent = 0;
    extent_of(&a, t->head_dim, bytes, &extent);
    const uintptr_t begin = (uintptr_t)t->tensor->data;
    const bool whole = is_disjoint(&a, t->head_dim) && extent == t->batch * t->rows * t->heads * t->head_dim;
    return (region){t->name, begin, begin + (uintptr_t)(extent * bytes), whole, t->written};
}

/* Surely so: at a first element, or where neither has gaps. Rows of one tensor may lie between those of another. */
static bool overlap(const region *a, const region *b) {
    return a->begin == b->begin || (a->whole && b->whole && a->begin < b->end && b->begin < a->end);
}

static sinkattn_status check_overlap(const sa_checked *all) {
    region regions[sizeof all->tensors / sizeof *all->tensors + sizeof all->arrays / sizeof *all->arrays];
    int count = 0;
    for (int i = 0; i < all->num_tensors; i++)
        if (sa_has_elements(&all->tensors[i])) regions[count++] = region_of(&all->tensors[i], all->problem);
    for (int i = 0; i < all->num_arrays; i++) {
        const sa_checked_array *array = &all->arrays[i];
        const uintptr_t begin = (uintptr_t)array->data;
        if (array->data && array->bytes > 0)
            regions[count++] = (region){array->name, begin, begin + (uintptr_t)array->bytes, true, array->written};
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++) {
            const region *a = &regions[i], *b = &regions[j];
            if ((a->written || b->written) && overlap(a, b))
                return sa_status(SINKATTN_INVALID, "%s and %s overlap; %s is written, so it must have memory of its own", b->name, a->name,
                        a->written ? a->name : b->name);
        }
    return sa_ok();
}

sinkattn_status sa_check_layout(const sa_checked *all) {
    for (int i = 0; i < all->num_tensors; i++)
        if (sa_has_elements(&all->tensors[i])) SA_TRY(check_strides(&all->tensors[i], all->problem));
    for (int i = 0; i < all->num_tensors; i++)
        if (sa_has_elements(&all->tensors[i]))
            SA_TRY(sa_check_aligned(all->tensors[i].name, all->tensors[i].tensor->data, SA_ROW_ALIGNMENT));
    return check_overlap(all);
}
