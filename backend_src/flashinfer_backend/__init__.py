# SPDX-License-Identifier: Apache-2.0
"""FlashInfer backend for Triton: LLM serving with in-flight batching over paged attention."""

__version__ = "0.1.0"
