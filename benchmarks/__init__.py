# SPDX-License-Identifier: Apache-2.0
"""Speed against peers, measured in one run: `python -m benchmarks <study>`, from the repository's root."""
