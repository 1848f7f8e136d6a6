# SPDX-License-Identifier: Apache-2.0
from flashinfer_backend.triton_server.preprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
