# SPDX-License-Identifier: Apache-2.0
"""Where the server listens: addresses of host names, ports that are free, URLs that reach it."""

import errno
import ipaddress
import resource
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
STALLED_S = 60  # by default
MOST_FILES = 1 << 16  # containers often allow a thousand million, which some programs walk through


class AddressError(ValueError):
    """The server cannot listen there; the text says what to do."""


def resolve(host: str) -> Address:
    """The address of a host name or of an address as text; IPv4 where a name has both. Raises AddressError.

    The server takes addresses only: given a name, its HTTP service says that it started and is not there.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AddressError(f"--host {host}: {reason}; give an address of this machine") from None
    place = min(found, key=lambda info: info[0] != socket.AF_INET)[4]  # the first of its kind
    if any(place[3:]):
        raise AddressError(
            f"--host {host}: tritonserver takes no address with a scope; give another of this machine"
        )
    return ipaddress.ip_address(place[0])


def check_ports(address: Address, ports: dict[str, int]) -> None:
    """Raises AddressError naming a port that cannot be listened on: one that is taken, that two of `ports`
    share, or 0, which would be another one than was asked for. ports: by what each is for."""
    names: dict[int, str] = {}
    for name, port in ports.items():
        if port == 0:
            raise AddressError(f"{name} is 0: name one of 1 to 65535, which clients can be told")
        if (other := names.setdefault(port, name)) != name:
            raise AddressError(f"{other} and {name} are both {port}: use different ones")
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((str(address), port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or "ports are 1 to 65535"
                if getattr(error, "errno", 0) == errno.EADDRINUSE:
                    reason += "; end what listens there, or name another port"
                raise AddressError(f"{name} {port} on {address} cannot be used: {reason}") from None


def cut_stalled_clients(listener: socket.socket, seconds: int) -> None:
    """Makes the kernel close each connection of a listening socket to which nothing more could be sent for
    `seconds`, since its client reads too little; 0: never. Connections made after that inherit it."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def raise_open_files(most: int = MOST_FILES) -> int:
    """Lets this process, and those that it starts, have as many files and connections open as the system
    allows, up to `most`; how many that is. Shells and service managers commonly give 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = most if hard == unlimited else min(most, hard)
    if soft == unlimited or soft >= wanted:
        return most if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def reachable_at(address: Address, port: int) -> str:
    """URL under which this machine reaches a server that listens on `address`."""
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"
