# SPDX-License-Identifier: Apache-2.0
"""Power and clocks of the machine's GPUs while a load runs, read through NVML; nothing without a GPU."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

PERIOD = 0.5  # seconds between two looks
NO_GPU = "no GPU"  # why there is nothing to read, and nothing that a report should miss
DEV, NODES = Path("/dev"), ("nvidia[0-9]*", "dxg")  # of drivers: one for each GPU, under WSL one for all
# NVML's bits of why clocks are held down. Idle and settings of applications are no limits of the chip.
LIMITS = {0x4: "power", 0x8: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}


@dataclass(frozen=True)
class Reading:
    """One look at one GPU: watts, MHz of the SMs and of the memory, degrees Celsius, NVML's bits of what
    holds the clocks down."""

    power_w: float
    sm_mhz: int
    memory_mhz: int
    celsius: int
    limits: int


@dataclass(frozen=True)
class Gpu:
    """What does not change: its name, its power limit in watts, its highest SM clock in MHz."""

    name: str
    power_limit_w: float
    max_sm_mhz: int


@dataclass(frozen=True)
class Devices:
    """The GPUs of a machine and a look at all of them. why_none says why there are none:
    NO_GPU, or why those that there are cannot be read."""

    gpus: tuple[Gpu, ...]
    read: Callable[[], list[Reading]]
    why_none: str = ""


def find_devices() -> Devices:
    """Every GPU that NVML sees, whatever CUDA_VISIBLE_DEVICES says: what a neighbour does shows, too."""
    try:
        import pynvml
    except ImportError:
        return _none("nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(
                str(pynvml.nvmlDeviceGetName(handle)),
                pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
                pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            )
            for handle in handles
        )
    except pynvml.NVMLError as error:
        return _none(str(error))

    def read() -> list[Reading]:
        return [
            Reading(
                pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            )
            for handle in handles
        ]

    return Devices(gpus, read) if gpus else _none("NVML finds none that this process may use")


def _none(why: str) -> Devices:
    """No GPU to read: because of `why` if the machine has one."""
    return Devices((), list, why if any(any(DEV.glob(node)) for node in NODES) else NO_GPU)


@dataclass
class DeviceLog:
    """Looks at the devices every `period` seconds, from __enter__ to __exit__, in a thread of its own.
    moments: of the readings, on time.monotonic()."""

    devices: Devices
    period: float = PERIOD
    moments: list[float] = field(default_factory=list)
    readings: list[list[Reading]] = field(default_factory=list)
    problem: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> DeviceLog:
        if self.devices.gpus:
            self._thread = threading.Thread(target=self._watch, name="device-log", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                readings = self.devices.read()
            except Exception as error:  # a GPU that cannot be read must not end the measurement
                self.problem = f"{type(error).__name__}: {error}"
                return
            self.readings.append(readings)
            self.moments.append(time.monotonic())
            if self._stop.wait(self.period):
                return

    def result(self, began: float = -math.inf, ended: float = math.inf) -> dict[str, Any]:
        """For results: {"none": why_none}, or every GPU with its spread and its readings. What was
        read before began and after ended, on time.monotonic(), is left out: processes start and parse then,
        and the device idles. `seconds` count from began, or from the first reading."""
        if not self.devices.gpus:
            return {"none": self.devices.why_none}
        within = [i for i, moment in enumerate(self.moments) if began <= moment <= ended]
        zero = began if math.isfinite(began) else self.moments[0] if self.moments else 0.0
        gpus = []
        for index, gpu in enumerate(self.devices.gpus):
            each = [self.readings[i][index] for i in within]
            gpus.append(
                {
                    **asdict(gpu),
                    "median_power_w": _median([r.power_w for r in each]),
                    "max_power_w": max((r.power_w for r in each), default=None),
                    "median_sm_mhz": _median([r.sm_mhz for r in each]),
                    "min_sm_mhz": min((r.sm_mhz for r in each), default=None),
                    "max_celsius": max((r.celsius for r in each), default=None),
                    "limited_by": limit_shares([r.limits for r in each]),
                    "power_w": [round(r.power_w, 1) for r in each],
                    "sm_mhz": [r.sm_mhz for r in each],
                    "memory_mhz": [r.memory_mhz for r in each],
                }
            )
        seconds = [round(self.moments[i] - zero, 2) for i in within]
        return {"seconds": seconds, "gpus": gpus} | ({"problem": self.problem} if self.problem else {})


def limit_shares(bits: list[int]) -> dict[str, float]:
    """What held the clocks down, and in which share of the readings."""
    names = [{name for bit, name in LIMITS.items() if each & bit} for each in bits]
    seen = sorted(set().union(*names)) if names else []
    return {name: round(sum(name in each for each in names) / len(names), 3) for name in seen}


def describe(result: dict[str, Any]) -> list[list[str]]:
    """A line of cells for each GPU: its number and name, watts, MHz of the SMs, what limited it. One line
    that says why where there is none."""
    if "none" in result:
        return [[f"none ({result['none']})", "-", "-", "-"]]
    lines = []
    for index, gpu in enumerate(result["gpus"]):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in gpu["limited_by"].items())
        watts = f"{_text(gpu['median_power_w'])} / {_text(gpu['max_power_w'])} of {gpu['power_limit_w']:.0f}"
        clocks = f"{_text(gpu['median_sm_mhz'])} / {_text(gpu['min_sm_mhz'])} of {gpu['max_sm_mhz']}"
        told = shares or "nothing"
        lines.append([f"{index}: {gpu['name']}", watts, clocks, result.get("problem", told)])
    return lines


COLUMNS = ("GPU", "W, median / highest", "SM MHz, median / lowest", "limited by, share of the time")


def _median(values: list[Any]) -> float | None:
    return round(float(statistics.median(values)), 1) if values else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
