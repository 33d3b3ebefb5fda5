"""Forks of the tests' own process."""

import gc
import os

import pytest


class Fatal:
    """Ends any process but the one that made it, as native code does without its threads."""

    def __init__(self):
        self.owner, self.itself = os.getpid(), self  # a cycle, which only a collection frees

    def __del__(self):
        if os.getpid() != self.owner:
            os._exit(7)


@pytest.mark.slow
def test_a_fork_leaves_the_garbage_of_its_parent_alone():
    gc.disable()
    try:
        Fatal()
        if not (child := os.fork()):
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
