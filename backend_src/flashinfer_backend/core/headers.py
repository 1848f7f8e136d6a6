# SPDX-License-Identifier: Apache-2.0
"""Headers that serve has tritonserver hand to the models as parameters, so that they can tell which answers
it will write as JSON. No other parameter says so.

HTTP generate forwards no headers, so what has neither of these is JSON. A client can pretend, by a parameter
of that name: what is made of this only keeps clients from harm that they do not intend.
"""

GRPC = "user-agent"  # every gRPC library sends it
BINARY = "inference-header-content-length"  # HTTP infer with binary inputs, whose outputs are also binary
FORWARDED = {"--grpc-header-forward-pattern": f"^{GRPC}$", "--http-header-forward-pattern": f"(?i)^{BINARY}$"}


def forwarding(server_args: list[str]) -> list[str]:
    """Arguments for tritonserver that have it forward these headers in addition to those of
    `server_args`. They go after those, since the last one of a name counts."""
    args = []
    for option, pattern in FORWARDED.items():
        for number, arg in enumerate(server_args):
            name, given, value = arg.partition("=")
            if name == option:
                value = value if given else "".join(server_args[number + 1 : number + 2])
                pattern = f"{value}|{FORWARDED[option]}"
        args += [option, pattern]
    return args


def is_json(parameters: str) -> bool:
    """Whether tritonserver writes the answer to a request with these parameters (JSON) as JSON."""
    lower = parameters.lower()
    return f'"{GRPC}"' not in lower and f'"{BINARY}"' not in lower
