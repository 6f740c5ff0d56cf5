/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for AVX-512: 6 x 4 sums of 16 floats in 32 registers. */
#if defined(__x86_64__)
#define SA_OPS sa_ops_avx512
#define SA_VL 16
#define SA_PANEL 4
#include "cpu/cpu_rows.h"
#else
typedef int sa_no_avx512;
#endif
