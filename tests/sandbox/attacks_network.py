"""Attempts to reach anything beyond the sandbox: by every family of sockets, and around them."""

from __future__ import annotations

from tests.sandbox.arena import Arena, attack

FAMILIES = {
    "netlink": 16,
    "packet": 17,
    "bluetooth": 31,
    "algorithms_of_the_kernel": 38,
    "virtual_machine": 40,
    "xdp": 44,
}


@attack()
def connects_to_a_server_of_the_host_over_tcp(arena: Arena) -> None:
    arena.refused(f"attempt(socket.create_connection, {arena.address('inet')!r}, 1)", "PermissionError")
    assert arena.nobody_called()


@attack()
def connects_to_a_server_of_the_host_over_ipv6(arena: Arena) -> None:
    arena.refused(f"attempt(socket.create_connection, {arena.address('inet6')[:2]!r}, 1)", "PermissionError")
    assert arena.nobody_called()


@attack()
def sends_a_datagram_to_the_host(arena: Arena) -> None:
    arena.refused(
        f"attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {arena.udp.getsockname()!r}))"
    )
    assert arena.nobody_called()


@attack()
def connects_to_a_unix_socket_of_the_host(arena: Arena) -> None:
    arena.refused(f"attempt(lambda: socket.socket(socket.AF_UNIX).connect({arena.address('unix')!r}))")
    assert arena.nobody_called()


@attack()
def connects_to_an_abstract_unix_socket(arena: Arena) -> None:
    arena.refused(f"attempt(lambda: socket.socket(socket.AF_UNIX).connect({arena.address('abstract')!r}))")
    assert arena.nobody_called()


@attack()
def connects_a_socket_that_came_from_socketpair(arena: Arena) -> None:
    address = arena.address("abstract")
    arena.refused(
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"[attempt(a.connect, {address!r}), attempt(a.bind, 'here'), attempt(a.listen)]",
        "PermissionError",
    )
    assert arena.nobody_called()


@attack()
def sends_to_a_named_address_over_a_socketpair(arena: Arena) -> None:
    arena.refused(
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"attempt(a.sendto, b'x', {arena.address('unix')!r})"
    )
    assert arena.nobody_called()


@attack()
def makes_a_pair_of_sockets_of_another_family(arena: Arena) -> None:
    arena.refused("[attempt(socket.socketpair, family) for family in (socket.AF_INET, 30, 16)]")


@attack()
def opens_a_raw_socket(arena: Arena) -> None:
    arena.refused("attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)", "PermissionError")


@attack()
def opens_a_socket_of_every_other_family(arena: Arena) -> None:
    arena.refused(f"[attempt(call, 'socket', family, 3, 0) for family in {list(FAMILIES.values())}]", "Errno 1]")


@attack()
def opens_a_socket_of_any_family_there_may_ever_be(arena: Arena) -> None:
    arena.refused(
        "[attempt(call, 'socket', family, kind, 0) for family in range(64) for kind in (1, 2, 5)]", "Errno 1]"
    )


@attack()
def asks_a_name_server(arena: Arena) -> None:
    arena.refused("attempt(socket.getaddrinfo, 'example.com', 80)", "gaierror", "PermissionError")


@attack()
def serves_on_a_port(arena: Arena) -> None:
    arena.refused("attempt(socket.create_server, ('127.0.0.1', 0))", "PermissionError")


@attack("full")
def connects_by_the_shells_own_means(arena: Arena) -> None:
    host, port = arena.address("inet")
    result = arena.bash(f"exec 3<>/dev/tcp/{host}/{port} && echo GOT")
    assert "GOT" not in result.stdout
    assert result.status == "error"
    assert arena.nobody_called()


@attack("full")
def sees_the_hosts_network_devices(arena: Arena) -> None:
    arena.refused("[attempt(read, '/proc/net/dev'), attempt(os.listdir, '/sys')]")
    assert arena.bash("cat /proc/net/route /proc/net/unix").status == "error"
