/* SPDX-License-Identifier: Apache-2.0
 *
 * NVFP4: blocks of 16 columns, each column 4 bits (e2m1), with a scale of 8 bits a block (e4m3). Host and device.
 *
 *     scale    = e4m3(max |y| / 6)     y = x * global_scale; the division is fp32's
 *     value    = e2m1(y / scale)       compared with exact products, so rounded once
 *     x        ~ value * scale / global_scale
 *
 * Both roundings are to the nearest, ties to even, and saturate, at 448 and 6. A scale of 0 has values of 0. A block with a y that is not
 * finite has the scale NaN and values of 0, so that it stays loud.
 */
#ifndef SA_NVFP4_H
#define SA_NVFP4_H

#include <string.h>

#include "mask.h"

enum { SA_NVFP4_BLOCK = 16, SA_E4M3_MOST = 0x7e, SA_E4M3_NAN = 0x7f };

/* |x| as bits, whose order is that of the numbers, then infinity, then NaN. */
SA_HD uint32_t sa_magnitude_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffffu;
}

/* The scale of a block whose largest column has these bits. */
SA_HD uint32_t sa_nvfp4_scale(uint32_t top_bits) {
    float x;
    uint32_t bits;
    if (top_bits >= 0x7f800000u) return SA_E4M3_NAN;
    memcpy(&x, &top_bits, sizeof x);
    x /= 6.0f;
    if (x >= 448.0f) return SA_E4M3_MOST;
    if (x < 0x1p-6f) { /* subnormal: adding 2^14 leaves the multiples of 2^-9, rounded, in the low bits */
        x += 0x1p14f;
        memcpy(&bits, &x, sizeof bits);
        return bits - 0x46800000u;
    }
    memcpy(&bits, &x, sizeof bits);
    return ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
}

/* What a scale multiplies by: 0 for NaN, too. */
SA_HD float sa_e4m3_factor(uint32_t code) {
    if (code < 8 || code == SA_E4M3_NAN) return code == SA_E4M3_NAN ? 0.0f : (float)code * 0x1p-9f;
    const uint32_t bits = (code << 20) + (120u << 23);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 0, 0.5, 1, 1.5, 2, 3, 4, 6 by number, and 8 for the sign; of a block whose scale's factor this is. */
SA_HD uint32_t sa_nvfp4_value(float y, float factor) {
    if (factor == 0.0f) return 0;
    const float size = y < 0.0f ? -y : y;
    const int code = (size > 0.25f * factor) + (size >= 0.75f * factor) + (size > 1.25f * factor) + (size >= 1.75f * factor) +
                     (size > 2.5f * factor) + (size >= 3.5f * factor) + (size > 5.0f * factor);
    uint32_t bits;
    memcpy(&bits, &y, sizeof bits);
    return (uint32_t)code | (bits >> 31) << 3;
}

#endif
