# SPDX-License-Identifier: Apache-2.0
"""Benchmark scenarios, knob profiles and the runner that compares servers on one machine."""
