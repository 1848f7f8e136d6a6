# SPDX-License-Identifier: Apache-2.0
"""Command-line client and load generator for Triton's ensemble and for OpenAI completion servers."""
