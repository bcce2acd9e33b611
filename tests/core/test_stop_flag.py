"""Work that runs in another thread stops if nobody waits for it."""

import threading
import time

import pytest

from knowgate.core.stop_flag import StopError, check_stop_flag, open_stoppable_context


def test_without_a_flag_nothing_stops():
    check_stop_flag()


def test_work_in_a_thread_stops_when_the_block_is_left():
    has_started, errors = threading.Event(), []

    def work():
        has_started.set()
        try:
            for _ in range(1_000):
                check_stop_flag()
                time.sleep(0.01)
        except StopError as error:
            errors.append(error)

    with open_stoppable_context() as context:
        thread = threading.Thread(target=context.run, args=(work,))
        thread.start()
        assert has_started.wait(5)
    thread.join(5)
    assert len(errors) == 1
    check_stop_flag()  # the flag is set only in the context of the work


def test_each_block_has_its_own_flag():
    with open_stoppable_context() as outer:
        with open_stoppable_context() as inner:
            pass
        outer.run(check_stop_flag)
        with pytest.raises(StopError):
            inner.run(check_stop_flag)
