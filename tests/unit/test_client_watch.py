# SPDX-License-Identifier: Apache-2.0
"""Clients of the ensemble that have left, found out by what postprocessing does not see; and its tables."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashinfer_backend.transport import delivery_marks
from flashinfer_backend.transport.delivery_marks import ENTRIES, DeliveryMarker, DeliveryMarks
from flashinfer_backend.transport.protocol import make_handle
from flashinfer_backend.triton_server.client_watch import MOST_LOOKS, ClientWatch, DepartedClients

PID = 4321


@pytest.fixture
def table(tmp_path):
    table = DeliveryMarks(tmp_path, PID)
    yield table
    table.close()


@pytest.fixture
def marker(tmp_path, table):
    return DeliveryMarker(tmp_path)


def test_marks_are_seen_by_the_stub_they_belong_to(tmp_path, table, marker):
    other = DeliveryMarks(tmp_path, PID + 1)
    before = time.monotonic_ns()
    marker.mark(make_handle(PID, 7), 1)
    marker.mark(make_handle(PID + 1, 8), 1)
    for stub, of_it, of_the_other in ((table, 7, 8), (other, 8, 7)):
        assert before <= stub.last(make_handle(PID, of_it)) <= time.monotonic_ns()
        assert stub.last(make_handle(PID, of_the_other)) == 0


def test_slots_are_used_again(table, marker):
    marker.mark(make_handle(PID, 7), 1)
    later = make_handle(PID, 7 + ENTRIES)
    assert table.last(later) > 0
    table.begin(later, 5)
    assert (table.last(later), table.newest(later)) == (0, 5)


def test_the_newest_chunk_counts_in_whatever_order_they_are_seen(table, marker):
    handle = make_handle(PID, 7)
    table.begin(handle, 100)
    newest = []
    for sent_ns in (100, 300, 200, 400):
        marker.mark(handle, sent_ns)
        newest.append(table.newest(handle))
    assert newest == [100, 300, 300, 400]


def test_tables_are_looked_for_anew_now_and_then(tmp_path, table, marker, monkeypatch):
    monkeypatch.setattr(delivery_marks, "LOOK_AGAIN_NS", 10**12)
    handle, late = make_handle(PID, 7), make_handle(PID + 1, 7)
    for each in (handle, late):
        marker.mark(each, 1)
    mapped, other = marker._times[PID], DeliveryMarks(tmp_path, PID + 1)
    for each in (handle, late):
        marker.mark(each, 2)
    assert marker._times[PID] is mapped and other.last(late) == 0
    marker._look_again = 0
    marker.mark(late, 3)
    assert other.newest(late) == 3


def test_a_stub_without_a_table_is_not_marked(tmp_path, marker):
    marker.mark(make_handle(PID + 5, 1), 1)
    marker.mark(0, 0)
    assert [file.name for file in tmp_path.iterdir()] == [f"marks-{PID}"]


class Stream:
    """A sequence that sends chunks, a client that may leave, and the probes that were sent."""

    def __init__(self, table, marker, probe_works=True):
        self.handle, self.marker, self.probes, self.probe_works = make_handle(PID, 3), marker, 0, probe_works
        self.queued, self.left, self.sent_at = False, False, 0
        self.clients = DepartedClients(table, self.probe)

    def probe(self):
        self.probes += 1
        if self.queued:  # first in, first out: what waits in front of the probe is seen before it
            self.marker.mark(self.handle, self.sent_at)
        return self.probe_works

    def send(self):
        self.sent_at = time.monotonic_ns()
        if not self.left and not self.queued:
            self.marker.mark(self.handle, self.sent_at)

    def check(self):
        return self.clients.check({self.handle: self.sent_at})


def test_a_client_that_stays_is_never_probed_for(table, marker):
    stream = Stream(table, marker)
    assert stream.check() == [], "nothing sent yet"
    for _ in range(5):
        stream.send()
        assert stream.check() == []
    for _ in range(3):  # generation pauses
        assert stream.check() == []
    assert stream.probes == 0


@pytest.mark.parametrize("marks", [[5], [4, 5]])
def test_a_chunk_seen_at_the_time_that_it_was_sent_was_not_missed(marks):
    """Before a probe is sent, or while it waits."""
    last = iter(marks)
    stream = Stream(SimpleNamespace(last=lambda handle: next(last)), None)
    stream.sent_at = 5
    assert [stream.check(), stream.check()] == [[], []] and stream.probes == len(marks) - 1


def test_a_client_that_left_before_the_first_chunk(table, marker):
    stream = Stream(table, marker)
    stream.left = True
    assert [stream.check(), stream.check()] == [[], []]
    stream.send()
    assert [stream.check(), stream.check()] == [[], [stream.handle]]


def test_a_queue_that_is_behind_is_no_departure(table, marker):
    stream = Stream(table, marker)
    stream.queued = True
    for _ in range(4):
        stream.send()
        assert stream.check() == []
    assert stream.probes > 0


def test_a_probe_that_failed_proves_nothing(table, marker):
    stream = Stream(table, marker, probe_works=False)
    stream.left = True
    stream.send()
    assert [stream.check() for _ in range(3)] == [[], [], []]
    assert stream.probes == 2


@pytest.mark.parametrize("seen", [[], [7], [8]])
def test_only_a_request_of_which_nothing_was_seen_is_unread(table, marker, seen):
    """Whoever had a chunk of one of its sequences did request text_output."""
    for local_id in seen:
        marker.mark(make_handle(PID, local_id), 1)
    sequences = [SimpleNamespace(handle=make_handle(PID, n), ended=False, sent_at=0) for n in (7, 8)]
    request = SimpleNamespace(in_ensemble=True, sequences=sequences, unread=False)
    cancelled = []
    watch = ClientWatch(lambda: [request], cancelled.append, table, lambda: True, 0)
    for sequence in sequences:
        sequence.sent_at = time.monotonic_ns()
    for _ in range(2):
        watch.check()
    assert cancelled == [sequence.handle for sequence in sequences]
    assert request.unread == (not seen)


class DirectRequest:
    """An open request of a direct client, which counts how often the server is asked about it."""

    def __init__(self):
        self.in_ensemble, self.sequences = False, [SimpleNamespace(handle=1, ended=False, sent_at=0)]
        self.left, self.asked, self.cancelled = False, 0, False

    def is_cancelled(self):
        self.asked += 1
        return self.left

    def cancel_all(self):
        self.cancelled = True


def test_a_check_looks_at_so_many_direct_clients_and_the_next_goes_on(table):
    requests = [DirectRequest() for _ in range(17_000)]
    watch = ClientWatch(lambda: list(requests), lambda _: None, table, lambda: True, 0)
    for request in requests[::1000]:
        request.left = True
    asked = 0
    for _ in range(-(-len(requests) // MOST_LOOKS)):
        watch.check()
        now_asked = sum(request.asked for request in requests)
        assert 0 < now_asked - asked <= MOST_LOOKS
        asked = now_asked
    assert all(request.asked == 1 for request in requests)
    assert [request.cancelled for request in requests] == [request.left for request in requests]
    requests[:] = requests[:50]  # few again: all at every check
    for _ in range(2):
        watch.check()
    assert all(request.asked == 3 for request in requests)


def test_departed_clients_of_the_ensemble_are_found_among_many(table, marker):
    sequences = [SimpleNamespace(handle=make_handle(PID, n), ended=False, sent_at=1) for n in range(5000)]
    gone = {sequence.handle for sequence in sequences[::700]}
    for sequence in sequences:
        if sequence.handle not in gone:
            marker.mark(sequence.handle, 1)
    pairs = zip(sequences[::2], sequences[1::2], strict=True)
    requests = [SimpleNamespace(in_ensemble=True, sequences=list(pair), unread=False) for pair in pairs]
    looked, cancelled = [], []
    last = table.last

    class Table:
        def last(self, handle):
            looked.append(handle)
            return last(handle)

    watch = ClientWatch(lambda: list(requests), cancelled.append, Table(), lambda: True, 0)
    checks = -(-len(sequences) // MOST_LOOKS)
    for _ in range(checks):
        watch.check()
    assert cancelled == [], "each chunk is given a round"
    for _ in range(checks):
        looked.clear()
        watch.check()
        assert len(set(looked)) <= MOST_LOOKS + 1
    assert set(cancelled) == gone and len(cancelled) == len(gone)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for stubs that are gone does so at every chunk."""
    monkeypatch.setattr(delivery_marks, "LOOK_AGAIN_NS", -1)


def mapped(folder: Path) -> list[str]:
    """Files in a folder that this process has mapped, those that were removed among them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(f"{folder}/")[1] for line in lines if f"{folder}/marks-" in line]


@pytest.mark.usefixtures("at_once")
def test_tables_of_stubs_that_ended_are_not_kept(tmp_path: Path) -> None:
    marker = DeliveryMarker(tmp_path)
    for pid in range(PID, PID + 5):
        table = DeliveryMarks(tmp_path, pid)
        marker.mark(make_handle(pid, 1), 1)
        assert table.last(make_handle(pid, 1))
        table.close()
        del table
    marker.mark(make_handle(PID + 9, 1), 1)
    assert mapped(tmp_path) == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("killed", [True, False])
def test_a_stub_with_the_pid_of_another_is_marked(tmp_path: Path, killed: bool) -> None:
    handle, marker = make_handle(PID, 1), DeliveryMarker(tmp_path)
    old = DeliveryMarks(tmp_path, PID)
    marker.mark(handle, 1)
    if not killed:
        old.close()
    new = DeliveryMarks(tmp_path, PID)
    assert new.last(handle) == 0
    marker.mark(handle, 2)
    assert new.last(handle) and (old.newest(handle), new.newest(handle)) == (1, 2)


FULL = """
mount -t tmpfs -o size=256k tmpfs "$1" || exit 77
exec "$2" -c "
import sys; from pathlib import Path
from flashinfer_backend.transport.delivery_marks import ENTRIES, DeliveryMarks
try:
    table = DeliveryMarks(Path(sys.argv[1]), 1)
except OSError as error:
    sys.exit(error.strerror)
for number in range(0, ENTRIES, 512):
    table.begin(number, 1)" "$1"
"""


def test_a_full_disk_is_said_when_the_table_is_made(tmp_path: Path) -> None:
    command = ["unshare", "-rm", "bash", "-c", FULL, "bash", str(tmp_path), sys.executable]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip("this system lets users mount nothing")
    assert ended.returncode == 1 and ended.stderr.startswith("No space left on device; make room there")
