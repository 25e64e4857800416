"""Who a client is, where clients share something fairly."""

import ipaddress
from typing import Any

NETWORK = 64  # bits of an IPv6 address that its owner cannot choose


def client_of(address: Any) -> str:
    """Return the name of the client at an address (host, port): an IPv4 address, or the network of an IPv6 address,
    whose owner has 2^64 of them."""
    host = str(address[0]).partition("%")[0] if address else "-"
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if found.version == 4 or found.is_loopback:
        return host
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), NETWORK), strict=False))
