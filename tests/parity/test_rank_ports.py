"""Ports that tests give to ranks."""

import socket

from rank_ports import free_ports


def test_they_are_free_in_a_row_and_none_that_the_system_gives_to_connections():
    first = free_ports(3)

    assert 20_000 <= first < 30_000
    for port in range(first, first + 3):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", port))


def test_one_on_which_a_program_listens_is_passed_over(monkeypatch):
    free = free_ports()
    with socket.create_server(("127.0.0.1", 0)) as program:
        taken = program.getsockname()[1]
        monkeypatch.setattr("rank_ports.SystemRandom.sample", lambda *_: [taken, free])

        assert free_ports() == free
