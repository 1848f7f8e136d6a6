# SPDX-License-Identifier: Apache-2.0
"""How models write reasoning and tool calls, read piece by piece.

Every reader here gives the same for any cut of its text: what it has given out after a piece depends on the
text so far alone, and what may still turn out otherwise is held back.
"""
