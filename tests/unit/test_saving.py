"""Saving in the background: one write at a time, errors raised, copies that training does not change."""

import threading

import pytest
import torch

from sedd.training.trainer import BackgroundWriter, copy_to_host


def test_one_write_at_a_time_while_work_goes_on() -> None:
    writer, begun, allowed, written = BackgroundWriter(True), threading.Event(), threading.Event(), list[int]()

    def write() -> None:
        begun.set()
        assert allowed.wait(10)
        written.append(1)

    writer.submit(write)
    assert begun.wait(10)
    writer.check()  # does not wait
    assert written == []
    threading.Timer(0.05, allowed.set).start()
    writer.submit(lambda: written.append(2))  # waits for the first
    assert written[0] == 1
    writer.wait()
    assert written == [1, 2]


@pytest.mark.parametrize("call", ["check", "wait", "submit"])
def test_the_error_of_a_write_is_raised_once(call: str) -> None:
    def fail() -> None:
        raise ValueError("the disk is full")

    writer = BackgroundWriter(True)
    writer.submit(fail)
    while call == "check" and not writer._pending.done():  # type: ignore[union-attr]
        pass
    with pytest.raises(ValueError, match="the disk is full"):
        writer.submit(lambda: None) if call == "submit" else getattr(writer, call)()
    writer.wait()
    with pytest.raises(ValueError, match="the disk is full"):
        BackgroundWriter(False).submit(fail)


def test_copies_do_not_change() -> None:
    weights = {"w": torch.ones(2, 3).t(), "s": torch.tensor(1.0)}
    copies = copy_to_host({"model": weights})["model"]
    for value in weights.values():
        value += 1
    assert torch.equal(copies["w"], torch.ones(3, 2))
    assert copies["w"].is_contiguous()
    assert copies["s"] == 1
