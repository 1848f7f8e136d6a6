# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API, straight to the engine: no tritonserver in between."""
