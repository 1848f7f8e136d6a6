# SPDX-License-Identifier: Apache-2.0
"""How models write reasoning and tool calls, read piece by piece.

Every reader here gives the same events for any cut of its text: its output after a piece depends only on the
text so far, and text whose meaning is still open is held back.
"""
