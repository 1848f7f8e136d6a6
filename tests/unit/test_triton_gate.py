# SPDX-License-Identifier: Apache-2.0
"""The output gate's kernel in Triton's interpreter, without a GPU."""

import torch
from interpreted import interpreted

from flashinfer_backend.ops import torch_ops


def test_in_the_interpreter() -> None:
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_gate

    triton_gate.NATIVE = False
    torch.manual_seed(0)
    for tokens, columns in ((1, 64), (3, 1536)):
        x, wide = torch.randn(tokens, columns).half(), 4 * torch.randn(tokens, columns + 32).half()
        gate = wide[:, :columns]
        found, expected = triton_gate.gated_by(x, gate), torch_ops.gated_by(x, gate)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)
        assert (found == expected).float().mean() > 0.99, "the gate is rounded as torch rounds it"
