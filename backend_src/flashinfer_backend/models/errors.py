# SPDX-License-Identifier: Apache-2.0
"""What is raised for checkpoints that cannot be served."""


class UnsupportedModelError(ValueError):
    """The checkpoint is readable, but asks for something that these models do not compute."""
