/* SPDX-License-Identifier: Apache-2.0
 *
 * The row primitives for any machine: four-float vectors, which a compiler maps to what the baseline has or to plain scalars. */
#define SA_OPS sa_ops_scalar
#define SA_VL 4
#define SA_PANEL 2
#include "cpu/cpu_rows.h"
