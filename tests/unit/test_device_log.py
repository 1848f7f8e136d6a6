# SPDX-License-Identifier: Apache-2.0
"""Power, clocks and the machine's own floor: what is recorded and shown. tests/gpu reads a real GPU."""

import json
import sys
import time
from pathlib import Path

import pynvml
import pytest
from safetensors import safe_open

from checkpoints import make_checkpoint
from client import bench, device_log, measured, report
from client.device_log import NO_GPU, DeviceLog, Devices, Gpu, Reading, describe, find_devices
from perf_configs import floor

GPU = Gpu("H200", 700.0, 1980)


def logged(readings: list[Reading]) -> dict:
    """What a log says of one GPU with these readings, the last of which ends in an error."""
    left = iter(readings)
    log = DeviceLog(Devices((GPU,), lambda: [next(left)]), period=0.001)
    with log:
        log._thread.join(120)
    return log.result()


def test_readings_become_a_spread_and_an_error_ends_the_log_alone():
    result = logged(
        [
            Reading(300, 1980, 2619, 40, 0),
            Reading(690.04, 1500, 2619, 60, 0x4),
            Reading(500, 1755, 2619, 61, 0x24),
        ]
    )
    (gpu,) = result["gpus"]
    assert (gpu["median_power_w"], gpu["max_power_w"], gpu["power_w"]) == (500, 690.04, [300, 690.0, 500])
    assert (gpu["median_sm_mhz"], gpu["min_sm_mhz"], gpu["max_celsius"]) == (1755, 1500, 61)
    assert gpu["limited_by"] == {"power": 0.667, "temperature": 0.333}
    assert len(result["seconds"]) == 3 and result["problem"].startswith("StopIteration")
    json.dumps(result)
    del result["problem"]
    assert describe(result) == [
        ["0: H200", "500 / 690 of 700", "1755 / 1500 of 1980", "power 67%, temperature 33%"]
    ]


def test_a_run_is_logged_from_its_first_request_to_its_last(load, tmp_path: Path, monkeypatch):
    spans: list[tuple[float, float]] = []

    class Seen(DeviceLog):
        def result(self, began: float = 0.0, ended: float = 0.0) -> dict:
            spans.append((began, ended))
            return super().result(began, ended)

    monkeypatch.setattr(bench, "DeviceLog", Seen)
    path, before = tmp_path / "r.json", time.monotonic()
    words = f"--input-len 4 --output-len 3 --num-prompts 2 --output {path}"
    assert bench.main([*load, *words.split()]) == 0
    ((began, ended),) = spans
    assert before < began < ended < time.monotonic()
    assert ended - began == pytest.approx(json.loads(path.read_text())["summary"]["duration_s"], abs=1e-4)


def test_without_a_gpu_the_result_says_none():
    with DeviceLog(Devices((), list, "NVML: no driver")) as log:
        pass
    assert log.result() == {"none": "NVML: no driver"}
    assert describe(log.result())[0][0] == "none (NVML: no driver)"


def test_only_a_gpu_that_cannot_be_read_is_missed(tmp_path: Path, monkeypatch):
    def no_nvml() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", no_nvml)
    monkeypatch.setattr(device_log, "DEV", tmp_path)
    (tmp_path / "nvidiactl").touch()  # of the driver, whether there is a GPU or not
    path = tmp_path / "r.json"
    for node, reason in ((None, NO_GPU), ("nvidia0", "RM has detected an NVML/RM version mismatch.")):
        if node:
            (tmp_path / node).touch()
        with DeviceLog(find_devices()) as log:
            pass
        assert log.result() == {"none": reason}
        path.write_text(json.dumps(run(log.result())))
        shown = report.markdown(measured.read(path), "t")
        assert ("Power" in shown) == bool(node) and ("mismatch" in shown) == bool(node)


def run(devices: dict | None) -> dict:
    times = {f"{which}_{name}_ms": 1.0 for which in ("median", "p99") for name in ("ttft", "tpot", "itl")}
    facts = {"cores": 2, "kernel": "6", "python": "3", "packages": {}}
    return {
        "label": "ours", "server": "triton", "machine": facts, "request_rate": 2.0, "max_concurrency": None,
        "started": "2026-01-01", "command": "bench", "prompts_sha256": "p",
        "summary": {"completed": 1, "failed": 0, "output_tokens_per_s": 1.0, **times},
    } | ({"devices": devices} if devices else {})  # fmt: skip


def test_reports_show_power_and_clocks(tmp_path: Path):
    path = tmp_path / "r.json"
    for devices, shown in (
        (
            logged([Reading(300, 1980, 2619, 40, 0x4)]) | {"problem": "a|b"},
            "| ours | 2 req/s | 0: H200 | 300 / 300 of 700 |",
        ),
        ({"none": "NVML: no driver"}, "* Power and clocks of GPUs were not read (NVML: no driver)."),
    ):
        path.write_text(json.dumps(run(devices)))
        runs = measured.read(path)
        assert shown in report.markdown(runs, "t")
        assert "Power and clocks" in report.page(runs, "t")
    path.write_text(json.dumps(run(None)))  # of before it was recorded
    assert "Power" not in report.markdown(measured.read(path), "t")


def test_the_floor_counts_what_a_step_reads(tmp_path: Path):
    folder = make_checkpoint("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    matrices = 0
    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            if len(shape) == 2 and "embed_tokens" not in name:
                matrices += shape[0] * shape[1]
        if "lm_head.weight" not in file.keys():  # noqa: SIM118
            matrices += config["vocab_size"] * config["hidden_size"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    cache = 3 * 10 * 2 * config["num_key_value_heads"] * head * config["num_hidden_layers"]
    assert floor.bytes_of_a_step(folder / "config.json", 3, 10) == 2 * (matrices + cache)


def test_the_floor_of_this_machine_is_measured(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(floor.SIZES, "cpu", (1 << 20, 64))
    found = floor.measure("cpu")
    assert found["copy_bytes_per_s"] > 0 and found["flops_per_s"] > 0 and found["product"] == "64^3 float32"
    assert "none" in floor.measure_apart("/nonexistent/python")
    # A package in the process's folder comes before what PYTHONPATH names.
    monkeypatch.setenv("PYTHONPATH", str(floor.ROOT))
    monkeypatch.setattr(floor, "ROOT", tmp_path)
    (tmp_path / "perf_configs").mkdir()
    (tmp_path / "perf_configs/__init__.py").touch()
    assert "No module named perf_configs.floor" in floor.measure_apart(sys.executable)["none"]
