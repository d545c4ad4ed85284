"""What a region does to functions of every kind, and to `forward` under DataParallel's threads and under DDP."""

import asyncio
import copy
import functools
import inspect
import pickle
import threading

import pytest
import torch

import amplab
from amplab import amp

X = torch.ones(2, 2)
HALF = torch.float16
half = amplab.autocast("cpu", HALF)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert dtype() is torch.float32


def dtype():
    return (X @ X).dtype


class Model(torch.nn.Module):
    """Says in which dtype it computed."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    @half
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Scale a linear map."""
        hidden = self.linear(x)
        assert hidden.dtype is HALF
        return (hidden * scale).float()


def test_name_docstring_and_signature_are_kept():
    assert Model.forward.__name__ == "forward"
    assert Model.forward.__doc__ == "Scale a linear map."
    assert str(inspect.signature(Model.forward)) == "(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor"
    model = pickle.loads(pickle.dumps(copy.deepcopy(Model())))
    assert model(torch.ones(1, 4), scale=2.0).dtype is torch.float32


def test_exceptions_pass_and_the_region_ends():
    @half
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_other_callables():
    assert half(functools.partial(lambda a, b: (a @ b).dtype, X))(X) is HALF
    assert half(Model())(torch.ones(1, 4)).dtype is torch.float32
    assert half(staticmethod(dtype).__func__)() is HALF


def dtypes(autocast):
    @autocast("cpu", HALF)
    def generator():
        yield (X @ X).dtype
        yield (X @ X).dtype

    return list(generator())


def test_a_generators_body_is_inside():
    assert dtypes(torch.autocast) == [torch.float32] * 2  # torch's decorator ends before the body begins
    assert dtypes(amplab.autocast) == [HALF] * 2


def test_between_two_slices_of_a_generator_the_caller_is_as_before():
    @half
    def generator():
        try:
            received = yield dtype()
            yield received, dtype()
            yield dtype()
        except KeyError:
            yield "caught", dtype()
            return "returned"

    def delegating():
        seen.append((yield from generator()))

    seen = []
    steps = delegating()
    assert inspect.isgeneratorfunction(generator)
    assert next(steps) is HALF
    assert dtype() is torch.float32
    assert steps.send("sent") == ("sent", HALF)
    with amplab.autocast("cpu"):
        assert dtype() is torch.bfloat16
    assert steps.throw(KeyError) == ("caught", HALF)
    assert dtype() is torch.float32
    assert list(steps) == []
    assert seen == ["returned"]


def test_a_generator_is_closed_inside():
    seen = []

    @half
    def generator():
        try:
            yield
        finally:
            seen.append(dtype())

    steps = generator()
    next(steps)
    steps.close()
    assert seen == [HALF]


def test_two_generators_in_turns():
    @half
    def first():
        for _ in range(3):
            yield dtype()

    @amplab.autocast("cpu", torch.bfloat16)
    def second():
        for _ in range(3):
            yield dtype()

    assert list(zip(first(), second(), strict=True)) == [(HALF, torch.bfloat16)] * 3


def test_coroutines_cast_while_they_run_and_not_while_they_wait():
    @half
    async def work():
        before = dtype()
        ready.set()
        await go.wait()
        return before, dtype()

    async def beside():
        await ready.wait()
        seen = dtype()
        go.set()
        return seen

    async def both():
        return await asyncio.gather(work(), beside())

    ready, go = asyncio.Event(), asyncio.Event()
    assert inspect.iscoroutinefunction(work)
    assert asyncio.run(both()) == [(HALF, HALF), torch.float32]


def test_a_coroutine_is_cancelled_inside():
    seen = []

    @half
    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(dtype())
            raise

    async def cancel():
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert seen == [HALF]


def test_asynchronous_generators():
    seen = []

    @half
    async def generator():
        try:
            received = yield dtype()
            await asyncio.sleep(0)
            try:
                yield received, dtype()
            except KeyError:
                yield "caught", dtype()
            yield dtype()
        finally:
            seen.append(dtype())

    async def drive():
        steps = generator()
        assert await anext(steps) is HALF
        assert dtype() is torch.float32
        assert await steps.asend("sent") == ("sent", HALF)
        assert await steps.athrow(KeyError) == ("caught", HALF)
        assert dtype() is torch.float32
        await steps.aclose()
        return [step async for step in generator()]

    assert inspect.isasyncgenfunction(generator)
    assert asyncio.run(drive()) == [HALF, (None, HALF), HALF]
    assert seen == [HALF, HALF]


def in_threads(replicas, x):
    """What torch.nn.parallel.parallel_apply does; that needs an accelerator."""
    results = {}

    def work(index, replica):
        results[index] = replica(x)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(replicas))]


def test_a_decorated_forward_casts_in_the_threads_of_data_parallel():
    model, x = Model(), torch.randn(3, 4)
    replicas = [copy.deepcopy(model) for _ in range(3)]
    for output in in_threads(replicas, x):
        assert torch.equal(output, model(x))
    assert torch.equal(torch.nn.DataParallel(model)(x), model(x))


def test_an_initialized_model_casts_in_the_threads_of_data_parallel():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(3, 4)
    amp.initialize(model, opt_level="O1", verbosity=0)
    expected = model(x)
    outputs = in_threads([copy.deepcopy(model) for _ in range(3)], x)
    amp.reset()
    assert expected.dtype is HALF
    assert all(torch.equal(output, expected) for output in outputs)
