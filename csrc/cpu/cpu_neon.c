/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for NEON, which every aarch64 has: 6 x 4 sums of 4 floats in 24 of its 32 registers. */
#if defined(__aarch64__)
#define SA_OPS sa_ops_neon
#define SA_VL 4
#define SA_PANEL 4
#include "cpu/cpu_rows.h"
#else
typedef int sa_no_neon;
#endif
