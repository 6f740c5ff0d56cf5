/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdio.h>

#include "core.h"

/* The rest of the message stays as it is: clearing it would be most of a call's validation. */
sinkattn_status sa_ok(void) {
    sinkattn_status status;
    status.code = SINKATTN_OK;
    status.message[0] = 0;
    return status;
}

sinkattn_status sa_status(sinkattn_code code, const char *format, ...) {
    sinkattn_status status = {.code = code};
    va_list values;
    va_start(values, format);
    vsnprintf(status.message, sizeof status.message, format, values);
    va_end(values);
    return status;
}

const char *sa_dtype_name(sinkattn_dtype dtype) {
    switch (dtype) {
    case SINKATTN_NO_DTYPE: return "none";
    case SINKATTN_BF16: return "bf16";
    case SINKATTN_FP16: return "fp16";
    case SINKATTN_FP32: return "fp32";
    case SINKATTN_FP64: return "fp64";
    }
    return "unknown";
}

const char *sa_op_name(sinkattn_op op) {
    switch (op) {
    case SINKATTN_FWD: return "fwd";
    case SINKATTN_BWD: return "bwd";
    case SINKATTN_DECODE: return "decode";
    }
    return "unknown";
}
