"""Streams and events where nothing is ever under way."""

import time

from amplab.scripts.cpu_streams import Event, Scope, Stream, device_properties


def test_events_measure_milliseconds():
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 20 <= start.elapsed_time(end) < 20_000
    assert end.query()


def test_streams_are_done_and_usable_as_blocks():
    stream = Stream(priority=-1)
    with stream, Scope(stream):
        event = stream.record_event()
    stream.wait_event(event)
    stream.wait_stream(Stream())
    stream.synchronize()
    assert stream.query()
    assert isinstance(stream.record_event(event), Event)


def test_the_device_has_memory_and_a_capability():
    properties = device_properties(0)
    assert properties.total_memory > 0
    assert (properties.major, properties.minor) == (7, 0)
