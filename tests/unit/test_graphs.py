# SPDX-License-Identifier: Apache-2.0
"""Which captured number of tokens a step is padded to."""

from flashinfer_backend.worker.graphs import fastest_sizes


def test_more_padding_where_it_is_faster():
    assert fastest_sizes([8, 16, 32, 64], [1.0, 2.0, 4.0, 3.0]) == [8, 16, 64, 64]
    assert fastest_sizes([8, 16, 32], [3.0, 2.0, 1.0]) == [32, 32, 32]
    assert fastest_sizes([8, 16, 32], [1.0, 2.0, 3.0]) == [8, 16, 32]
