"""Calls that wait for another thread's: Ctrl-C ends them, short reads pass them, and a forked child is told."""

from __future__ import annotations

import os
import sys

import pytest

from kvtools import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks are Unix's")

LONG_ATTEND = """
import os, signal, threading, time
import numpy as np
from kvcore import InvalidState
from kvtools import make_cache

n = 8192
cache = make_cache(num_layers=1, num_kv_heads=1, head_dim=128, num_blocks=1100, num_threads=1)
seq, other = cache.add(range(n)), cache.add(range(50))
x, q = np.ones((n, 1, 128), np.float32), np.ones((n, 32, 128), np.float32)
batch = cache.plan([(seq, n)])
cache.write(0, batch, x, x)
ended = threading.Event()

def attend():
    # Seconds of work; the process ends before the last of them.
    while True:
        cache.attend(0, batch, q)
        ended.set()

def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.2)
    return thread

def done():
    assert not ended.is_set(), "the long call ended too early: make it longer"
    print("done", flush=True)
    os._exit(0)
"""


def run(code: str) -> None:
    assert "done" in run_python(LONG_ATTEND + code, timeout=60)


@pytest.mark.parametrize(
    "call",
    ["append(other, [1, 2, 3])", "add([1])", "plan([(other, 1)])", "free(other)", "write(0, batch, x, x)", "close()"],
)
def test_ctrl_c_ends_a_change_that_waits(call: str) -> None:
    """While another thread attends; and nothing has been done."""
    run(f"""
start(attend)
threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
begin = time.monotonic()
try:
    cache.{call}
except KeyboardInterrupt:
    took = time.monotonic() - begin
else:
    raise SystemExit("the call waited to its end")
assert 0.2 < took < 1.3, took
assert cache.num_tokens(other) == 50
assert cache.stats()["num_sequences"] == 2
done()
""")


def test_short_reads_pass_a_change_that_waits() -> None:
    """They take no time, though one thread attends and another waits to change the cache."""
    run("""
start(attend)
waiting = start(lambda: cache.append(other, [1]))
for call in (cache.stats, cache.events, cache.snapshot, lambda: cache.num_tokens(other),
             lambda: cache.num_computed_tokens(other), lambda: cache.block_table(other),
             lambda: cache.token_ids(other), lambda: cache.num_free_blocks, lambda: cache.k_scale,
             lambda: batch.positions):
    begin = time.monotonic()
    call()
    assert time.monotonic() - begin < 0.2
assert waiting.is_alive()
done()
""")


def test_a_change_does_not_starve() -> None:
    """Two threads attend by turns and without a gap, so that there always is a read: the change comes in between."""
    run_python(
        """
import threading, time
import numpy as np
from kvtools import make_cache

n = 1024
cache = make_cache(num_layers=1, num_kv_heads=1, head_dim=128, num_blocks=200, num_threads=1)
seq, other = cache.add(range(n)), cache.add(range(50))
x, q = np.ones((n, 1, 128), np.float32), np.ones((n, 16, 128), np.float32)
batch = cache.plan([(seq, n)])
cache.write(0, batch, x, x)
stop = threading.Event()

def attend():
    while not stop.is_set():
        cache.attend(0, batch, q)

threads = [threading.Thread(target=attend) for _ in range(3)]
for thread in threads:
    thread.start()
for i in range(10):
    begin = time.monotonic()
    cache.append(other, [i])
    assert time.monotonic() - begin < 10
stop.set()
for thread in threads:
    thread.join()
assert cache.num_tokens(other) == 60
""",
        timeout=120,
    )


IN_A_CHILD = """
def in_child(work):
    # How a forked child ends that does this.
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("waits", [False, True])
def test_a_child_that_was_forked_in_the_middle_of_a_read(waits: bool) -> None:
    """Its reads work; a change says at once that it cannot be made. The parent goes on, with a waiting change, too."""
    run(
        IN_A_CHILD
        + f"waits = {waits}"
        + """
def work():
    assert cache.num_tokens(other) == 50
    assert cache.stats()["num_sequences"] == 2
    assert cache.read(0, other)[0].shape == (0, 1, 128)
    for call in (lambda: cache.append(other, [1]), lambda: cache.add([1]), cache.close):
        begin = time.monotonic()
        try:
            call()
        except InvalidState as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("changed")
        assert time.monotonic() - begin < 2
    mine = make_cache()
    mine.append(mine.add([1]), [2])

start(attend)
if waits:
    start(lambda: cache.append(other, [1]))
assert in_child(work) == 0
assert cache.num_tokens(other) == 50
done()
"""
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_was_forked_in_the_middle_of_a_change() -> None:
    """What it has of the cache may be half changed: every call says so."""
    run(
        IN_A_CHILD
        + """
def write():
    while True:
        cache.write(0, batch, x, x)

def work():
    for call in (lambda: cache.num_tokens(other), cache.stats, lambda: cache.append(other, [1])):
        try:
            call()
        except InvalidState as error:
            assert "fork" in str(error), error
            refused.append(1)
    assert len(refused) in (0, 3)
    os._exit(3 if refused else 0)

refused = []
start(write)
codes = {in_child(work) for _ in range(20)}
assert codes <= {0, 3} and 3 in codes, codes
done()
"""
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_of_an_idle_cache_use_it() -> None:
    """Also if another thread of the parent waits for something else, from several threads, and in grandchildren."""
    run(
        IN_A_CHILD
        + """
idle = make_cache(num_threads=2)
mine = idle.add(range(20))

def work():
    def call():
        for i in range(50):
            idle.append(mine, [i])
            idle.stats()
    threads = [threading.Thread(target=call) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert idle.num_tokens(mine) == 220
    batch = idle.plan([(mine, 220)])
    rows = np.ones((220, 2, 8), np.float32)
    for layer in range(2):
        idle.write(layer, batch, rows, rows)
        idle.attend(layer, batch, rows)
    idle.commit(batch)
    idle.check()

def twice():
    assert in_child(work) == 0
    work()

start(attend)
assert in_child(twice) == 0
assert idle.num_tokens(mine) == 20
done()
"""
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_in_a_signal_handler_in_the_middle_of_a_call() -> None:
    """The call goes on in the child, too; after it the child may change the cache."""
    run_python(
        LONG_ATTEND
        + """
pid = None

def handler(*_):
    global pid
    if pid is None:
        pid = os.fork()
        assert cache.num_tokens(other) == 50
        try:
            cache.append(other, [1])
        except InvalidState:
            raise InterruptedError
        raise SystemExit("a change in the middle of a read")

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    cache.attend(0, batch, q)
except InterruptedError:
    cache.append(other, [1, 2])
    assert cache.num_tokens(other) == 52
else:
    raise SystemExit("the long call ended too early: make it longer")
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
        timeout=60,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_a_signal_handler_forks_in_the_middle_of_a_call() -> None:
    """Its workers stayed in the parent: the call ends with an error there, and goes on here."""
    run_python(
        """
import os, signal, time
import numpy as np
from kvcore import InvalidState
from kvtools import make_cache

cache = make_cache(num_layers=1, num_kv_heads=2, head_dim=128, num_blocks=600, num_threads=2)
n = 8192
seq = cache.add(range(n))
batch = cache.plan([(seq, n)])
x, q = np.ones((n, 2, 128), np.float32), np.ones((n, 16, 128), np.float32)
cache.write(0, batch, x, x)
children = []

def handler(signum, frame):
    children.append(os.fork())

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    out = cache.attend(0, batch, q)
except InvalidState as error:
    assert children == [0] and "forked" in str(error), error
    # The child's own calls have workers of its own.
    again = cache.attend(0, batch, q)
    os._exit(0 if np.all(abs(again - 1) < 1e-2) else 3)
assert children and children[0] > 0, children
assert np.all(abs(out - 1) < 1e-2)
deadline = time.monotonic() + 60
while (done := os.waitpid(children[0], os.WNOHANG))[0] == 0:
    assert time.monotonic() < deadline, "the child hangs"
    time.sleep(0.05)
assert os.waitstatus_to_exitcode(done[1]) == 0, done
""",
        timeout=120,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_children_that_are_forked_while_another_thread_uses_the_same_workers() -> None:
    run_python(
        """
import os, threading, time
import numpy as np
from kvcore import KVCache, Threads

threads = Threads(2)

def prepared():
    cache = KVCache(num_layers=1, num_kv_heads=4, head_dim=64, num_blocks=64, dtype="float32", threads=threads)
    seq = cache.add(range(600))
    batch = cache.plan([(seq, 600)])
    x = np.ones((600, 4, 64), np.float32)
    cache.write(0, batch, x, x)
    return cache, batch, np.ones((600, 8, 64), np.float32)

mine, batch, q = prepared()
busy, busy_batch, busy_q = prepared()
stop = False

def work():
    while not stop:
        busy.attend(0, busy_batch, busy_q)

thread = threading.Thread(target=work, daemon=True)
thread.start()
for _ in range(60):
    pid = os.fork()
    if pid == 0:
        mine.attend(0, batch, q)
        os._exit(0)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.002)
    assert os.waitstatus_to_exitcode(done[1]) == 0, done
stop = True
thread.join()
""",
        timeout=120,
    )
