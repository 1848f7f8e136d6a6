# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the engines of a model get: gpu_device_ids, in the words of CUDA_VISIBLE_DEVICES."""

from collections.abc import Mapping

from flashinfer_backend.core.config import EngineConfig, device_contradictions

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(config: EngineConfig, environment: Mapping[str, str]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each engine, None where it is this process's own. Engine 0 of `auto` has the
    first GPUs that this process may see. Whether they are there is seen by the engine itself.

    Raises ValueError where gpu_device_ids contradicts other settings, or CUDA_VISIBLE_DEVICES has too few.
    """
    if problems := device_contradictions(config):
        raise ValueError("; ".join(problems))
    groups, each = config.gpu_device_ids, config.tensor_parallel_size
    shown = _shown(environment.get(DEVICES_VARIABLE))
    chosen = not isinstance(groups, str)
    if config.device == "cpu" or (not chosen and (config.replicas == 1 or shown == [])):
        return [None] * config.replicas
    if isinstance(groups, str):
        groups = [list(range(first, first + each)) for first in range(0, each * config.replicas, each)]
    highest = max(number for group in groups for number in group)
    if shown is not None and highest >= len(shown):
        text = ";".join(",".join(map(str, group)) for group in groups)
        asked = f"gpu_device_ids={text}" if chosen else f"replicas={config.replicas}"
        raise ValueError(
            f"{asked} needs {highest + 1} GPUs, and {DEVICES_VARIABLE}={environment[DEVICES_VARIABLE]} shows "
            f"{len(shown)}: name more GPUs there, or set "
            + ("gpu_device_ids to numbers below that" if chosen else f"replicas={len(shown) // each or 1}")
        )
    return [",".join(shown[n] if shown is not None else str(n) for n in group) for group in groups]


def _shown(listed: str | None) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, by number or name; None for all. CUDA reads it up to the
    first entry that is none, such as -1."""
    if listed is None:
        return None
    names = [name.strip() for name in listed.split(",")]
    end = next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:end]
