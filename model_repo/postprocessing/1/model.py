# SPDX-License-Identifier: Apache-2.0
from flashinfer_backend.triton_server.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
