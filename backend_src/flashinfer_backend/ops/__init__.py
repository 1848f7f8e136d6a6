# SPDX-License-Identifier: Apache-2.0
"""The model's operations: torch_ops on any device, cuda_ops on GPUs."""

import os

# FlashInfer reads this when it is imported. Its norms in CuTe DSL, taken where that package is there,
# are compiled when they are first used and cannot be compiled ahead.
os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
