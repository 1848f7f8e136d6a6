# SPDX-License-Identifier: Apache-2.0
"""Power and clocks of a real GPU, and what it can do by itself."""

import pytest
import torch

from client.device_log import DeviceLog, find_devices
from perf_configs import floor

pytestmark = pytest.mark.gpu


def test_a_gpu_at_work_is_read():
    a = torch.randn(4096, 4096, device="cuda")
    with DeviceLog(find_devices(), period=0.05) as log:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
    result = log.result()
    assert "problem" not in result and len(result["gpus"]) >= torch.cuda.device_count()
    for gpu in result["gpus"]:
        assert 0 < gpu["median_power_w"] <= gpu["max_power_w"] and gpu["power_limit_w"] > 0
        assert 0 < gpu["min_sm_mhz"] <= gpu["max_sm_mhz"]


def test_the_floor_of_a_gpu_is_measured():
    found = floor.measure("cuda")
    assert found["device"] == torch.cuda.get_device_name(0)
    assert found["copy_bytes_per_s"] > 1e11 and found["flops_per_s"] > 1e12
